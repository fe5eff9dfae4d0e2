"""Level 1: trains the proxies. A trunk keeps its peak rate after the warm-up, and its branches decay from copies of it.

Sizes run from the smallest to the largest. For each, first the learning rates at the middle batch, then the other
batches near the best rate, then one synchronous trunk if the target is delayed. From the second size on, the rates are
centred on what the sizes before predict. A finished trunk is a file and is never run again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...config.optimizers import learning_rate
from ...config.schema import Config
from ...data import text_size
from ...errors import ConfigError
from ...train.build import build_components, read_corpus
from ..study.cell import Cell
from ..study.delayed import DelayedRun
from .advice import SPECTRAL, decay_steps, from_laws, is_delayed
from .fit import End, Fit, fit, priors
from .laws import measured_gap
from .proxies import BATCH_FACTORS, FIRST_RATES, RATES, Proxy

MAX_EXTENSIONS = 3
"""Most rates that are added because the best one is at the edge."""
REPORT_STEPS = 50
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

    @property
    def flops(self) -> float:
        return sum(record.flops for record in self.records.values())

    def can_afford(self, proxy: Proxy) -> bool:
        return self.flops + proxy.flops(proxy.batch) <= self._budget

    def trunk(self, proxy: Proxy, rate: float, sequences: int, is_late: bool) -> Record:
        rate = float(f"{rate:.3g}")
        cell, horizons = proxy.cell(rate, sequences, is_late), proxy.horizons(sequences)
        name = hashlib.sha256(f"{cell.id} {horizons}".encode()).hexdigest()[:12]
        path = self._folder / f"{name}.json"
        record = _read(path) if path.exists() else None
        if record is None:
            started = time.perf_counter()
            losses = run_trunk(cell, horizons, self._progress, proxy.size.flops_per_token)
            batch = sequences * proxy.model.sequence_length
            parameters, seconds = proxy.size.parameters, time.perf_counter() - started
            flops = proxy.flops(sequences)
            steps = list(horizons)
            record = Record(name, proxy.name, parameters, rate, batch, is_late, steps, losses, flops, seconds)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
            os.replace(partial, path)  # atomic: the record is complete or does not exist
        elif name not in self.records:
            self._progress(record.flops)
        if name not in self.records:
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
        return Record(**json.loads(path.read_text(encoding="utf-8")))
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
        rates = branch_rates(cell, steps)
        start = steps - decay_steps(steps)
        _train(run, done, start, rates, flops_per_step, progress)
        kept = run.snapshot() if steps != horizons[-1] else None
        _train(run, start, steps, rates, flops_per_step, progress)
        loss = run.evaluate().item()
        losses.append(loss if math.isfinite(loss) else None)
        if losses[-1] is None:
            break
        if kept is not None:
            run.restore(kept)
        done = start
    return losses + [None] * (len(horizons) - len(losses))


def branch_rates(cell: Cell, steps: int) -> Callable[[int], float]:
    """Returns the schedule of a branch. Until its decay it is that of the trunk."""
    section = replace(cell.config.optimizer, decay_steps=decay_steps(steps))
    train = replace(cell.config.train, steps=steps)
    return learning_rate(replace(cell.config, optimizer=section, train=train))


def _train(
    run: DelayedRun, first: int, last: int, rates: Callable[[int], float], flops: float, progress: Progress
) -> None:
    for done in run.train(first=first, last=last, learning_rate=rates):
        if (done - first) % REPORT_STEPS == 0:
            progress(REPORT_STEPS * flops)
    progress((last - first) % REPORT_STEPS * flops)


def explore(proxies: Sequence[Proxy], laboratory: Laboratory) -> Fit:
    """Runs all trunks and fits the law."""
    is_late, per_token = is_delayed(proxies[0].config), bytes_per_token(proxies[0])
    for index, proxy in enumerate(proxies):
        fitted = fit_of(proxies, laboratory, per_token, num_samples=0) if index else None
        best = _best_rate(proxy, laboratory, fitted, is_late)
        if fitted is not None:
            fitted = fit_of(proxies, laboratory, per_token, num_samples=0)
        for factor in BATCH_FACTORS:
            sequences = round(proxy.batch * factor)
            rates = [best, best * factor]
            if fitted is not None and index == len(proxies) - 1:
                rates = [best * factor ** fitted.value("r_b")]
            for rate in rates:
                laboratory.trunk(proxy, rate, sequences, is_late)
        if is_late:
            laboratory.trunk(proxy, best, proxy.batch, False)
    return fit_of(proxies, laboratory, per_token)


def bytes_per_token(proxy: Proxy) -> float:
    """Returns how many bytes of the held-out text a token stands for."""
    components = build_components(proxy.cell(1e-3, proxy.batch, True).config)
    assert components.validation is not None, "every proxy is evaluated"
    text = text_size(components.validation, components.tokenizer, components.tokenizer_json)
    return USUAL_BYTES if text is None else text.num_bytes / text.num_tokens


def _best_rate(proxy: Proxy, laboratory: Laboratory, fitted: Fit | None, is_late: bool) -> float:
    """Runs the learning rates at the middle batch. Returns the best one at the middle length."""
    batch = proxy.batch * proxy.model.sequence_length
    if fitted is None:
        law = from_laws(proxy.config, proxy.size, proxy.middle_tokens)
        centre = law.rate * math.sqrt(batch / law.batch)
    else:
        centre = float(fitted.rate(proxy.size.parameters, proxy.middle_tokens, batch))
    factors = FIRST_RATES if fitted is None else RATES
    tried = try_rates(proxy, laboratory, [centre * factor for factor in factors], is_late)
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


def fit_of(proxies: Sequence[Proxy], laboratory: Laboratory, bytes_per_token: float, **options: Any) -> Fit:
    """Fits the law to all records so far."""
    ends = [end for record in laboratory.records.values() for end in record.ends()]
    config = proxies[0].config
    section = config.optimizer
    largest = proxies[-1]

    def guess(parameters: float, tokens: float) -> tuple[float, float]:
        # The width of a model of this size, if width and depth grow in proportion.
        dim = round(largest.size.dim * (parameters / largest.size.parameters) ** (1 / 3))
        law = from_laws(config, replace(largest.size, parameters=parameters, dim=dim), tokens)
        return law.rate, law.batch

    gap = measured_gap(section.name, section.error_feedback != 0)
    is_spectral = section.name in SPECTRAL
    return fit(ends, lambda some: priors(some, is_spectral, guess, gap, bytes_per_token), **options)


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
