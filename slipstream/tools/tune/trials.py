"""Level 2: short runs of the trained weights themselves, at several learning rates and batches.

Laws of training from scratch know nothing of weights that saw other text, or that another optimizer made. Such weights
want a lower rate and another batch (docs/results/continued.md). So each trial continues them for a part of the tokens,
with a decay to zero at its end. Trials differ first in the rate, at the batch of the laws, and then in the batch, with
the rate in proportion to its square root. The best batch becomes that of the whole run. So does the best rate, raised a
little: the longer the run, the better it recovers from what a high rate destroys at first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...config.schema import Config
from ...errors import ConfigError
from ...model.registry import Decoder
from ...model.spec import ModelSpec
from ..study.cell import Cell
from .advice import Size, batch_of, fewest_sequences, is_delayed
from .laws import weight_decay
from .proxies import MICROBATCH_TOKENS, Proxy, proxy_of
from .trunks import Laboratory, Record, Trunk, try_rates

FACTORS = (0.25, 0.5, 1.0)
"""Rates of the first trials, as multiples of that of the laws."""
NUM_TRIALS = 8
"""Number of trials that the budget is divided by: three rates, two more in case the best is at an edge, and batches."""
MIN_STEPS = 50
RATE_BY_TOKENS = 0.1
"""Exponent of the tokens in the best rate. Over 16 times the tokens the best rate of one model grew by a factor of 1.2
in branches of one trunk and 1.7 from trials (docs/results/continued.md), and the best batch stayed the same."""
GAIN = 0.01
"""Share of the loss that half the batch must gain to be chosen. Over 16 times the tokens such a gain shrinks to a
third, and small steps make poor use of devices."""


@dataclass(frozen=True)
class Trial(Proxy):
    """The target itself, with the weights of model.initial, for a part of its tokens. `batch` is that of the laws."""

    whole_tokens: float
    """Tokens of the target."""

    @property
    def middle_tokens(self) -> float:
        return self.tokens

    def cell(self, rate: float, sequences: int, is_late: bool) -> Cell:
        """Returns the cell of a trial. Its weight decay is that of the whole run: by its own length it would have many
        times as much."""
        cell = super().cell(rate, sequences, is_late)
        batch = sequences * self.model.sequence_length
        decay = weight_decay(self.size.parameters, self.whole_tokens, batch, rate)
        section = replace(cell.config.optimizer, weight_decay=decay)
        return replace(cell, config=replace(cell.config, optimizer=section))

    def horizons(self, sequences: int) -> tuple[int, ...]:
        return (int(self.tokens / (sequences * self.model.sequence_length)),)

    def microbatch_size(self, sequences: int) -> int:
        """Returns the largest size that divides the batch."""
        most = max(1, MICROBATCH_TOKENS // self.model.sequence_length)
        return max(size for size in range(1, min(sequences, most) + 1) if sequences % size == 0)


@dataclass(frozen=True)
class Trials:
    rate: float
    """Rate of the whole run, at this batch."""
    batch: int
    """Best batch, in tokens."""
    band: tuple[float, float]
    """The same of the neighbours of the best trial."""
    is_edge: bool
    """Whether the best trial had no neighbour on one side."""
    records: list[Record]


def trial_of(config: Config, model: ModelSpec, tokens: float, share: float = 1.0) -> Trial:
    """Returns a trial of a share of the tokens, at the batch of the configuration."""
    if not isinstance(model, Decoder):
        raise ConfigError(f"model.initial = {config.model.initial!r} is no decoder: give the folder of one")
    size = Size.of(model)
    proxy = proxy_of(config, model, size, tokens)
    sequences = batch_of(config, model.sequence_length) // model.sequence_length
    return Trial(model, proxy.config, size, share * tokens, sequences, tokens)


def plan_trials(config: Config, model: ModelSpec, tokens: float, share: float) -> Trial:
    """Returns what each trial runs. share: part of the target's tokens that all trials together may have."""
    trial = trial_of(config, model, tokens, share / NUM_TRIALS)
    (steps,) = trial.horizons(trial.batch)
    if steps < MIN_STEPS:
        least = MIN_STEPS * NUM_TRIALS * trial.batch * model.sequence_length / tokens
        raise ConfigError(
            f"trials = {100 * share:g}% is too small: each of {NUM_TRIALS} trials would make {steps} steps, and the "
            f"choice needs {MIN_STEPS}, so use --trials {math.ceil(100 * least):g}%"
        )
    return trial


def run_trials(trial: Trial, config: Config, laboratory: Laboratory) -> Trials:
    """Runs the trials. config: batch and rate of the laws."""
    centre, is_late = config.optimizer.learning_rate, is_delayed(config)
    assert centre is not None, "tune sets it"
    tried = try_rates(trial, laboratory, [centre * factor for factor in FACTORS], is_late)
    rate, loss = bottom(tried)
    sequences = _try_batches(trial, laboratory, rate, loss, fewest_sequences(config), is_late)
    scale = math.sqrt(sequences / trial.batch) * (trial.whole_tokens / trial.tokens) ** RATE_BY_TOKENS
    rates = sorted(tried)
    place = rates.index(min(tried, key=tried.__getitem__))
    band = rates[max(0, place - 1)] * scale, rates[min(len(rates) - 1, place + 1)] * scale
    return Trials(
        rate * scale,
        sequences * trial.model.sequence_length,
        band,
        place in (0, len(rates) - 1),
        list(laboratory.records.values()),
    )


def _try_batches(trial: Trial, laboratory: Laboratory, rate: float, loss: float, fewest: int, is_late: bool) -> int:
    """Halves the batch as long as this gains enough, or else doubles it as long as the loss falls. Returns the
    sequences in a step.

    rate, loss: the best rate at the batch of the laws, and its loss. fewest: sequences that keep the pipeline full.
    """
    best, lowest = trial.batch, loss
    for factor, gain in ((0.5, GAIN), (2.0, 0.0)):
        while (sequences := round(best * factor)) >= fewest:
            trunk = Trunk(trial, rate * math.sqrt(sequences / trial.batch), sequences, is_late)
            records = laboratory.run(laboratory.affordable([trunk]))
            if not records or records[0].middle_loss >= (1 - gain) * lowest:
                break
            best, lowest = sequences, records[0].middle_loss
        if best != trial.batch:
            break
    return best


def bottom(losses: Mapping[float, float], within: float = 0.0) -> tuple[float, float]:
    """Returns where a parabola is lowest, over the logarithm, and its value.

    It goes through the lowest point and its neighbours; at an edge the lowest point is returned. If four or more points
    exceed the lowest by no more than the share `within`, it is the nearest one to all of these instead, because the
    lowest of them may be lowest by chance.
    """
    xs = sorted(losses)
    best = min(range(len(xs)), key=lambda index: losses[xs[index]])
    near = [x for x in xs if losses[x] <= (1 + within) * losses[xs[best]]]
    if len(near) < 4:
        near = xs[max(0, best - 1) : best + 2]
    if len(near) < 3 or not all(math.isfinite(losses[x]) for x in near):
        return xs[best], losses[xs[best]]
    a, b, c = np.polyfit(np.log(near), [losses[x] for x in near], 2)
    if a <= 0:
        return xs[best], losses[xs[best]]
    return float(np.exp(-b / (2 * a))), float(c - b * b / (4 * a))
