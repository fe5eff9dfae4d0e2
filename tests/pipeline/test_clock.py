"""Every second of a stage belongs to exactly one activity."""

import math

import pytest
import torch

from slipstream.pipeline.clock import Activity, Clock, TimeSplit
from slipstream.schedule import Action


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock whose time is told it."""
    now = [0.0]
    monkeypatch.setattr("slipstream.pipeline.clock.time.perf_counter", lambda: now[0])
    clock = Clock(torch.device("cpu"), steady_from_step=0, num_microbatches=2)
    clock.pass_time = lambda seconds: now.__setitem__(0, now[0] + seconds)
    return clock


def play(clock: Clock, activity: Activity, action: str | None, seconds: float) -> None:
    clock.enter(activity, Action.parse(action) if action else None)
    clock.pass_time(seconds)


def test_the_fields_of_a_split_are_the_activities_in_order():
    assert list(TimeSplit._fields) == [activity.name.lower() for activity in Activity]


def test_the_steady_window_opens_with_the_first_backward_and_closes_with_the_latest_forward(clock):
    play(clock, Activity.FORWARD, "0F0@v0", 1.0)
    assert math.isnan(clock.split().utilisation)
    play(clock, Activity.WAIT_GRADIENTS, "0B0@v0", 5.0)
    play(clock, Activity.BACKWARD, "0B0@v0", 2.0)
    play(clock, Activity.OTHER, None, 0.25)
    play(clock, Activity.DATA, "0F1@v0", 0.25)
    play(clock, Activity.WAIT_ACTIVATIONS, "0F1@v0", 0.5)
    play(clock, Activity.FORWARD, "0F1@v0", 1.0)
    play(clock, Activity.WAIT_GRADIENTS, "0B1@v0", 9.0)
    play(clock, Activity.BACKWARD, "0B1@v0", 2.0)
    assert clock.split() == TimeSplit(forward=1.0, backward=2.0, other=0.25, data=0.25, wait_activations=0.5)
    assert clock.split().utilisation == 0.75
    assert clock.num_actions == 2
    assert clock.split().shares().backward == 0.5


def test_the_executor_is_charged_for_what_it_computes_and_told_apart_from_what_it_was_kept_waiting(clock, monkeypatch):
    cpu = [0.0]
    monkeypatch.setattr("slipstream.pipeline.clock.time.thread_time", lambda: cpu[0])
    assert all(map(math.isnan, clock.executor_seconds_per_action))
    for microbatch in range(3):
        play(clock, Activity.BACKWARD, f"0B{microbatch}@v0", 2.0)
        cpu[0] += 2.0  # in which it computes
        play(clock, Activity.OTHER, None, 0.5)
        cpu[0] += 0.125  # another thread had the core for the rest
        play(clock, Activity.FORWARD, f"0F{microbatch + 1}@v0", 1.0)
        cpu[0] += 1.0
    clock.enter(Activity.OTHER)
    assert clock.executor_seconds_per_action == pytest.approx((0.25, 0.0625))  # two actions to one of these


def test_all_activities_add_up_to_the_wall_time(clock):
    for step in range(3):
        for activity in Activity:
            play(clock, activity, f"0F{step}@v0", 0.5)
        clock.enter(Activity.OTHER)
        since = clock.split_since_last()
        assert since.total == pytest.approx(0.5 * len(Activity))


def test_an_update_in_the_background_takes_none_of_the_stages_time(clock):
    play(clock, Activity.BACKWARD, "0B0@v0", 2.0)
    start = clock.mark()
    play(clock, Activity.FORWARD, "0F2@v0", 1.0)
    clock.add_background(Action.parse("0U1@v1"), start, clock.mark())
    clock.enter(Activity.OTHER)
    assert clock.split() == TimeSplit(forward=1.0, backward=2.0)
    assert (clock.num_background_updates, clock.background_seconds) == (1, 1.0)
    assert {str(span.action) for span in clock.spans} == {"0B0@v0", "0U1@v1", "0F2@v0"}
