"""Level 1: trains the proxies. A trunk keeps its peak rate after the warm-up, and its branches decay from copies of it.

Sizes run from the smallest to the largest. For each, first the learning rates at the middle batch, then the other
batches near the best rate, then one synchronous trunk if the target is delayed. From the second size on, the rates are
centred on what the sizes before predict. What is left of the budget pays for rates in between, on all sizes. A finished
trunk is a file and is never run again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch

from ...checkpoint.files import write_file
from ...checkpoint.hugging_face import fingerprint
from ...config.optimizers import learning_rate
from ...config.schema import Config
from ...data import text_size
from ...errors import ConfigError
from ...train.build import build_components, read_corpus
from ..study.cell import Cell
from ..study.delayed import DelayedRun
from .advice import SPECTRAL, decay_steps, from_laws, is_delayed
from .fit import End, Fit, Prior, fit, priors
from .laws import measured_gap
from .proxies import BATCH_FACTORS, FINER_RATES, FIRST_RATES, RATES, Proxy

MAX_EXTENSIONS = 3
"""Most rates that are added because the best one is at the edge."""
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


Progress = Callable[[float], None]
"""Function that is told the FLOPs made since the last call."""


class Laboratory:
    """Runs trunks and keeps their records in a folder."""

    def __init__(self, folder: Path, budget: float, progress: Progress, say: Callable[[str], None]) -> None:
        self._folder, self._budget, self._progress, self._say = folder, budget, progress, say
        self.records: dict[str, Record] = {}

    def can_afford(self, proxy: Proxy) -> bool:
        spent = sum(record.flops for record in self.records.values())
        return spent + proxy.flops(proxy.batch) <= self._budget

    def trunk(self, proxy: Proxy, rate: float, sequences: int, is_late: bool) -> Record:
        rate = float(f"{rate:.3g}")
        cell, horizons = proxy.cell(rate, sequences, is_late), proxy.horizons(sequences)
        initial = cell.config.model.initial
        weights = fingerprint(Path(initial)) if initial else ""  # the folder may have others by now
        name = hashlib.sha256(f"{cell.id} {horizons} {weights}".rstrip().encode()).hexdigest()[:12]
        if name in self.records:
            return self.records[name]
        path = self._folder / f"{name}.json"
        if path.exists():
            record = _read(path)
            self._progress(record.flops)
        else:
            started = time.perf_counter()
            losses = run_trunk(cell, horizons, self._progress, proxy.size.flops_per_token)
            record = Record(
                name,
                proxy.name,
                proxy.size.parameters,
                rate,
                sequences * proxy.model.sequence_length,
                is_late,
                list(horizons),
                losses,
                proxy.flops(sequences),
                time.perf_counter() - started,
            )
            write_file(path, [f"{json.dumps(asdict(record))}\n".encode()])
        self.records[name] = record
        self._say(f"[{len(self.records)}] {sentence(record)}")
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
    is_late, priors_of = is_delayed(proxies[0].config), _priors_of(proxies)

    def fitted(num_samples: int | None = None) -> Fit:
        ends = [end for record in laboratory.records.values() for end in record.ends()]
        return fit(ends, priors_of, num_samples)

    for index, proxy in enumerate(proxies):
        best = _best_rate(proxy, laboratory, fitted(0) if index else None, is_late)
        tries = [(factor, best * share) for factor in BATCH_FACTORS for share in (1, factor)]
        if proxy is proxies[-1]:
            exponent = fitted(0).value("r_b")
            tries = [(factor, best * factor**exponent) for factor in BATCH_FACTORS]
        for factor, rate in tries:
            laboratory.trunk(proxy, rate, round(proxy.batch * factor), is_late)
        if is_late:
            laboratory.trunk(proxy, best, proxy.batch, False)
    law = fitted(0)
    for factor, share, proxy in product((1.0, *BATCH_FACTORS), FINER_RATES, reversed(proxies)):
        if laboratory.can_afford(proxy):
            sequences = round(proxy.batch * factor)
            batch = sequences * proxy.model.sequence_length
            rate = float(law.rate(proxy.size.parameters, proxy.middle_tokens, batch))
            laboratory.trunk(proxy, rate * share, sequences, is_late)
    return fitted()


def _priors_of(proxies: Sequence[Proxy]) -> Callable[[Sequence[End]], list[Prior]]:
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


def _best_rate(proxy: Proxy, laboratory: Laboratory, fitted: Fit | None, is_late: bool) -> float:
    """Runs the learning rates at the middle batch. Returns the best one at the middle length."""
    batch = proxy.batch * proxy.model.sequence_length
    if fitted is None:
        rate, its_batch = from_laws(proxy.config, proxy.size, proxy.middle_tokens)
        rates = [rate * math.sqrt(batch / its_batch) * factor for factor in FIRST_RATES]
    else:
        rate = float(fitted.rate(proxy.size.parameters, proxy.middle_tokens, batch))
        rates = [rate * factor for factor in RATES]
    tried = try_rates(proxy, laboratory, rates, is_late)
    return min(tried, key=tried.__getitem__)


def try_rates(proxy: Proxy, laboratory: Laboratory, rates: Sequence[float], is_late: bool) -> dict[float, float]:
    """Runs learning rates at the middle batch, and further ones as long as the best is at an edge and the budget pays
    for it. Returns the loss of each at the middle length."""
    tried: dict[float, float] = {}

    def run(rate: float) -> None:
        record = laboratory.trunk(proxy, rate, proxy.batch, is_late)
        loss = record.losses[len(record.losses) // 2]
        tried[record.rate] = math.inf if loss is None else loss

    for rate in rates:
        run(rate)
    for _ in range(MAX_EXTENSIONS):
        best = min(tried, key=tried.__getitem__)
        if min(tried) < best < max(tried) or not laboratory.can_afford(proxy):
            break
        run(best * 2 if best == max(tried) else best / 2)
    if all(map(math.isinf, tried.values())):
        raise ConfigError(
            f"every learning rate from {min(tried):g} to {max(tried):g} diverged on {proxy.name} parameters: check the "
            "data, or use another optimizer"
        )
    return tried


def corpus_vocab_size(config: Config) -> int:
    """Returns the number of token ids in the corpus."""
    try:
        return read_corpus(config.data).vocab_size
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"data.sources = {list(config.data.sources)} cannot be read: {error}") from error


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
