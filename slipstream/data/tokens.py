"""Defines a sequence of token ids, in memory or on disk, and the error that all functions for data raise."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import UsageError


class DataError(UsageError):
    """Raised for a mistake in the data or its settings, with one sentence: the field or file, its value, the remedy."""


def optional(library: str, extra: str, whose: str) -> Any:
    """Imports a library that an extra of this package installs. whose: what needs it, for the error message."""
    try:
        return import_module(library)
    except ImportError:
        raise DataError(f"{whose} needs the {library} library: pip install 'slipstream[{extra}]'.") from None


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sequence of token ids, made of several 1-D arrays without copying them. They are in memory or memory-mapped."""

    parts: tuple[np.ndarray, ...]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((len(part) for part in self.parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns a copy, as int64, of the ids from start to stop. Only this method reads ids from disk."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"ids {start} to {stop} of {len(self)}")
        ids = np.empty(stop - start, dtype=np.int64)
        part, done = bisect_right(self._starts, start) - 1, 0
        while done < len(ids):
            offset = start + done - self._starts[part]
            chunk = self.parts[part][offset : offset + len(ids) - done]
            ids[done : done + len(chunk)] = chunk
            part, done = part + 1, done + len(chunk)
        return ids

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Returns the ids before index `at`, and those from `at` on."""
        before, after = [], []
        for start, part in zip(self._starts[:-1], self.parts, strict=True):
            cut = min(max(at - start, 0), len(part))
            before.append(part[:cut])
            after.append(part[cut:])
        return Tokens(tuple(before)), Tokens(tuple(after))


def num_held_out(num_tokens: int, validation_fraction: float) -> int:
    """Returns the number of ids at the end of a corpus that are held out if no validation set is configured."""
    return int(num_tokens * validation_fraction)
