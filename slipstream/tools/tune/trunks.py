"""Level 1: trains the proxies. A trunk keeps its peak rate after the warm-up, and its branches decay from copies of it.

Sizes run from the smallest to the largest. For each, first the learning rates at the middle batch, then the other
batches near the best rate and one synchronous trunk if the target is delayed, then further batches as long as the best
one is at the edge. From the second size on, rates and batches are centred on what the sizes before predict. What is
left of the budget pays for rates in between, on all sizes. Trunks that do not need each other's losses may run at the
same time. A finished trunk is a file and is never run again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import torch

from ...checkpoint.files import write_file
from ...checkpoint.hugging_face import fingerprint
from ...config.optimizers import learning_rate
from ...data import text_size
from ...errors import ConfigError, RunFailure
from ...train.build import build_components, read_corpus
from ...train.resume import text_facts
from ..study.cell import Cell
from ..study.delayed import DelayedRun
from ..study.workers import Messages, tell
from .advice import SPECTRAL, decay_steps, from_laws, is_delayed
from .fit import End, Fit, Prior, fit, priors
from .laws import measured_gap
from .proxies import BATCH_FACTORS, FINER_RATES, FIRST_RATES, MIN_STEPS, RATES, Proxy

MAX_EXTENSIONS = 3
"""Most rates, and most batches, that are added because the best one is at the edge."""
TELL_SECONDS = 0.5
"""Seconds between two messages of a worker."""
USUAL_BYTES = 4.0
"""Bytes of a token of text, where the tokenizer does not say how many bytes its tokens have."""


@dataclass(frozen=True)
class Record:
    """A finished trunk."""

    id: str
    size: str
    parameters: float
    rate: float
    batch: int
    """Tokens in a step."""
    is_late: bool
    steps: list[int]
    """Steps of each branch."""
    losses: list[float | None]
    """Held-out loss at the end of each branch. None means that it diverged."""
    flops: float
    seconds: float

    def ends(self) -> list[End]:
        return [
            End(self.id, self.parameters, steps * self.batch, self.batch, self.rate, self.is_late, loss)
            for steps, loss in zip(self.steps, self.losses, strict=True)
            if loss is not None
        ]

    @property
    def middle_loss(self) -> float:
        """Returns the loss of the middle branch, or inf if it diverged."""
        loss = self.losses[len(self.losses) // 2]
        return math.inf if loss is None else loss


Progress = Callable[[float], None]
"""Function that is told the FLOPs made since the last call."""
Workers = tuple[ProcessPoolExecutor, Messages]


@dataclass(frozen=True)
class Trunk:
    """What is to be run."""

    proxy: Proxy
    rate: float
    """It is rounded to three digits."""
    batch: int
    """Sequences in a step."""
    is_late: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", float(f"{self.rate:.3g}"))

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.proxy.model.sequence_length

    @cached_property
    def cell(self) -> Cell:
        return self.proxy.cell(self.rate, self.batch, self.is_late)

    @cached_property
    def id(self) -> str:
        """Names what is run. The files of the text, and the folder of weights, may have another content by now."""
        config = self.cell.config
        corpus, initial = read_corpus(config.data), config.model.initial
        names = [self.cell.id, str(self.proxy.horizons(self.batch)), str(initial and fingerprint(Path(initial)))]
        names += [str(text_facts(tokens, 0, len(tokens))) for tokens in (corpus.train, corpus.validation)]
        return hashlib.sha256(" ".join(names).encode()).hexdigest()[:12]


class Laboratory:
    """Runs trunks and keeps their records in a folder."""

    def __init__(
        self, folder: Path, budget: float, progress: Progress, say: Callable[[str], None], workers: Workers | None
    ) -> None:
        """workers: pool and queue of `worker_pool`. None means that trunks run here, one after the other."""
        self._folder, self._budget, self._progress, self._say = folder, budget, progress, say
        self._workers = workers
        self.records: dict[str, Record] = {}

    def affordable(self, wanted: Sequence[Trunk]) -> list[Trunk]:
        """Returns the trunks that the rest of the budget pays for, the first ones first."""
        left, found = self._budget - sum(record.flops for record in self.records.values()), []
        paid = set(self.records)
        for trunk in wanted:
            cost = 0.0 if trunk.id in paid else trunk.proxy.flops(trunk.batch)
            if cost <= left:
                left -= cost
                paid.add(trunk.id)
                found.append(trunk)
        return found

    def run(self, wanted: Sequence[Trunk]) -> list[Record]:
        """Runs those that have no record, at the same time if there are workers. Returns the records of all."""
        missing: dict[str, Trunk] = {}
        for trunk in wanted:
            if trunk.id in self.records:
                continue
            if (path := self._folder / f"{trunk.id}.json").exists():
                record = _read(path)
                self._progress(record.flops)
                self._keep(record)
            else:
                missing[trunk.id] = trunk
        if not self.records and (others := list(self._folder.glob("*.json"))):
            self._say(f"trunks of other text or settings in {self._folder}, which are not used: {len(others)}")
        for record in self._run(missing.values()):
            write_file(self._folder / f"{record.id}.json", [f"{json.dumps(asdict(record))}\n".encode()])
            self._keep(record)
        return [self.records[trunk.id] for trunk in wanted]

    def _run(self, trunks: Iterable[Trunk]) -> Iterator[Record]:
        if self._workers is None:
            yield from (run(trunk, self._progress) for trunk in trunks)
            return
        pool, messages = self._workers
        running = {pool.submit(_work, trunk) for trunk in trunks}
        while running:
            finished, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            while not messages.empty():
                self._progress(messages.get())
            for future in finished:
                try:
                    yield future.result()
                except BrokenProcessPool:
                    raise RunFailure(
                        "a worker died, perhaps for want of memory: start again with fewer --jobs; finished models are "
                        "kept"
                    ) from None

    def _keep(self, record: Record) -> None:
        self.records[record.id] = record
        self._say(f"[{len(self.records)}] {sentence(record)}")


def run(trunk: Trunk, progress: Progress) -> Record:
    proxy, horizons = trunk.proxy, trunk.proxy.horizons(trunk.batch)
    started = time.perf_counter()
    losses = run_trunk(trunk.cell, horizons, progress, proxy.size.flops_per_token)
    return Record(
        trunk.id,
        proxy.name,
        proxy.size.parameters,
        trunk.rate,
        trunk.tokens,
        trunk.is_late,
        list(horizons),
        losses,
        proxy.flops(trunk.batch),
        time.perf_counter() - started,
    )


def _work(trunk: Trunk) -> Record:
    """Runs a trunk in a worker."""
    made, told = 0.0, time.monotonic()

    def progress(flops: float) -> None:
        nonlocal made, told
        made += flops
        if (now := time.monotonic()) > told + TELL_SECONDS:
            tell(made)
            made, told = 0.0, now

    record = run(trunk, progress)
    tell(made)
    return record


def sentence(record: Record) -> str:
    losses = ", ".join("diverged" if loss is None else f"{loss:.4f}" for loss in record.losses)
    mode = "" if record.is_late else ", synchronous"
    return (
        f"{record.size} parameters, rate {record.rate:g}, {record.batch:,} tokens a step{mode}: held-out loss {losses} "
        f"after {', '.join(f'{steps:,}' for steps in record.steps)} steps, {record.seconds:.0f} s"
    )


def _read(path: Path) -> Record:
    try:
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        if not record.losses or len(record.losses) != len(record.steps):
            raise ValueError(f"it has {len(record.losses)} losses of {len(record.steps)} branches")
        record.ends()
        sentence(record)
        return record
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no record of a trunk ({error}): remove it, and it is run again") from error


def run_trunk(cell: Cell, horizons: Sequence[int], progress: Progress, flops_per_token: float) -> list[float | None]:
    """Trains a trunk with its branches. Returns the held-out loss at the end of each."""
    cell.validate()
    components = build_components(cell.config)
    run = DelayedRun(cell, components, torch.device(cell.config.train.device))
    flops_per_step = flops_per_token * components.batches.num_tokens(0)
    losses: list[float | None] = []
    done = 0
    for steps in horizons:
        # Until its decay, the schedule of a branch is that of the trunk.
        section = replace(cell.config.optimizer, decay_steps=decay_steps(steps))
        rates = learning_rate(replace(cell.config, optimizer=section, train=replace(cell.config.train, steps=steps)))
        start = steps - decay_steps(steps)
        for _ in run.train(first=done, last=start, learning_rate=rates):
            progress(flops_per_step)
        kept = run.snapshot() if steps != horizons[-1] else None
        for _ in run.train(first=start, last=steps, learning_rate=rates):
            progress(flops_per_step)
        loss = run.evaluate().item()
        losses.append(loss if math.isfinite(loss) else None)
        if losses[-1] is None:
            break
        if kept is not None:
            run.restore(kept)
        done = start
    return losses + [None] * (len(horizons) - len(losses))


def explore(proxies: Sequence[Proxy], laboratory: Laboratory) -> Fit:
    """Runs all trunks and fits the law."""
    is_late, priors_of = is_delayed(proxies[0].config), priors_for(proxies)

    def fitted(num_samples: int | None = None) -> Fit:
        records = sorted(laboratory.records.values(), key=lambda record: record.id)  # they end in any order
        ends = [end for record in records for end in record.ends()]
        return fit(ends, priors_of, num_samples)

    centred: list[Proxy] = []
    for proxy in proxies:
        factors = RATES if centred else FIRST_RATES
        if centred:
            law = fitted(0)
            batch = float(law.batch(proxy.size.parameters, proxy.middle_tokens, is_late))
            proxy = proxy.with_batch(batch / proxy.model.sequence_length)
            rate = _rate(law, proxy, proxy.batch)
        else:
            rate, batch = from_laws(proxy.config, proxy.size, proxy.middle_tokens)
            rate *= math.sqrt(proxy.batch * proxy.model.sequence_length / batch)
        centred.append(proxy)
        tried = try_rates(proxy, laboratory, [rate * factor for factor in factors], is_late)
        best = min(tried, key=tried.__getitem__)
        exponents = (0.0, 1.0) if len(centred) < len(proxies) else (fitted(0).value("r_b"),)
        wanted = [
            Trunk(proxy, best * factor**exponent, round(proxy.batch * factor), is_late)
            for factor, exponent in product(BATCH_FACTORS, exponents)
        ]
        if is_late:
            wanted.append(Trunk(proxy, best, proxy.batch, False))
        laboratory.run(wanted)
        _extend_batches(proxy, laboratory, fitted, is_late)
    law = fitted(0)
    finer = [(factor, share, is_late) for factor in (1.0, *BATCH_FACTORS) for share in FINER_RATES]
    if is_late:
        finer += [(factor, 1.0, False) for factor in BATCH_FACTORS]
    wanted = []
    for (factor, share, late), proxy in product(finer, reversed(centred)):
        sequences = round(proxy.batch * factor)
        wanted.append(Trunk(proxy, _rate(law, proxy, sequences) * share, sequences, late))
    laboratory.run(laboratory.affordable(wanted))
    return fitted()


def _rate(law: Fit, proxy: Proxy, sequences: int) -> float:
    """Returns the rate that the law expects to be the best one at the middle length, with this many sequences in a
    step."""
    tokens = sequences * proxy.model.sequence_length
    return float(law.rate(proxy.size.parameters, proxy.middle_tokens, tokens))


def _extend_batches(proxy: Proxy, laboratory: Laboratory, fitted: Callable[[int], Fit], is_late: bool) -> None:
    """Tries further batches as long as the best one is the smallest or the largest, and the budget pays for it."""
    for _ in range(MAX_EXTENSIONS):
        lowest: dict[int, float] = {}
        for record in laboratory.records.values():
            is_own = (record.parameters, record.is_late) == (proxy.size.parameters, is_late)
            if is_own and math.isfinite(record.middle_loss):
                lowest[record.batch] = min(record.middle_loss, lowest.get(record.batch, math.inf))
        best = min(lowest, key=lowest.__getitem__)
        if best not in (min(lowest), max(lowest)):
            return
        sequences = best // proxy.model.sequence_length
        sequences = 2 * sequences if best == max(lowest) else sequences // 2
        if not sequences or proxy.horizons(sequences)[0] < MIN_STEPS:
            return
        trunk = Trunk(proxy, _rate(fitted(0), proxy, sequences), sequences, is_late)
        if not laboratory.run(laboratory.affordable([trunk])):
            return


def priors_for(proxies: Sequence[Proxy]) -> Callable[[Sequence[End]], list[Prior]]:
    """Returns the function from ends to priors that `fit` needs."""
    config, largest = proxies[0].config, proxies[-1].size
    section = config.optimizer
    components = build_components(proxies[0].cell(1e-3, proxies[0].batch, True).config)
    assert components.validation is not None, "every proxy is evaluated"
    text = text_size(components.validation, components.tokenizer, components.tokenizer_json)
    bytes_per_token = USUAL_BYTES if text is None else text.num_bytes / text.num_tokens

    def guess(parameters: float, tokens: float) -> tuple[float, float]:
        # The width of a model of this size, if width and depth grow in proportion.
        dim = round(largest.dim * (parameters / largest.parameters) ** (1 / 3))
        return from_laws(config, replace(largest, parameters=parameters, dim=dim), tokens)

    gap = measured_gap(section.name, section.error_feedback != 0)
    return lambda ends: priors(ends, section.name in SPECTRAL, guess, gap, bytes_per_token)


def try_rates(proxy: Proxy, laboratory: Laboratory, rates: Sequence[float], is_late: bool) -> dict[float, float]:
    """Runs learning rates at the middle batch, and further ones as long as the best is at an edge and the budget pays
    for it. Returns the loss of each at the middle length."""
    tried: dict[float, float] = {}

    def run(rates: Sequence[float]) -> None:
        for record in laboratory.run([Trunk(proxy, rate, proxy.batch, is_late) for rate in rates]):
            tried[record.rate] = record.middle_loss

    run(rates)
    for _ in range(MAX_EXTENSIONS):
        best = min(tried, key=tried.__getitem__)
        further = best * 2 if best == max(tried) else best / 2
        if min(tried) < best < max(tried) or not laboratory.affordable([Trunk(proxy, further, proxy.batch, is_late)]):
            break
        run([further])
    if all(map(math.isinf, tried.values())):
        raise ConfigError(
            f"every learning rate from {min(tried):g} to {max(tried):g} diverged on {proxy.name} parameters: check the "
            "data, or use another optimizer"
        )
    return tried


def check_corpus(proxies: Sequence[Proxy]) -> None:
    """Raises a ConfigError if the corpus is too small for the longest branch, or cannot be used."""
    largest = proxies[-1]
    cell = largest.cell(1e-3, largest.batch, True)
    batches = build_components(cell.config).batches
    there = batches.num_windows * largest.model.sequence_length
    if largest.tokens > there:
        raise ConfigError(
            f"data.sources = {list(cell.config.data.sources)} has {there:,} tokens, and a proxy of {largest.name} "
            f"parameters reads {largest.tokens:,.0f}: give more text, or a smaller --budget or --tokens"
        )
    for proxy in proxies:
        for factor in (*BATCH_FACTORS, 1.0):
            proxy.cell(1e-3, round(proxy.batch * factor), True).validate()
