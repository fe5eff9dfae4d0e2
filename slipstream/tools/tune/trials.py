"""Level 2: short runs of the trained weights themselves, at several learning rates.

Laws of training from scratch know nothing of weights that saw other text, or that another optimizer made. Such weights
want a lower rate (docs/results/continued.md). So each trial continues them at one rate for a part of the tokens, with a
decay to zero at its end. The rate with the lowest loss becomes that of the whole run, lowered for its greater length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...config.schema import Config
from ...errors import ConfigError
from ...model.registry import Decoder
from ...model.spec import ModelSpec
from .advice import Size, batch_of, is_delayed
from .fit import Fit
from .proxies import MICROBATCH_TOKENS, Proxy, proxy_of
from .trunks import Laboratory, Record, try_rates

FACTORS = (0.25, 0.5, 1.0)
"""Rates of the first trials, as multiples of that of the laws."""
NUM_TRIALS = 5
"""Number of trials that the budget is divided by: the first ones, and two in case the best is at an edge."""
MIN_STEPS = 50
RATE_BY_TOKENS = -0.15
"""Exponent of the tokens in the best rate at a fixed batch, if no law was fitted: Step Law has 0.02, MuonH -0.32
(arXiv:2603.28743)."""


@dataclass(frozen=True)
class Trial(Proxy):
    """The target itself, with the weights of model.initial, for a part of its tokens."""

    @property
    def middle_tokens(self) -> float:
        return self.tokens

    def horizons(self, sequences: int) -> tuple[int, ...]:
        return (int(self.tokens / (sequences * self.model.sequence_length)),)

    def microbatch_size(self, sequences: int) -> int:
        """Returns the largest size that divides the batch."""
        most = max(1, MICROBATCH_TOKENS // self.model.sequence_length)
        return max(size for size in range(1, min(sequences, most) + 1) if sequences % size == 0)


@dataclass(frozen=True)
class Trials:
    rate: float
    band: tuple[float, float]
    """Rates of the whole run that belong to the neighbours of the best trial."""
    is_edge: bool
    """Whether the best trial had no neighbour on one side."""
    records: list[Record]


def trial_of(config: Config, model: ModelSpec, tokens: float) -> Trial:
    """Returns a trial of so many tokens, at the batch of the configuration."""
    if not isinstance(model, Decoder):
        raise ConfigError(f"model.initial = {config.model.initial!r} is no decoder: give the folder of one")
    size = Size.of(model)
    proxy = proxy_of(config, model, size, tokens)
    return Trial(model, proxy.config, size, tokens, batch_of(config, model.sequence_length) // model.sequence_length)


def plan_trials(config: Config, model: ModelSpec, tokens: float, share: float) -> Trial:
    """Returns what each trial runs. share: part of the target's tokens that all trials together may have."""
    trial = trial_of(config, model, share * tokens / NUM_TRIALS)
    (steps,) = trial.horizons(trial.batch)
    if steps < MIN_STEPS:
        least = MIN_STEPS * NUM_TRIALS * trial.batch * model.sequence_length / tokens
        raise ConfigError(
            f"trials = {share:.3%} is too small: each of {NUM_TRIALS} trials would make {steps} steps, and the choice "
            f"needs {MIN_STEPS}, so use --trials {math.ceil(100 * least):g}%"
        )
    return trial


def run_trials(trial: Trial, config: Config, tokens: float, fit: Fit | None, laboratory: Laboratory) -> Trials:
    """Runs the trials. config: batch and rate of the laws. tokens: those of the whole run."""
    rate = config.optimizer.learning_rate
    assert rate is not None, "tune sets it"
    tried = try_rates(trial, laboratory, [rate * factor for factor in FACTORS], is_delayed(config))
    exponent = RATE_BY_TOKENS if fit is None else fit.value("r_d")
    longer = (tokens / trial.tokens) ** exponent
    best = min(tried, key=tried.__getitem__)
    rates = sorted(tried)
    place = rates.index(best)
    band = rates[max(0, place - 1)] * longer, rates[min(len(rates) - 1, place + 1)] * longer
    is_edge = place in (0, len(rates) - 1)
    return Trials(bottom(tried)[0] * longer, band, is_edge, list(laboratory.records.values()))


def bottom(losses: Mapping[float, float]) -> tuple[float, float]:
    """Returns where a parabola through the lowest point and its neighbours is lowest, over the logarithm, and its
    value. At an edge it is the lowest point."""
    xs = sorted(losses)
    best = min(range(len(xs)), key=lambda index: losses[xs[index]])
    near = xs[max(0, best - 1) : best + 2]
    if len(near) < 3 or not all(math.isfinite(losses[x]) for x in near):
        return xs[best], losses[xs[best]]
    a, b, c = np.polyfit(np.log(near), [losses[x] for x in near], 2)
    return float(np.exp(-b / (2 * a))), float(c - b * b / (4 * a))
