"""Chooses the windows of the corpus for each microbatch, as a function of its index. There is no state to restore.

A corpus of n tokens has (n - 1) // sequence_length windows. Window w reads the tokens from w * sequence_length on, and
its targets are the same tokens shifted by one. An epoch visits every window once, and every epoch has another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..model.decoder import IGNORE
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
    """Tokens to read from."""
    sequence_length: int
    """Number of tokens in each row."""
    microbatch_size: int
    """Number of rows in each microbatch."""
    num_microbatches: int
    """Number of microbatches in each step, over all replicas."""
    seed: int = 0
    """Seed of the order of the windows."""

    def __post_init__(self) -> None:
        _check_positive(
            sequence_length=self.sequence_length,
            microbatch_size=self.microbatch_size,
            num_microbatches=self.num_microbatches,
        )
        _check_window(self.tokens, self.sequence_length, "training")

    @property
    def num_windows(self) -> int:
        """Returns the number of samples in an epoch."""
        return _num_windows(self.tokens, self.sequence_length)

    def num_tokens(self, step: int) -> int:
        """Returns the number of targets that count in the loss, in the whole batch of a step."""
        return self.num_microbatches * self.microbatch_size * self.sequence_length

    def windows(self, step: int, microbatch: int) -> list[int]:
        """Returns the windows of one microbatch. Microbatches are counted from 0 in each step."""
        if step < 0 or not 0 <= microbatch < self.num_microbatches:
            raise IndexError(f"step {step}, microbatch {microbatch} of {self.num_microbatches}")
        first = (step * self.num_microbatches + microbatch) * self.microbatch_size
        size = min(BLOCK, self.num_windows)
        blocks = range(first // size, (first + self.microbatch_size - 1) // size + 1)
        order = np.concatenate([_shuffled_block(block, size, self.num_windows, self.seed) for block in blocks])
        start = first - blocks[0] * size
        return order[start : start + self.microbatch_size].tolist()

    def __call__(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, each int64 of shape (microbatch_size, sequence_length)."""
        return _read(self.tokens, self.windows(step, microbatch), self.sequence_length)


@dataclass(frozen=True, eq=False)
class ValidationBatches:
    """The validation data, in the order of the corpus: `batches(index)` for index in range(len(batches))."""

    tokens: Tokens
    sequence_length: int
    microbatch_size: int
    num_batches: int

    def __len__(self) -> int:
        return self.num_batches

    def num_tokens(self, index: int) -> int:
        """Returns the number of targets that count in the loss, in one batch."""
        return len(self._windows(index)) * self.sequence_length

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of the same shape as in `Batches`.

        In the last batch, missing rows are filled with zeros, and their targets are IGNORE.
        """
        inputs, targets = _read(self.tokens, self._windows(index), self.sequence_length)
        missing = (self.microbatch_size - len(inputs), self.sequence_length)
        inputs = torch.cat((inputs, inputs.new_zeros(missing)))
        return inputs, torch.cat((targets, targets.new_full(missing, IGNORE)))

    def _windows(self, index: int) -> range:
        if not 0 <= index < self.num_batches:
            raise IndexError(f"validation batch {index} of {self.num_batches}")
        windows = range(_num_windows(self.tokens, self.sequence_length))
        return windows[index * self.microbatch_size : (index + 1) * self.microbatch_size]


def validation_batches(
    tokens: Tokens, sequence_length: int, microbatch_size: int, max_batches: int | None = None
) -> ValidationBatches:
    """Returns batches that contain every held-out window once.

    max_batches: only the first `max_batches` batches are used. None means all.
    """
    _check_positive(sequence_length=sequence_length, microbatch_size=microbatch_size)
    _check_window(tokens, sequence_length, "validation")
    num_batches = -(-_num_windows(tokens, sequence_length) // microbatch_size)
    if max_batches is not None:
        _check_positive(max_batches=max_batches)
        num_batches = min(num_batches, max_batches)
    return ValidationBatches(tokens, sequence_length, microbatch_size, num_batches)


@lru_cache(maxsize=16)
def _shuffled_block(block: int, size: int, num_windows: int, seed: int) -> np.ndarray:
    return shuffled(range(block * size, (block + 1) * size), num_windows, seed)


def shuffled(samples: Sequence[int], num_windows: int, seed: int) -> np.ndarray:
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
def _round_keys(seed: int, epoch: int) -> np.ndarray:
    return np.frombuffer(hashlib.sha512(f"{seed}/{epoch}".encode()).digest(), dtype="<u8").astype(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies the finaliser of splitmix64: every bit of the result depends on every bit of x. Products wrap at 64
    bits."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _num_windows(tokens: Tokens, sequence_length: int) -> int:
    return max(len(tokens) - 1, 0) // sequence_length


def _read(tokens: Tokens, windows: Iterable[int], sequence_length: int) -> tuple[Tensor, Tensor]:
    starts = (window * sequence_length for window in windows)
    rows = torch.from_numpy(np.stack([tokens.read(start, start + sequence_length + 1) for start in starts]))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _check_positive(**fields: int) -> None:
    for field, value in fields.items():
        if value < 1:
            raise DataError(f"{field} is {value}: set it to 1 or more.")


def _check_window(tokens: Tokens, sequence_length: int, part: str) -> None:
    if len(tokens) <= sequence_length:
        raise DataError(
            f"sequence_length is {sequence_length}, so one window takes {sequence_length + 1} tokens, "
            f"but there are {len(tokens)} for {part}: shorten it or give more data."
        )
