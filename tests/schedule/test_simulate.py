"""The clock: bubbles match their formulas, and latency costs what the theory says."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.schedule import SCHEDULES, Schedule, ScheduleError
from slipstream.schedule.simulate import Box, Costs, Timeline, min_steady_steps, simulate

costs_in_quarters = st.integers(1, 12).map(lambda quarters: quarters / 4)


def starts(timeline, stage):
    return [(str(box.action), box.start, box.end) for box in timeline.boxes_by_stage[stage]]


def test_two_stages_by_hand():
    timeline = simulate(Schedule("one_f_one_b", 2, 2, 1), Costs(update=0.5, latency=0.25))
    assert starts(timeline, 0) == [
        ("0F0@v0", 0.0, 1.0),
        ("0F1@v0", 1.0, 2.0),
        ("0B0@v0", 4.5, 6.5),
        ("0B1@v0", 7.5, 9.5),
        ("0U1@v1", 9.5, 10.0),
    ]
    assert starts(timeline, 1) == [
        ("1F0@v0", 1.25, 2.25),
        ("1B0@v0", 2.25, 4.25),
        ("1F1@v0", 4.25, 5.25),
        ("1B1@v0", 5.25, 7.25),
        ("1U1@v1", 9.75, 10.25),
    ]
    assert timeline.makespan == 10.25
    assert timeline.peak_in_flight == (2, 1)


def test_an_update_of_one_stage_alone_waits_for_nobody():
    timeline = simulate(Schedule("one_f_one_b", 2, 2, 1, global_update=False), Costs())
    assert starts(timeline, 1)[-1] == ("1U1@v1", 7.0, 7.0)


def test_boxes_are_in_order_of_time_and_of_each_stage():
    schedule = Schedule("two_bw", 4, 4, 3)
    timeline = simulate(schedule, Costs())
    assert [box.start for box in timeline.boxes] == sorted(box.start for box in timeline.boxes)
    for stage, row in enumerate(timeline.boxes_by_stage):
        assert [box.action for box in row] == list(schedule.actions(stage))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 24), costs_in_quarters, costs_in_quarters)
def test_the_bubble_of_flushing_schedules_is_the_textbook_one(num_stages, num_microbatches, forward, backward):
    expected = num_microbatches / (num_microbatches + num_stages - 1)
    for name in ("gpipe", "one_f_one_b"):
        timeline = simulate(Schedule(name, num_stages, num_microbatches, 3), Costs(forward, backward))
        assert timeline.steady_utilisation == pytest.approx([expected] * num_stages)
        assert timeline.bubble == pytest.approx(1 - expected)
        assert timeline.step_time == (num_microbatches + num_stages - 1) * (forward + backward)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), costs_in_quarters, costs_in_quarters, st.booleans())
@example(4, 0, 1.0, 2.0, True)
def test_two_bw_has_no_bubble_even_when_updates_wait_for_all_stages(
    num_stages, more_microbatches, forward, backward, global_update
):
    num_microbatches = num_stages + more_microbatches
    schedule = Schedule("two_bw", num_stages, num_microbatches, 3, global_update=global_update)
    timeline = simulate(schedule, Costs(forward, backward))
    assert timeline.steady_utilisation == (1.0,) * num_stages
    assert timeline.bubble == 0.0
    assert timeline.step_time == num_microbatches * (forward + backward)


def test_pipedream_and_paci_have_no_bubble_when_stages_update_alone():
    for name in ("pipedream", "paci"):
        schedule = Schedule(name, 4, 4, 6, global_update=False)
        assert simulate(schedule, Costs()).steady_utilisation == (1.0,) * 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_steady_state_does_not_depend_on_the_length_of_the_run(name):
    shortest = min_steady_steps(Schedule(name, 3, 4))
    bubbles = {simulate(Schedule(name, 3, 4, shortest + more), Costs()).bubble for more in (0, 1, 5)}
    assert len(bubbles) == 1


def test_a_synchronous_start_is_no_part_of_the_steady_state():
    timeline = simulate(Schedule("two_bw", 4, 4, 5, sync_start_steps=2), Costs())
    assert timeline.bubble == 0.0


@pytest.mark.parametrize(("num_stages", "latency"), [(2, 0.25), (4, 0.25), (4, 1.0), (8, 0.5)])
def test_latency_at_minimum_depth_costs_almost_twice_its_length_in_every_slot(num_stages, latency):
    """A microbatch is away for P (f + b) + 2 (P - 1) c, and the first stage has P of them in flight."""
    timeline = simulate(Schedule("two_bw", num_stages, 2 * num_stages, 4), Costs(1, 2, latency=latency))
    slot = 3 + 2 * latency * (num_stages - 1) / num_stages
    assert timeline.step_time == pytest.approx(2 * num_stages * slot)
    assert timeline.steady_utilisation == pytest.approx([3 / slot] * num_stages)


@pytest.mark.parametrize("latency", [0.25, 0.5, 1.0, 1.5])
def test_double_depth_hides_latency_up_to_half_a_slot(latency):
    schedule = Schedule("two_bw", 4, 8, 4, depth="double")
    assert simulate(schedule, Costs(1, 2, latency=latency)).steady_utilisation == (1.0,) * 4


def test_double_depth_cannot_hide_more_than_half_a_slot():
    schedule = Schedule("two_bw", 4, 8, 4, depth="double")
    assert simulate(schedule, Costs(1, 2, latency=1.75)).bubble > 0.01


def test_the_slowest_stage_sets_the_pace():
    timeline = simulate(Schedule("two_bw", 3, 3, 8), Costs(forward=[1, 1, 2], backward=(2, 2, 2)))
    assert timeline.step_time == pytest.approx(12)
    assert timeline.steady_utilisation == pytest.approx([0.75, 0.75, 1.0])


def test_an_evaluation_costs_a_forward_unless_told_otherwise():
    schedule = Schedule("gpipe", 1, 1, 1, evaluate_after=[0], num_evaluations=1)
    assert simulate(schedule, Costs(forward=3)).makespan == 8
    assert simulate(schedule, Costs(forward=3, evaluate=1)).makespan == 6


def test_too_short_a_run_says_how_long_it_must_be():
    timeline = simulate(Schedule("pipedream", 4, 2, 5), Costs())
    with pytest.raises(ScheduleError, match="5 steps of pipedream show no steady state: use at least 6"):
        _ = timeline.bubble
    assert min_steady_steps(Schedule("two_bw", 4, 4)) == 3
    assert min_steady_steps(Schedule("two_bw", 4, 4, sync_start_steps=2)) == 5


def test_a_timeline_can_be_made_of_measured_boxes():
    schedule = Schedule("two_bw", 1, 1, 3)
    slots = enumerate(schedule.actions(0))
    timeline = Timeline(schedule, tuple(Box(action, start, start + 0.5) for start, action in slots))
    assert timeline.makespan == 8.5
    assert timeline.steady_utilisation == (0.5,)


@pytest.mark.parametrize(
    ("costs", "sentence"),
    [
        (Costs(forward=[1, 2]), "2 costs of a forward for 3 stages: give one, or one each"),
        (Costs(backward=-1), "the cost of a backward is -1.0: use 0 or more"),
        (Costs(latency=-0.5), "the latency is -0.5: use 0 or more"),
        (Costs(0, 0), "forwards and backwards cost nothing"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        simulate(Schedule("gpipe", 3, 3, 1), costs)


def test_a_schedule_without_end_cannot_be_simulated():
    with pytest.raises(ScheduleError, match="never ends"):
        simulate(Schedule("gpipe", 3, 3), Costs())
