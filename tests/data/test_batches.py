"""Batches: a batch is a function of its index, and an epoch misses nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from data_files import counting

from slipstream.data import Batches, validation_batches
from slipstream.data.batches import shuffled
from slipstream.model.decoder import IGNORE


def test_targets_are_the_inputs_shifted_by_one() -> None:
    inputs, targets = Batches(counting(101), sequence_length=10, microbatch_size=4, num_microbatches=2)(3, 1)
    assert inputs.shape == targets.shape == (4, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 0] % 10, torch.zeros(4, dtype=torch.int64))


def test_a_batch_depends_on_its_index_alone() -> None:
    batches = Batches(counting(1001), 10, 2, 3, seed=5)
    later_first = {index: batches(*index) for index in [(7, 2), (0, 0), (7, 1)]}
    again = Batches(counting(1001), 10, 2, 3, seed=5)
    for index, (inputs, _) in sorted(later_first.items()):
        assert torch.equal(again(*index)[0], inputs)
    assert batches.windows(7, 2) != batches.windows(7, 1) != batches.windows(0, 0)


def test_the_seed_changes_the_order() -> None:
    orders = {tuple(shuffled(range(100), 100, seed)) for seed in range(20)}
    assert len(orders) == 20


def test_the_order_is_pinned() -> None:
    """A resumed run must go on in the order it began with, whatever release it is resumed with."""
    assert shuffled(range(20), 10, seed=0).tolist() == [
        0,
        7,
        1,
        8,
        5,
        6,
        9,
        2,
        3,
        4,
        1,
        9,
        8,
        2,
        0,
        5,
        3,
        6,
        7,
        4,
    ]


@pytest.mark.parametrize("num_windows", [1, 2, 3, 4, 5, 16, 17, 100, 257, 1000])
def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(num_windows: int) -> None:
    first, second = (
        shuffled(range(epoch * num_windows, (epoch + 1) * num_windows), num_windows, 0).tolist() for epoch in (0, 1)
    )
    assert sorted(first) == sorted(second) == list(range(num_windows))
    if num_windows >= 16:
        assert first != second and first != sorted(first)


def test_neighbours_in_the_order_are_not_neighbours_in_the_corpus() -> None:
    order = shuffled(range(4000), 4000, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(4000), order)[0, 1]) < 0.05
    assert len(np.unique(np.diff(order))) > 2000  # an affine permutation would have two steps


def test_a_huge_corpus_needs_no_table() -> None:
    windows = shuffled(range(100), 10**12 + 39, 0).tolist()
    assert len(set(windows)) == 100 and max(windows) < 10**12 + 39


@pytest.mark.parametrize(("num_windows", "microbatch_size"), [(1, 3), (7, 3), (5000, 3), (5000, 2500), (1024, 1024)])
def test_a_microbatch_reads_the_windows_of_its_samples(num_windows: int, microbatch_size: int) -> None:
    batches = Batches(counting(2 * num_windows + 1), 2, microbatch_size, 2, seed=3)
    steps = range(200, 220)  # some of them across the edge of a block
    read = [window for step in steps for m in range(2) for window in batches.windows(step, m)]
    samples = range(200 * 2 * microbatch_size, 220 * 2 * microbatch_size)
    assert read == shuffled(samples, num_windows, 3).tolist()


def test_microbatches_of_an_epoch_are_disjoint_and_leave_nothing_out() -> None:
    batches = Batches(counting(16 * 3 * 10 + 1), 10, 2, 12)  # 48 windows: 2 steps of 12 microbatches x 2 rows
    seen = Counter(w for step in range(2) for m in range(12) for w in batches.windows(step, m))
    assert seen == Counter(range(48))


def test_a_step_reads_the_same_windows_however_it_is_divided() -> None:
    def step(microbatch_size: int, num_microbatches: int) -> set[int]:
        batches = Batches(counting(1001), 10, microbatch_size, num_microbatches)
        return {w for m in range(num_microbatches) for w in batches.windows(5, m)}

    assert step(2, 4) == step(8, 1) == step(1, 8)


def test_the_last_tokens_that_fill_no_window_are_never_read() -> None:
    assert Batches(counting(40), 10, 1, 1).num_windows == 3  # the 40th token has no window to be the target of
    assert Batches(counting(41), 10, 1, 1).num_windows == 4


def test_num_tokens_counts_the_whole_batch() -> None:
    batches = Batches(counting(1001), 10, 2, 12)
    assert batches.num_tokens(0) == 12 * sum((batches(0, 0)[1] != IGNORE).sum(1)).item()


@pytest.mark.parametrize("index", [(-1, 0), (0, -1), (0, 3)])
def test_an_index_outside_the_step_is_refused(index: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match="step"):
        Batches(counting(1001), 10, 2, 3)(*index)


def test_validation_visits_every_window_once_in_order() -> None:
    batches = validation_batches(counting(75), sequence_length=10, microbatch_size=3, max_batches=8)
    assert len(batches) == 3  # 7 windows
    rows = [(i, t) for index in range(3) for i, t in zip(*batches(index), strict=True) if (t != IGNORE).all()]
    assert [int(inputs[0]) for inputs, _ in rows] == list(range(0, 70, 10))
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in rows)


def test_the_last_validation_batch_is_padded_with_targets_that_do_not_count() -> None:
    batches = validation_batches(counting(75), 10, 3, 8)
    inputs, targets = batches(2)
    assert inputs.shape == targets.shape == (3, 10)
    assert (targets[1:] == IGNORE).all() and (inputs[1:] == 0).all()
    assert [batches.num_tokens(index) for index in range(3)] == [30, 30, 10]
    with pytest.raises(IndexError, match="3 of 3"):
        batches(3)


def test_max_batches_caps_validation() -> None:
    assert len(validation_batches(counting(75), 10, 3, max_batches=2)) == 2
    assert len(validation_batches(counting(75), 10, 3, max_batches=9)) == 3
