"""Ideals are the textbook's, and the simulator finds the step time it was fed."""

from __future__ import annotations

import pytest

from slipstream.tools.bench.contenders import Contender, Round, StageCosts, World
from slipstream.tools.bench.theory import ideal_utilisation, nominal_seconds, predicted_seconds
from slipstream.tools.bench.workloads import work_of


def world(contender: Contender, num_stages: int, unbalanced: bool = False) -> World:
    return World("emulated", num_stages, (contender,), num_rounds=1, num_steps=6, unbalanced=unbalanced)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "one_f_one_b"])
def test_a_flush_leaves_m_of_m_plus_p_minus_1(schedule):
    contender = Contender("r", 8, schedule)
    assert ideal_utilisation(contender, world(contender, 4), {}) == pytest.approx(8 / 11)


@pytest.mark.parametrize("schedule", ["two_bw", "pipedream", "paci"])
def test_without_a_flush_the_slowest_stage_never_idles(schedule):
    contender = Contender("r", 8, schedule)
    assert ideal_utilisation(contender, world(contender, 4), {}) == pytest.approx(1)
    assert ideal_utilisation(contender, world(contender, 4, unbalanced=True), {}) == pytest.approx(4.5 / 4 / 1.5)


def test_torchs_other_schedules_have_the_ideal_of_their_own_order_or_none():
    contender = Contender("r", 8, "ScheduleZBVZeroBubble")
    assert ideal_utilisation(contender, world(contender, 4), {"ideal_step": 10.0}) == pytest.approx(0.8)
    assert ideal_utilisation(contender, world(contender, 4), {}) is None


def test_a_schedule_that_cannot_be_has_no_ideal():
    contender = Contender("r", 4, "two_bw", depth="double")
    assert ideal_utilisation(contender, world(contender, 4), {}) is None


@pytest.mark.parametrize("schedule", ["two_bw", "pipedream", "paci"])
def test_the_prediction_is_the_slowest_stages_work_and_overhead(schedule):
    costs = [StageCosts(forward=0.01, backward=0.02, update=0.0, sums=0.0, overhead=0.001)] * 3
    costs[1] = StageCosts(forward=0.02, backward=0.02, update=0.0, sums=0.0, overhead=0.001)
    contender = Contender("r", 4, schedule)
    predicted = predicted_seconds(contender, world(contender, 3), Round(1.0, tuple(costs), message_seconds=0.0))
    overhead_of_update = 0.0 if schedule == "two_bw" else 0.001
    assert predicted == pytest.approx(4 * 0.042 + overhead_of_update, rel=0.02)


def test_a_flushing_update_waits_as_long_as_the_stage_that_comes_last_to_it():
    waits = [0.005, 0.04]
    costs = tuple(StageCosts(0.01, 0.02, update=0.001, sums=wait, overhead=0.0) for wait in waits)
    contender = Contender("r", 2, "one_f_one_b")
    predicted = predicted_seconds(contender, world(contender, 2), Round(1.0, costs, message_seconds=0.0))
    assert predicted == pytest.approx(3 * 0.03 + 0.005 + 0.001)


def test_a_message_slows_a_flushing_schedule_down():
    costs = tuple([StageCosts(0.01, 0.02, update=0.0, sums=0.0, overhead=0.0)] * 2)
    contender = Contender("r", 2, "one_f_one_b")
    fast, slow = (
        predicted_seconds(contender, world(contender, 2), Round(1.0, costs, seconds)) for seconds in (0.0, 0.003)
    )
    assert slow > fast + 2 * 0.003 - 1e-9


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw", "pipedream", "paci"])
@pytest.mark.parametrize("unbalanced", [False, True])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_the_steps_that_are_measured_are_steady(schedule, unbalanced, factor):
    contender = Contender("r", 4 * factor, schedule)
    its_world = world(contender, 4, unbalanced)
    costs = [StageCosts(0.01 * work, 0.02 * work, 0.0, 0.0, overhead=0.0) for work in work_of(4, unbalanced)]
    predicted = predicted_seconds(contender, its_world, Round(1.0, tuple(costs), message_seconds=0.0))
    ideal = ideal_utilisation(contender, its_world, {})
    assert predicted == pytest.approx(nominal_seconds(contender, its_world) / ideal, rel=0.003)
