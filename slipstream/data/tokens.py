"""Token ids, one after another, wherever they lie; and the one error that everything about data raises."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np


class DataError(ValueError):
    """A mistake in the data or its settings, in one sentence: the field or file, its value, the remedy."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """One sequence of token ids laid over 1-D arrays, in memory or memory-mapped, without copying them."""

    parts: tuple[np.ndarray, ...]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((len(part) for part in self.parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy, as int64, of the ids from start to stop; the only place where ids leave the disk."""
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
        """The ids before `at` and those from it on."""
        before, after = [], []
        for start, part in zip(self._starts[:-1], self.parts, strict=True):
            cut = min(max(at - start, 0), len(part))
            before.append(part[:cut])
            after.append(part[cut:])
        return Tokens(tuple(before)), Tokens(tuple(after))


def num_held_out(num_tokens: int, validation_fraction: float) -> int:
    """How many ids at the end of a corpus are kept from training, when nobody named a validation set."""
    return int(num_tokens * validation_fraction)
