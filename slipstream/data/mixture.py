"""Divides the samples of a run among weighted sources, as a function of the sample's number. There is no state.

The rule is that of Tijdeman (The chairman assignment problem, Discrete Mathematics 32, 1980). Source i of k has the
share w_i, and x_i of the first n - 1 samples were its own. Sample n goes to one of the sources with

    w_i * n - x_i >= 1 / (2k - 2),

namely to the one with the earliest deadline: the smallest (1 - 1 / (2k - 2) - (w_i * n - x_i)) / w_i. After any number
of samples n, the count of every source then differs from w_i * n by at most 1 - 1 / (2k - 2), so by less than one
sample. A source with the largest deficit would be simpler to choose, but does not keep this bound for many sources.

Weights are decimal numbers, so shares are fractions with a common denominator, the period. After a period every count
is exact, and the order repeats. A table of one period answers for every sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from .tokens import DataError

MAX_PERIOD = 100_000
"""Largest number of samples after which the order of the sources may repeat."""


@dataclass(frozen=True)
class Source:
    """A part of a corpus that has a weight of its own."""

    name: str
    """Name of the source, as in `data.sources`."""
    weight: float
    """Share of the samples, in proportion to the weights of the other sources."""
    num_tokens: int
    """Number of tokens to train on."""
    num_held_out: int = 0
    """Number of tokens of this source that are held out for validation."""


@dataclass(frozen=True, eq=False)
class Turns:
    """The order in which sources take turns. It repeats after `len(sources)` samples."""

    counts: np.ndarray
    """Number of turns that each source has in a period."""
    sources: np.ndarray
    """Source of each sample of a period."""
    ranks: np.ndarray
    """Number of earlier turns in the period that the source of each sample had."""

    def of(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for `count` samples from `first` on, the source, and the number of its earlier samples."""
        periods, places = np.divmod(np.arange(first, first + count), len(self.sources))
        sources = self.sources[places]
        return sources, periods * self.counts[sources] + self.ranks[places]

    def num_samples(self, count: int) -> list[int]:
        """Returns how many of the first `count` samples each source has."""
        periods, rest = divmod(count, len(self.sources))
        last = np.bincount(self.sources[:rest], minlength=len(self.counts))
        return (periods * self.counts + last).tolist()


@lru_cache(maxsize=16)
def turns(weights: tuple[float, ...]) -> Turns:
    """Returns the order in which sources of these weights take turns.

    Raises a DataError if a weight is not positive, or if the order would repeat too late.
    """
    counts = _counts(weights)
    period, sharpness = sum(counts), max(2 * len(counts) - 2, 1)
    given, sources, ranks = [0] * len(counts), [], []
    for sample in range(1, period + 1):
        # The rule of the module's docstring, multiplied by period * sharpness so that all numbers are whole.
        deficits = [sharpness * (count * sample - period * had) for count, had in zip(counts, given, strict=True)]
        _, chosen = min(
            (((sharpness - 1) * period - deficit) / counts[source], source)
            for source, deficit in enumerate(deficits)
            if deficit >= period
        )
        sources.append(chosen)
        ranks.append(given[chosen])
        given[chosen] += 1
    return Turns(np.array(counts), np.array(sources), np.array(ranks))


def _counts(weights: Sequence[float]) -> list[int]:
    """Returns the smallest whole numbers in the proportion of the weights, which are read as decimal numbers."""
    for weight in weights:
        if not 0 < weight < math.inf:
            raise DataError(f"data.weights has the weight {weight}: give a number above 0, or leave the source out.")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    counts = [count // math.gcd(*whole) for count in whole]
    if sum(counts) > MAX_PERIOD:
        rounded = [max(round(float(weight / sum(exact)), 4), 0.0001) for weight in exact]
        raise DataError(
            f"data.weights is {list(weights)}, whose proportion takes whole numbers with a sum above {MAX_PERIOD:,}: "
            f"round them, for example to {rounded}."
        )
    return counts
