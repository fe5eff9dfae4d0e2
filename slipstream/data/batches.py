"""Chooses the windows of the corpus for each microbatch, as a function of its index. There is no state to restore.

A corpus of n tokens has (n - 1) // sequence_length windows. Window w reads the tokens from w * sequence_length on, and
its targets are the same tokens shifted by one. An epoch visits every window once, and every epoch has another order.
If sources are mixed by weight, each source has windows, epochs and an order of its own (see `mixture`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..model.decoder import IGNORE
from .mixture import Source, turns
from .tokens import DataError, Tokens

BLOCK = 1024
"""Number of samples whose windows are computed together. Computing a few takes almost as long as computing all of
them."""


@dataclass(frozen=True, eq=False)
class Batches:
    """The training data: `batches(step, microbatch)` returns (inputs, targets).

    Samples are numbered through the whole run, first over the rows of a microbatch, then over microbatches, then over
    steps. So a step reads the same windows no matter how it is divided into microbatches or among replicas.
    """

    tokens: Tokens
    sequence_length: int
    """Number of tokens in each row."""
    microbatch_size: int
    """Number of rows in each microbatch."""
    num_microbatches: int
    """Number of microbatches in each step, over all replicas."""
    seed: int = 0
    """Seed of the order of the windows."""
    sources: tuple[Source, ...] = ()
    """Sources to mix by weight, in the order of `tokens`. Empty: all tokens are one source."""

    def __post_init__(self) -> None:
        if self._first_tokens[-1] != len(self.tokens):
            raise DataError(
                f"sources have {self._first_tokens[-1]} tokens, but there are {len(self.tokens)}: name all of them."
            )

    @cached_property
    def _sources(self) -> tuple[Source, ...]:
        return self.sources or (Source("", 1.0, len(self.tokens)),)

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        return tuple(source.weight for source in self._sources)

    @cached_property
    def _first_tokens(self) -> list[int]:
        """Returns the position of the first token of every source, and the number of all tokens."""
        return list(accumulate((source.num_tokens for source in self._sources), initial=0))

    @cached_property
    def _first_windows(self) -> list[int]:
        """Returns the number of the first window of every source, and the number of all windows."""
        sizes = (_num_windows(source.num_tokens, self.sequence_length) for source in self._sources)
        return list(accumulate(sizes, initial=0))

    @property
    def num_windows(self) -> int:
        """Returns the number of windows of all sources together."""
        return self._first_windows[-1]

    def epochs(self, num_steps: int) -> list[float]:
        """Returns how many times the first `num_steps` steps read the tokens of each source."""
        num_samples = turns(self._weights).num_samples(num_steps * self.num_microbatches * self.microbatch_size)
        return [
            count * self.sequence_length / source.num_tokens
            for count, source in zip(num_samples, self._sources, strict=True)
        ]

    def num_tokens(self, step: int) -> int:
        """Returns the number of targets that count in the loss, in the whole batch of a step."""
        return self.num_microbatches * self.microbatch_size * self.sequence_length

    def windows(self, step: int, microbatch: int) -> list[int]:
        """Returns the windows of one microbatch. Microbatches are counted from 0 in each step, and windows through all
        sources."""
        if step < 0 or not 0 <= microbatch < self.num_microbatches:
            raise IndexError(f"step {step}, microbatch {microbatch} of {self.num_microbatches}")
        first = (step * self.num_microbatches + microbatch) * self.microbatch_size
        if len(self._sources) == 1:  # twice as fast as to take turns
            return self._order(0, first, self.microbatch_size).tolist()
        sources, ranks = turns(self._weights).of(first, self.microbatch_size)
        windows = np.empty_like(ranks)
        for source in np.unique(sources):
            own = sources == source  # their ranks are consecutive
            windows[own] = self._order(int(source), int(ranks[own][0]), int(own.sum()))
        return windows.tolist()

    def __call__(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, each int64 of shape (microbatch_size, sequence_length)."""
        return _read(self.tokens, map(self._start, self.windows(step, microbatch)), self.sequence_length)

    def _start(self, window: int) -> int:
        """Returns the position of the first token of a window."""
        source = bisect_right(self._first_windows, window) - 1
        return self._first_tokens[source] + (window - self._first_windows[source]) * self.sequence_length

    def _order(self, source: int, first: int, count: int) -> np.ndarray:
        """Returns the windows that `count` samples of one source read, from its sample `first` on."""
        num_windows = self._first_windows[source + 1] - self._first_windows[source]
        seed = f"{self.seed}.{source}" if source else f"{self.seed}"  # sources of one size have different orders
        size = min(BLOCK, num_windows)
        blocks = range(first // size, (first + count - 1) // size + 1)
        order = np.concatenate([_shuffled_block(block, size, num_windows, seed) for block in blocks])
        start = first - blocks[0] * size
        return self._first_windows[source] + order[start : start + count]


class ValidationPart(NamedTuple):
    """A part of the validation data whose loss is reported on its own. Every batch belongs to one part."""

    name: str
    """Name of its source, as in the configuration."""
    starts: Sequence[int]
    """Position of the first token of every window, in the order in which windows are read."""


@dataclass(frozen=True, eq=False)
class ValidationBatches:
    """The validation data: `batches(index)` for index in range(len(batches))."""

    tokens: Tokens
    sequence_length: int
    microbatch_size: int
    """Number of rows in each batch."""
    parts: tuple[ValidationPart, ...]
    """The parts, in the order in which they are read."""

    @cached_property
    def _first_batches(self) -> list[int]:
        """Returns the index of the first batch of every part, and the number of all batches."""
        return list(accumulate((-(-len(part.starts) // self.microbatch_size) for part in self.parts), initial=0))

    def __len__(self) -> int:
        return self._first_batches[-1]

    def indices(self, part: int) -> range:
        """Returns the indices of the batches of a part."""
        return range(self._first_batches[part], self._first_batches[part + 1])

    def num_tokens(self, index: int) -> int:
        """Returns the number of targets that count in the loss, in one batch."""
        return len(self._starts(index)) * self.sequence_length

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of the same shape as in `Batches`.

        In the last batch of a part, missing rows are filled with zeros, and their targets are IGNORE.
        """
        inputs, targets = _read(self.tokens, self._starts(index), self.sequence_length)
        missing = (self.microbatch_size - len(inputs), self.sequence_length)
        inputs = torch.cat((inputs, inputs.new_zeros(missing)))
        return inputs, torch.cat((targets, targets.new_full(missing, IGNORE)))

    def _starts(self, index: int) -> Sequence[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"validation batch {index} of {len(self)}")
        part = bisect_right(self._first_batches, index) - 1
        first = (index - self._first_batches[part]) * self.microbatch_size
        return self.parts[part].starts[first : first + self.microbatch_size]


def validation_batches(
    tokens: Tokens,
    sequence_length: int,
    microbatch_size: int,
    max_batches: int,
    sources: Sequence[Source] = (),
    per_source: bool = False,
) -> ValidationBatches:
    """Returns batches that contain every held-out window once, in the order of the tokens.

    max_batches: only the windows of the first `max_batches` batches are used. sources: mixed sources whose held-out
    parts make up `tokens`. They are mixed by their weights as long as they have windows, so that the first batches are
    like those of the training. per_source: the same windows, but each source is a part of its own, in batches of its
    own.
    """
    parts = [source for source in sources if source.num_held_out] or [Source("", 1.0, 0, len(tokens))]
    starts = _mixed_starts(parts, sequence_length, max_batches * microbatch_size)
    chosen: tuple[ValidationPart, ...] = (ValidationPart("", starts),)
    if per_source:
        ends = list(accumulate(part.num_held_out for part in parts))
        by_source = [[start for start in starts if bisect_right(ends, start) == i] for i in range(len(parts))]
        chosen = tuple(ValidationPart(part.name, own) for part, own in zip(parts, by_source, strict=True) if own)
    return ValidationBatches(tokens, sequence_length, microbatch_size, chosen)


def _mixed_starts(parts: Sequence[Source], sequence_length: int, limit: int) -> list[int]:
    """Returns the first `limit` held-out windows. Window w of a source has its turn at (w + 1/2) / weight."""
    starts, times, before = [], [], 0
    for part in parts:
        windows = np.arange(min(_num_windows(part.num_held_out, sequence_length), limit))
        starts.append(before + windows * sequence_length)
        times.append((windows + 0.5) / part.weight)
        before += part.num_held_out
    order = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(starts)[order][:limit].tolist()


@lru_cache(maxsize=256)
def _shuffled_block(block: int, size: int, num_windows: int, seed: str) -> np.ndarray:
    return shuffled(range(block * size, (block + 1) * size), num_windows, seed)


def shuffled(samples: Sequence[int], num_windows: int, seed: int | str) -> np.ndarray:
    """Returns the window that each sample reads. Each epoch is a permutation of the windows, which needs no table in
    memory.

    A Feistel network is a permutation of the numbers below the next power of four, for any round function. A result
    that is not a valid window goes through the network again until it is one (cycle walking, Black and Rogaway 2002).
    """
    epochs, windows = np.divmod(np.asarray(samples, dtype=np.uint64), np.uint64(num_windows))
    half = np.uint64((max(num_windows - 1, 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    for epoch in np.unique(epochs):
        walking = epochs == epoch
        while walking.any():
            left, right = windows[walking] >> half, windows[walking] & mask
            for key in _round_keys(seed, int(epoch)):
                left, right = right, left ^ (_mix(right ^ key) & mask)
            windows[walking] = left << half | right
            walking &= windows >= num_windows
    return windows.astype(np.int64)


@lru_cache(maxsize=64)
def _round_keys(seed: int | str, epoch: int) -> np.ndarray:
    return np.frombuffer(hashlib.sha512(f"{seed}/{epoch}".encode()).digest(), dtype="<u8").astype(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies the finaliser of splitmix64: every bit of the result depends on every bit of x. Products wrap at 64
    bits."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _num_windows(num_tokens: int, sequence_length: int) -> int:
    return max(num_tokens - 1, 0) // sequence_length


def _read(tokens: Tokens, starts: Iterable[int], sequence_length: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(np.stack([tokens.read(start, start + sequence_length + 1) for start in starts]))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
