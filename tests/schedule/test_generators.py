"""Golden texts of small schedules, one line per stage, and the promises a Schedule makes about itself."""

from dataclasses import replace
from itertools import islice

import pytest

from slipstream.schedule import SCHEDULES, EvaluationSteps, Op, Schedule, ScheduleError


def spoken(schedule):
    """`F8/1` for the forward of microbatch 8 on version 1; the stage is the line."""
    return [
        " ".join(f"{a.op}{a.microbatch}/{a.version}" for a in schedule.actions(stage))
        for stage in range(schedule.num_stages)
    ]


def test_gpipe_runs_all_forwards_before_the_backwards():
    assert spoken(Schedule("gpipe", 2, 3, num_steps=2)) == [
        "F0/0 F1/0 F2/0 B0/0 B1/0 B2/0 U2/1 F3/1 F4/1 F5/1 B3/1 B4/1 B5/1 U5/2",
        "F0/0 F1/0 F2/0 B0/0 B1/0 B2/0 U2/1 F3/1 F4/1 F5/1 B3/1 B4/1 B5/1 U5/2",
    ]


def test_one_f_one_b_alternates_and_flushes_at_every_update():
    assert spoken(Schedule("one_f_one_b", 3, 4, num_steps=1)) == [
        "F0/0 F1/0 F2/0 B0/0 F3/0 B1/0 B2/0 B3/0 U3/1",
        "F0/0 F1/0 B0/0 F2/0 B1/0 F3/0 B2/0 B3/0 U3/1",
        "F0/0 B0/0 F1/0 B1/0 F2/0 B2/0 F3/0 B3/0 U3/1",
    ]


def test_two_bw_plays_the_figure_of_the_design_with_each_update_at_its_deadline():
    assert spoken(Schedule("two_bw", 4, 4, num_steps=3)) == [
        "F0/0 F1/0 F2/0 F3/0 B0/0 F4/0 B1/0 F5/0 B2/0 F6/0 B3/0 F7/0 B4/0 U3/1 F8/1 B5/0 F9/1 B6/0 F10/1 "
        "B7/0 F11/1 B8/1 B9/1 B10/1 U7/2 B11/1 U11/3",
        "F0/0 F1/0 F2/0 B0/0 F3/0 B1/0 F4/0 B2/0 F5/0 B3/0 F6/0 B4/0 F7/0 B5/0 U3/1 F8/1 B6/0 F9/1 B7/0 "
        "F10/1 B8/1 F11/1 B9/1 B10/1 U7/2 B11/1 U11/3",
        "F0/0 F1/0 B0/0 F2/0 B1/0 F3/0 B2/0 F4/0 B3/0 F5/0 B4/0 F6/0 B5/0 F7/0 B6/0 U3/1 F8/1 B7/0 F9/1 B8/1 "
        "F10/1 B9/1 F11/1 B10/1 U7/2 B11/1 U11/3",
        "F0/0 B0/0 F1/0 B1/0 F2/0 B2/0 F3/0 B3/0 F4/0 B4/0 F5/0 B5/0 F6/0 B6/0 F7/0 U3/1 B7/0 F8/1 B8/1 F9/1 "
        "B9/1 F10/1 B10/1 F11/1 U7/2 B11/1 U11/3",
    ]


def test_double_depth_keeps_twice_the_forwards_in_flight():
    first, last = spoken(Schedule("two_bw", 2, 3, num_steps=1, depth="double"))
    assert first == "F0/0 F1/0 F2/0 B0/0 B1/0 B2/0 U2/1"
    assert last == "F0/0 B0/0 F1/0 B1/0 F2/0 B2/0 U2/1"


def test_pipedream_is_late_by_the_distance_to_the_last_stage():
    assert spoken(Schedule("pipedream", 3, 1, num_steps=4)) == [
        "F0/0 F1/0 F2/0 B0/0 U0/1 F3/1 B1/0 U1/2 B2/0 U2/3 B3/1 U3/4",
        "F0/0 F1/0 B0/0 U0/1 F2/1 B1/0 U1/2 F3/2 B2/1 U2/3 B3/2 U3/4",
        "F0/0 B0/0 U0/1 F1/1 B1/1 U1/2 F2/2 B2/2 U2/3 F3/3 B3/3 U3/4",
    ]


