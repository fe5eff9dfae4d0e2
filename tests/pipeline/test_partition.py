from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slipstream.pipeline.partition import PartitionError, Tied, check_sizes, cut, partition, tied_parameters


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.data())
def test_no_contiguous_cut_has_a_cheaper_bottleneck(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    sizes = partition(costs, num_stages)
    assert len(sizes) == num_stages and sum(sizes) == len(costs) and min(sizes) >= 1

    def bottleneck(bounds):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    ours = bottleneck([0, *itertools.accumulate(sizes)])
    every_cut = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert ours <= min(bottleneck([0, *cuts, len(costs)]) for cuts in every_cut) + 1e-9


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PartitionError, match="5 stages cannot share 3 layers: use 1 to 3 stages"):
        partition([1.0] * 3, 5)


@pytest.mark.parametrize("sizes", [[2, 2], [5], [4, 0], [3, 3, -1]])
def test_sizes_that_do_not_cut_the_model_are_refused(sizes):
    with pytest.raises(PartitionError, match="does not cut 5 layers into 2 stages"):
        check_sizes(sizes, 5, 2)


def test_names_survive_any_cut():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    whole = [name for name, _ in model.named_parameters()]
    for sizes in ([5], [1, 4], [2, 2, 1], [1] * 5):
        parts = [name for stage in range(len(sizes)) for name, _ in cut(model, sizes, stage).named_parameters()]
        assert parts == whole


def test_the_same_parameter_in_layers_of_two_stages_is_tied():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    model[3].weight = model[0].weight
    assert tied_parameters(model, [2, 2]) == dict.fromkeys(["0.weight", "3.weight"], Tied("0.weight", (0, 1)))
    assert tied_parameters(model, [1, 1, 1, 1]) == dict.fromkeys(["0.weight", "3.weight"], Tied("0.weight", (0, 3)))
    assert tied_parameters(model, [4]) == {}
