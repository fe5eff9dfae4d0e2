"""Orders that are planned with: complete, possible, within their memory, and played as a plain simulator would."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.schedule import Op, Schedule
from slipstream.tools.plan.orders import Order, make_order, play

NAMES = ("gpipe", "one_f_one_b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v")
CHUNKS = {"interleaved_1f1b": 2, "zero_bubble_v": 2}
SPLIT = ("zero_bubble_h1", "zero_bubble_v")


@st.composite
def sizes(draw):
    name = draw(st.sampled_from(NAMES))
    num_stages = draw(st.integers(1, 16))
    if name == "interleaved_1f1b":
        return name, num_stages, num_stages * draw(st.integers(1, 64 // num_stages))
    return name, num_stages, draw(st.integers(1, 64))


class Operation(NamedTuple):
    """`F5.1` is the forward of microbatch 5 through chunk 1. B and W are the halves of its backward, BW is both."""

    kind: str
    microbatch: int
    chunk: int


def operations(order: Order, stage: int) -> list[Operation]:
    rows, microbatches = np.divmod(order.codes[stage], order.num_microbatches)
    kinds, chunks = np.divmod(rows, order.num_chunks)
    names = ["F", "B", "W"] if order.is_split else ["F", "BW"]
    return [Operation(names[kind], *place) for kind, *place in zip(kinds, microbatches, chunks, strict=True)]


def text(order: Order, stage: int) -> str:
    return " ".join(f"{kind}{microbatch}.{chunk}" for kind, microbatch, chunk in operations(order, stage))


def position(name, num_stages, stage, chunk):
    """Where a chunk stands in the model, said once more and in other words than in the code."""
    if chunk == 0:
        return stage
    return {"interleaved_1f1b": num_stages + stage, "zero_bubble_v": 2 * num_stages - 1 - stage}[name]


def ends_one_by_one(name, order, forward, backward_input, backward_weight, latency, free_from):
    """A simulator without arrays: goes round the stages and plays what can be played, until nothing can."""
    chunks = CHUNKS.get(name, 1)
    last = order.num_stages * chunks - 1
    lines = [operations(order, stage) for stage in range(order.num_stages)]
    done, free, played = {}, list(free_from), [0] * order.num_stages
    progress = True
    while progress:
        progress = False
        for stage, line in enumerate(lines):
            while played[stage] < len(line):
                kind, microbatch, chunk = line[played[stage]]
                place = position(name, order.num_stages, stage, chunk)
                needs = []
                if kind == "F" and place > 0:
                    needs = [("F", place - 1)]
                elif kind in ("B", "BW"):
                    needs = [("F", place)] + ([(kind, place + 1)] if place < last else [])
                elif kind == "W":
                    needs = [("B", place)]
                keys = [(need, there, microbatch) for need, there in needs]
                if not all(key in done for key in keys):
                    break
                arrivals = [done[key][0] + (latency if done[key][1] != stage else 0) for key in keys]
                cost = {"F": forward, "B": backward_input, "W": backward_weight}
                length = sum(cost[letter][stage] for letter in kind) / chunks
                free[stage] = max([free[stage], *arrivals]) + length
                assert (kind, place, microbatch) not in done
                done[kind, place, microbatch] = free[stage], stage
                played[stage] += 1
                progress = True
    assert played == [len(line) for line in lines], "deadlock"
    return free


@settings(max_examples=60, deadline=None)
@given(sizes())
@example(("zero_bubble_v", 16, 64))
@example(("zero_bubble_v", 16, 5))
@example(("zero_bubble_h1", 16, 64))
@example(("interleaved_1f1b", 16, 64))
@example(("interleaved_1f1b", 1, 1))
def test_every_operation_is_there_once_and_memory_is_bounded(size):
    name, num_stages, num_microbatches = size
    order = make_order(name, num_stages, num_microbatches)
    kinds = ("F", "B", "W") if name in SPLIT else ("F", "BW")
    num_chunks = CHUNKS.get(name, 1)
    expected = {(kind, k, c) for kind in kinds for k in range(num_microbatches) for c in range(num_chunks)}
    for stage in range(num_stages):
        line = operations(order, stage)
        assert len(line) == len(expected)
        assert set(line) == expected
        held = peak = 0
        for operation in line:
            held += (operation.kind == "F") - (operation.kind == kinds[-1])
            peak = max(peak, held)
        assert order.in_flight[stage] == peak / num_chunks
        bound = {
            "gpipe": num_microbatches,
            "one_f_one_b": num_stages - stage,
            "interleaved_1f1b": (num_stages + 1) / 2 + num_stages - 1 - stage,
            "zero_bubble_h1": num_stages,
            "zero_bubble_v": num_stages,
        }[name]
        assert order.in_flight[stage] <= min(bound, num_microbatches)


@settings(max_examples=40, deadline=None)
@given(sizes(), st.data())
@example(("zero_bubble_v", 16, 64), None)
@example(("interleaved_1f1b", 16, 64), None)
def test_play_agrees_with_a_simulator_that_takes_one_operation_at_a_time(size, data):
    name, num_stages, num_microbatches = size
    order = make_order(name, num_stages, num_microbatches)
    quarters = st.integers(0, 12).map(lambda number: number / 4)

    def one_each():
        if data is None:
            return [1.0] * num_stages
        return data.draw(st.lists(quarters, min_size=num_stages, max_size=num_stages))

    forward, backward_input, backward_weight, free_from = one_each(), one_each(), one_each(), one_each()
    latency = 0.25 if data is None else data.draw(quarters)
    ends = play(order, forward, backward_input, backward_weight, latency, free_from)
    expected = ends_one_by_one(name, order, forward, backward_input, backward_weight, latency, free_from)
    assert ends.tolist() == expected


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (4, 2), (4, 8), (7, 5)])
def test_what_the_executor_can_play_has_the_order_of_its_schedule(name, num_stages, num_microbatches):
    order = make_order(name, num_stages, num_microbatches)
    schedule = Schedule(name, num_stages, num_microbatches, num_steps=1)
    for stage in range(num_stages):
        actions = [action for action in schedule.actions(stage) if action.op is not Op.UPDATE]
        expected = [("F" if action.op is Op.FORWARD else "BW", action.microbatch, 0) for action in actions]
        assert operations(order, stage) == expected


def test_interleaved_passes_a_group_of_microbatches_through_both_chunks():
    order = make_order("interleaved_1f1b", 2, 4)
    assert text(order, 0) == ("F0.0 F1.0 F0.1 F1.1 F2.0 BW0.1 F3.0 BW1.1 F2.1 BW0.0 F3.1 BW1.0 BW2.1 BW3.1 BW2.0 BW3.0")
    assert text(order, 1) == ("F0.0 F1.0 F0.1 BW0.1 F1.1 BW1.1 F2.0 BW0.0 F3.0 BW1.0 F2.1 BW2.1 F3.1 BW3.1 BW2.0 BW3.0")


def test_zero_bubble_h1_keeps_a_weight_gradient_back_for_every_stage_before_it():
    order = make_order("zero_bubble_h1", 3, 4)
    assert text(order, 0) == "F0.0 F1.0 F2.0 B0.0 W0.0 F3.0 B1.0 W1.0 B2.0 W2.0 B3.0 W3.0"
    assert text(order, 2) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 W0.0 F3.0 B3.0 W1.0 W2.0 W3.0"


def test_zero_bubble_v_comes_back_through_the_second_chunk():
    order = make_order("zero_bubble_v", 2, 4)
    assert text(order, 0) == (
        "F0.0 F1.0 F2.0 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F3.0 B0.0 W0.0 F2.1 B2.1 W2.1 B1.0 W1.0 F3.1 B3.1 W3.1 "
        "B2.0 W2.0 B3.0 W3.0"
    )
    assert text(order, 1) == (
        "F0.0 F0.1 F1.0 F1.1 B0.1 W0.1 F2.0 B0.0 W0.0 F2.1 B1.1 W1.1 F3.0 B1.0 W1.0 F3.1 B2.1 W2.1 "
        "B2.0 B3.1 B3.0 W2.0 W3.1 W3.0"
    )


def test_an_order_that_cannot_be_played_is_refused():
    order = make_order("one_f_one_b", 2, 3)
    codes = order.codes.copy()
    codes[0] = codes[0][::-1]
    with pytest.raises(AssertionError, match="deadlocks"):
        play(replace(order, codes=codes), [1, 1], [1, 1], [1, 1], 0.0, [0, 0])
