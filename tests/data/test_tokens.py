"""Tokens over several arrays are one sequence."""

from __future__ import annotations

import pytest
from data_files import counting, everything


@pytest.mark.parametrize("at", [0, 5, 10, 11, 30])
def test_tokens_split_and_read_across_parts(at: int) -> None:
    before, after = counting(30).split(at)
    assert everything(before).tolist() == list(range(at))
    assert everything(after).tolist() == list(range(at, 30))
    assert counting(30).read(8, 13).tolist() == [8, 9, 10, 11, 12]
    with pytest.raises(IndexError):
        counting(30).read(29, 31)
