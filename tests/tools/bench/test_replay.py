"""torch's published orders, replayed with nominal costs."""

from __future__ import annotations

import pytest

from slipstream.tools.bench.replay import replayed_step_time
from slipstream.tools.bench.workloads import Placement


def order(*rows: str) -> dict[int, list[str | None]]:
    return {process: [None if word == "-" else word for word in row.split()] for process, row in enumerate(rows)}


def test_a_flush_costs_the_textbook_bubble():
    one_f_one_b = order("0F0 0F1 - 0B0 0B1", "- 1F0 1B0 1F1 1B1")
    assert replayed_step_time(one_f_one_b, Placement(2), [1, 1]) == pytest.approx(2 + 1)


def test_a_slow_process_sets_the_pace():
    serial = order("0F0 0B0", "1F0 1B0")
    assert replayed_step_time(serial, Placement(2), [1, 1.5]) == pytest.approx(2.5)


def test_a_half_for_the_weight_is_nobody_elses_business():
    joint = order("0F0 0B0", "1F0 1B0")
    split = order("0F0 0B0", "1F0 1I0 1W0")
    placement = Placement(2)
    assert replayed_step_time(joint, placement, [1, 1]) == pytest.approx(2)
    assert replayed_step_time(split, placement, [1, 1]) == pytest.approx(2 - 1 / 3)


def test_actions_that_overlap_are_played_one_after_the_other():
    apart = order("0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1")
    paired = order("0F0 1F0 (0F1;1B0)OVERLAP_F_B (1F1;0B0)OVERLAP_F_B 1B1 0B1")
    placement = Placement(1, "v")
    assert replayed_step_time(apart, placement, [1]) == pytest.approx(2)
    assert replayed_step_time(paired, placement, [1]) == pytest.approx(2)


@pytest.mark.parametrize("rows", [("0F0 0B0",), ("0B0 0F0", "1F0 1B0"), ("0F0 0B0", "1B0")])
def test_an_order_that_cannot_be_played_has_no_ideal(rows):
    assert replayed_step_time(order(*rows), Placement(2), [1, 1]) is None