def test_paci_reads_whatever_weights_its_stage_has():
    assert spoken(Schedule("paci", 2, 2, num_steps=2)) == [
        "F0/0 F1/0 B0/0 F2/0 B1/0 U1/1 F3/1 B2/1 B3/1 U3/2",
        "F0/0 B0/0 F1/0 B1/0 U1/1 F2/1 B2/1 F3/1 B3/1 U3/2",
    ]


def test_a_synchronous_start_hands_over_at_a_step_boundary():
    assert spoken(Schedule("two_bw", 2, 2, num_steps=4, sync_start_steps=1)) == [
        "F0/0 F1/0 B0/0 B1/0 U1/1 F2/1 F3/1 B2/1 F4/1 B3/1 F5/1 B4/1 U3/2 F6/2 B5/1 F7/2 B6/2 U5/3 B7/2 U7/4",
        "F0/0 B0/0 F1/0 B1/0 U1/1 F2/1 B2/1 F3/1 B3/1 F4/1 B4/1 F5/1 U3/2 B5/1 F6/2 B6/2 F7/2 U5/3 B7/2 U7/4",
    ]


def test_an_evaluation_passes_between_two_batches_without_a_drain():
    schedule = Schedule("two_bw", 2, 2, num_steps=3, evaluate_after=[0, 2], num_evaluations=2)
    assert spoken(schedule) == [
        "F0/0 F1/0 B0/0 F2/0 B1/0 F3/0 B2/0 U1/1 E0/1 E1/1 F4/1 B3/0 F5/1 B4/1 U3/2 B5/1 U5/3 E0/3 E1/3",
        "F0/0 B0/0 F1/0 B1/0 F2/0 B2/0 F3/0 U1/1 B3/0 E0/1 E1/1 F4/1 B4/1 F5/1 U3/2 B5/1 U5/3 E0/3 E1/3",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_endless_schedule_begins_like_a_long_one(name):
    for stage in range(3):
        endless = Schedule(name, 3, 3, sync_start_steps=1, evaluate_after=range(9), num_evaluations=1)
        long = Schedule(name, 3, 3, 9, sync_start_steps=1, evaluate_after=range(9), num_evaluations=1)
        assert list(islice(endless.actions(stage), 40)) == list(islice(long.actions(stage), 40))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"name": "2bw"},
            "schedule '2bw' is unknown: choose one of gpipe, one_f_one_b, two_bw, pipedream, paci",
        ),
        ({"depth": "deep"}, "depth 'deep' is unknown: choose one of minimum, double"),
        ({"name": "gpipe", "depth": "double"}, "depth 'double' is made for two_bw, not for gpipe"),
        ({"num_stages": 0}, "0 stages are too few"),
        ({"num_steps": 0}, "0 steps are too few"),
        ({"sync_start_steps": -1}, "-1 synchronous steps are too few"),
        ({"num_microbatches": 3}, "3 microbatches are too few for two_bw on 4 stages .* use at least 4"),
        ({"depth": "double", "num_microbatches": 6}, "at double depth: use at least 7"),
    ],
)
def test_a_schedule_that_cannot_exist_is_refused_in_one_sentence(wrong, sentence):
    right = {"name": "two_bw", "num_stages": 4, "num_microbatches": 8, "num_steps": 3}
    with pytest.raises(ScheduleError, match=sentence):
        Schedule(**{**right, **wrong})


@pytest.mark.parametrize(("num_steps", "every"), [(1, 0), (1, 1), (7, 0), (7, 2), (8, 4), (5, 9)])
def test_evaluations_come_after_every_so_many_steps_and_at_the_end(num_steps, every):
    steps = EvaluationSteps(num_steps, every)
    expected = [step for step in range(num_steps) if (every and (step + 1) % every == 0) or step + 1 == num_steps]
    assert list(steps) == expected and len(steps) == len(expected)
    assert [step for step in range(-1, num_steps + 2) if step in steps] == expected
    listed = Schedule("two_bw", 2, 2, num_steps, evaluate_after=expected, num_evaluations=2)
    lazy = replace(listed, evaluate_after=steps)
    assert [list(lazy.actions(stage)) for stage in (0, 1)] == [list(listed.actions(stage)) for stage in (0, 1)]


def test_a_run_without_an_end_in_sight_begins_at_once():
    steps = EvaluationSteps(10**9, 1)
    schedule = Schedule("two_bw", 2, 2, 10**9, evaluate_after=steps, num_evaluations=1, first_step=1000)
    first = list(islice(schedule.actions(0), 20))
    assert sum(action.op is Op.EVALUATE for action in first) >= 2
