"""Every schedule keeps its promises, and one that was broken on purpose is caught by name."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.schedule import DEPTHS, SCHEDULES, Action, Op, Schedule, ScheduleError
from slipstream.schedule.check import check, check_actions

# Enough to see several steps of small pipelines, few enough that all examples take seconds.
MAX_ACTIONS = 8_000


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(SCHEDULES))
    depth = draw(st.sampled_from(DEPTHS)) if name == "two_bw" else "minimum"
    num_stages = draw(st.integers(1, 64))
    least = Schedule(name, num_stages, 256, depth=depth).min_microbatches
    num_microbatches = draw(st.integers(least, 256))
    max_steps = max(1, min(8, MAX_ACTIONS // (2 * num_stages * num_microbatches)))
    num_steps = draw(st.integers(1, max_steps))
    return Schedule(
        name,
        num_stages,
        num_microbatches,
        num_steps,
        depth,
        sync_start_steps=draw(st.integers(0, 3)),
        global_update=draw(st.booleans()),
        evaluate_after=draw(st.sets(st.integers(0, 8))),
        num_evaluations=draw(st.integers(0, 3)),
        first_step=draw(st.integers(0, num_steps)),
    )


@settings(max_examples=60, deadline=None)
@given(schedules())
@example(Schedule("two_bw", 64, 256, 1))
@example(Schedule("two_bw", 64, 127, 3, depth="double"))
@example(Schedule("two_bw", 1, 1, 5))
@example(Schedule("pipedream", 12, 1, 16, sync_start_steps=2, evaluate_after=range(16), num_evaluations=1))
@example(Schedule("paci", 12, 1, 16, sync_start_steps=2, evaluate_after=range(16), num_evaluations=1))
@example(Schedule("two_bw", 4, 4, 6, sync_start_steps=2, evaluate_after=range(6), num_evaluations=2))
@example(Schedule("two_bw", 4, 4, 6, sync_start_steps=2, evaluate_after=range(6), num_evaluations=2, first_step=3))
@example(Schedule("pipedream", 4, 2, 9, sync_start_steps=1, first_step=3))
def test_every_schedule_keeps_its_promises(schedule):
    report = check(schedule)
    stages = range(schedule.num_stages)
    first, end = schedule.first_step, schedule.num_steps
    evaluations = schedule.num_evaluations * sum(first - 1 <= step < end for step in schedule.evaluate_after)
    per_stage = (2 * schedule.num_microbatches + 1) * (end - first) + evaluations
    assert report.num_actions == schedule.num_stages * per_stage
    for stage in stages:
        assert report.live_versions[stage] <= schedule.num_versions(stage)
        if schedule.name != "paci" and report.delays[stage] is not None:
            assert report.delays[stage] == (schedule.delay(stage),) * 2
    assert report.max_drift <= max(schedule.max_drift(stage) for stage in stages)


def test_64_stages_of_256_microbatches_are_checked():
    report = check(Schedule("two_bw", 64, 256, 4))
    assert report.num_actions == 131_328
    assert report.peak_in_flight == tuple(range(64, 0, -1))


@pytest.mark.parametrize("name", ["two_bw", "one_f_one_b", "gpipe", "pipedream"])
@pytest.mark.parametrize("sync_start_steps", [0, 2, 5])
@pytest.mark.parametrize("first_step", [1, 2, 3, 5])
def test_a_run_that_is_taken_up_reads_the_versions_it_would_have_read(name, sync_start_steps, first_step):
    whole = Schedule(name, 3, 3, 7, sync_start_steps=sync_start_steps)
    rest = replace(whole, first_step=first_step)
    for stage in range(3):
        later = [action for action in whole.actions(stage) if action.microbatch >= first_step * 3]
        assert sorted(map(str, rest.actions(stage))) == sorted(map(str, later))


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8, 16])
def test_two_bw_delay_is_one_on_every_stage(num_stages):
    report = check(Schedule("two_bw", num_stages, num_stages, 5))
    assert report.delays == ((1, 1),) * num_stages
    assert report.live_versions == (2,) * num_stages
    assert report.max_drift == 0


def test_the_synchronous_start_does_not_count_as_late():
    report = check(Schedule("two_bw", 4, 4, 6, sync_start_steps=2))
    assert report.delays == ((1, 1),) * 4
    assert check(Schedule("two_bw", 4, 4, 3, sync_start_steps=2)).delays == (None,) * 4


def test_pipedream_delay_and_versions_grow_towards_the_input():
    report = check(Schedule("pipedream", 4, 2, 8))
    assert report.delays == ((3, 3), (2, 2), (1, 1), (0, 0))
    assert report.live_versions == (4, 3, 2, 1)
    assert report.peak_in_flight == (7, 5, 3, 1)


def test_paci_keeps_one_version_and_drifts_instead():
    report = check(Schedule("paci", 4, 2, 8))
    assert report.live_versions == (1, 1, 1, 1)
    assert report.max_drift == 2


def test_flushing_schedules_are_never_late():
    for name in ("gpipe", "one_f_one_b"):
        report = check(Schedule(name, 4, 8, 3))
        assert report.delays == ((0, 0),) * 4
        assert report.live_versions == (1,) * 4
    assert check(Schedule("gpipe", 4, 8, 3)).peak_in_flight == (8, 8, 8, 8)
    assert check(Schedule("one_f_one_b", 4, 8, 3)).peak_in_flight == (4, 3, 2, 1)


def test_double_depth_keeps_two_forwards_more_per_stage_in_flight():
    assert check(Schedule("two_bw", 4, 8, 3, depth="double")).peak_in_flight == (7, 5, 3, 1)


# Broken on purpose: two stages, two microbatches a step; the edits speak the actions' own text.


def rows_of(schedule):
    return [list(schedule.actions(stage)) for stage in range(schedule.num_stages)]


def at(rows, text):
    action = Action.parse(text)
    return action, rows[action.stage], rows[action.stage].index(action)


def remove(rows, text):
    _, row, index = at(rows, text)
    del row[index]


def repeat(rows, text):
    action, row, index = at(rows, text)
    row.insert(index, action)


def swap(rows, one, other):
    _, row, index = at(rows, one)
    _, _, other_index = at(rows, other)
    row[index], row[other_index] = row[other_index], row[index]


def move(rows, text, before):
    action, row, index = at(rows, text)
    del row[index]
    row.insert(at(rows, before)[2], action)


def rewrite(rows, text, version):
    action, row, index = at(rows, text)
    row[index] = replace(action, version=version)


def two_bw(**changes):
    return Schedule(**{"name": "two_bw", "num_stages": 2, "num_microbatches": 2, "num_steps": 4, **changes})


def assert_caught(schedule, rows, sentence):
    with pytest.raises(ScheduleError) as error:
        check_actions(schedule, rows)
    assert str(error.value) == sentence


def test_a_missing_forward_backward_or_update_is_caught():
    for text, sentence in (
        ("1F2@v0", "1F2 is missing from stage 1"),
        ("0B3@v0", "0B3 is missing from stage 0"),
        ("1U3@v2", "1U3 is missing from stage 1"),
    ):
        rows = rows_of(two_bw())
        remove(rows, text)
        assert_caught(two_bw(), rows, sentence)


def test_a_forward_played_twice_is_caught():
    rows = rows_of(two_bw())
    repeat(rows, "1F2@v0")
    assert_caught(two_bw(), rows, "1F2@v0 is played twice")


def test_an_action_of_another_stage_or_run_is_caught():
    for text in ("0F0@v0", "1F8@v3", "1U0@v1", "1E0@v1"):
        rows = rows_of(two_bw())
        rows[1].append(Action.parse(text))
        assert_caught(two_bw(), rows, f"{text} does not belong to stage 1 of this schedule")


def test_forwards_received_in_another_order_than_sent_are_caught():
    rows = rows_of(two_bw())
    swap(rows, "1F2@v0", "1F3@v0")
    sentence = "1F3@v0 receives what 0F2@v0 sends: stage 1 expects the messages of stage 0 in another order"
    assert_caught(two_bw(), rows, sentence)


def test_gradients_received_in_another_order_than_sent_are_caught():
    rows = rows_of(two_bw())
    swap(rows, "0B2@v0", "0B3@v0")
    sentence = "0B3@v0 receives what 1B2@v0 sends: stage 0 expects the messages of stage 1 in another order"
    assert_caught(two_bw(), rows, sentence)


def test_an_evaluation_that_overtakes_a_forward_on_one_stage_is_caught():
    schedule = two_bw(evaluate_after=[0], num_evaluations=1)
    rows = rows_of(schedule)
    move(rows, "1E0@v1", before="1F3@v0")
    sentence = "1E0@v1 receives what 0F3@v0 sends: stage 1 expects the messages of stage 0 in another order"
    assert_caught(schedule, rows, sentence)


@pytest.mark.parametrize("op", ["F", "B"])
def test_microbatches_out_of_order_on_all_stages_are_caught(op):
    rows = rows_of(two_bw())
    for stage in (0, 1):
        swap(rows, f"{stage}{op}2@v0", f"{stage}{op}3@v0")
    sentence = f"0{op}3@v0 comes before 0{op}2@v0, but microbatches pass in ascending order"
    assert_caught(two_bw(), rows, sentence)


def test_a_version_read_before_it_is_written_is_caught():
    rows = rows_of(two_bw())
    rewrite(rows, "0F2@v0", version=1)
    assert_caught(two_bw(), rows, "0F2@v1 reads version 1 before its stage has written it")


def test_a_backward_on_another_version_than_its_forward_is_caught():
    rows = rows_of(two_bw())
    rewrite(rows, "0B3@v0", version=1)
    sentence = "0B3@v1 reads version 1, but the forward read version 0: stage 0 allows a drift of 0"
    assert_caught(two_bw(), rows, sentence)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_batch_later_than_promised_is_caught(stage):
    rows = rows_of(two_bw())
    rewrite(rows, f"{stage}F4@v1", version=0)
    sentence = f"{stage}F4@v0 does not read version 1, which its batch runs on"
    assert_caught(two_bw(), rows, sentence)


def test_the_last_stage_must_not_use_the_newest_weights_it_has():
    rows = rows_of(two_bw())
    move(rows, "1U1@v1", before="1F3@v0")
    for op in ("F", "B"):
        rewrite(rows, f"1{op}3@v0", version=1)
    assert_caught(two_bw(), rows, "1F3@v1 does not read version 0, which its batch runs on")


def test_a_version_written_out_of_turn_is_caught():
    rows = rows_of(two_bw())
    rewrite(rows, "1U3@v2", version=3)
    assert_caught(two_bw(), rows, "1U3@v3 writes out of turn: version 2 comes next")


def test_a_third_live_version_is_caught():
    rows = rows_of(two_bw())
    move(rows, "0U3@v2", before="0B3@v0")
    sentence = "0U3@v2 writes a version too many: stage 0 has room for 2 and has yet to read v0 and v1"
    assert_caught(two_bw(), rows, sentence)


def test_an_update_under_a_batch_in_flight_is_caught_in_one_buffer():
    schedule = Schedule("gpipe", 1, 2, 1)
    rows = rows_of(schedule)
    move(rows, "0U1@v1", before="0B1@v0")
    sentence = "0U1@v1 writes a version too many: stage 0 has room for 1 and has yet to read v0"
    assert_caught(schedule, rows, sentence)


def test_an_evaluation_after_too_many_updates_is_caught():
    schedule = two_bw(evaluate_after=[0], num_evaluations=1)
    rows = rows_of(schedule)
    for stage in (0, 1):
        move(rows, f"{stage}E0@v1", before=f"{stage}F6@v2")
    assert_caught(schedule, rows, "0E0@v1 runs after 2 updates of its stage, not after 1")


def test_a_backward_before_its_forward_is_caught():
    schedule = Schedule("gpipe", 1, 2, 1)
    rows = rows_of(schedule)
    move(rows, "0B0@v0", before="0F0@v0")
    assert_caught(schedule, rows, "0B0@v0 comes before the forward of its microbatch")


def test_a_deadlock_names_what_every_stuck_stage_waits_for():
    schedule = Schedule("gpipe", 2, 2, 1)
    rows = rows_of(schedule)
    move(rows, "0B0@v0", before="0F1@v0")
    assert_caught(schedule, rows, "the schedule deadlocks: 0B0@v0 waits for 1B0, 1F1@v0 waits for 0F1")


def test_the_deadlock_of_an_update_names_the_backward_it_waits_for():
    rows = rows_of(two_bw())
    move(rows, "0U1@v1", before="0B1@v0")
    with pytest.raises(ScheduleError, match="the schedule deadlocks: 0U1@v1 waits for 0B1, "):
        check_actions(two_bw(), rows)


def test_paci_must_read_the_weights_it_has():
    schedule = Schedule("paci", 2, 2, 2)
    rows = rows_of(schedule)
    rewrite(rows, "0B2@v1", version=0)
    assert_caught(schedule, rows, "0B2@v0 does not read version 1, which its batch runs on")


def test_paci_must_not_drift_further_than_its_depth_allows():
    schedule = Schedule("paci", 2, 1, 3)
    deep = "0F0@v0 0F1@v0 0F2@v0 0B0@v0 0U0@v1 0B1@v1 0U1@v2 0B2@v2 0U2@v3"
    rows = [[Action.parse(text) for text in deep.split()], list(schedule.actions(1))]
    sentence = "0B2@v2 reads version 2, but the forward read version 0: stage 0 allows a drift of 1"
    assert_caught(schedule, rows, sentence)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_action_can_be_lost_repeated_or_run_on_other_weights_unnoticed(name):
    schedule = Schedule(name, 3, 3, 3, sync_start_steps=1)
    for stage, row in enumerate(rows_of(schedule)):
        for index, action in enumerate(row):
            for instead in ([], [action, action], [replace(action, version=action.version + 1)]):
                rows = rows_of(schedule)
                rows[stage][index : index + 1] = instead
                with pytest.raises(ScheduleError, match=f"{stage}{action.op}"):
                    check_actions(schedule, rows)


def test_a_schedule_without_end_cannot_be_checked():
    with pytest.raises(ScheduleError, match="two_bw without num_steps never ends"):
        check(two_bw(num_steps=None))


def test_one_sequence_per_stage_is_needed():
    with pytest.raises(ScheduleError, match="1 sequences of actions cannot be checked against 2 stages and 4 steps"):
        check_actions(two_bw(), rows_of(two_bw())[:1])


def test_evaluations_pass_at_the_same_place_among_the_forwards_of_every_stage():
    schedule = two_bw(num_stages=4, num_microbatches=4, num_steps=6, evaluate_after=[1], num_evaluations=3)
    check(schedule)
    for row in rows_of(schedule):
        passing = [action for action in row if action.op in (Op.FORWARD, Op.EVALUATE)]
        assert [str(action.key)[1:] for action in passing[11:16]] == ["F11", "E0@v2", "E1@v2", "E2@v2", "F12"]
