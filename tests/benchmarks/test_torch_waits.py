"""benchmarks/torch_waits.py: what torch's stages wait for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FORWARD, BACKWARD, UPDATE = 1.0, 2.0, 0.5
ONE_WAY, EXCHANGE = 0.1, 0.15


@pytest.fixture
def waits(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "torch_waits", raising=False)
    import torch_waits

    return torch_waits


def costs(waits, num_chunks: int, **others: float):
    work = {("F", chunk): FORWARD for chunk in range(num_chunks)}
    work |= {("B", chunk): BACKWARD for chunk in range(num_chunks)}
    work |= {(op, chunk): BACKWARD / 2 for op in "IW" for chunk in range(num_chunks)}
    return waits.Costs(work, UPDATE, **others)


@pytest.mark.parametrize(("num_processes", "num_microbatches"), [(2, 2), (4, 4), (4, 9), (1, 3)])
def test_without_messages_a_step_has_the_bubble_of_1f1b(waits, num_processes, num_microbatches):
    programs = waits.one_f_one_b(num_processes, num_microbatches)
    seconds, busy = waits.play(programs, costs(waits, num_processes))
    assert seconds == pytest.approx((num_microbatches + num_processes - 1) * (FORWARD + BACKWARD) + UPDATE)
    assert busy == pytest.approx(num_microbatches * (FORWARD + BACKWARD) + UPDATE)


def test_every_microbatch_more_costs_two_exchanges_of_both_directions(waits):
    steps = [
        waits.play(waits.one_f_one_b(4, m), costs(waits, 4, one_way=ONE_WAY, exchange=EXCHANGE))[0] for m in (8, 9)
    ]
    assert steps[1] - steps[0] == pytest.approx(FORWARD + BACKWARD + 2 * EXCHANGE)


def test_two_processes_and_two_microbatches_by_hand(waits):
    seconds, _ = waits.play(waits.one_f_one_b(2, 2), costs(waits, 2, one_way=ONE_WAY, exchange=EXCHANGE))
    # The first process: F0 F1; its second process: F0, B0, F1, B1. Between them: F0 one way, B0 and F1 at once, and
    # then B1 one way. The first process has made F1 long before, and its B0 runs beside F1 and B1 of the second.
    by_hand = FORWARD + ONE_WAY + FORWARD + BACKWARD + EXCHANGE + FORWARD + BACKWARD + ONE_WAY + BACKWARD + UPDATE
    assert seconds == pytest.approx(by_hand)


def test_a_receive_that_was_launched_early_holds_up_the_messages_after_it(waits):
    # The middle process launches its receive of B0, which takes a while, before its receive of F1, or after.
    first, last = "0F0 0SEND_F0 0F1 0SEND_F1", "2RECV_F0 2F0 2B0 2SEND_B0"
    early = [first, "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1RECV_F1 1F1 1B0", last]
    late = [first, "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 1F1 1B0", last]
    each = costs(waits, 3, one_way=ONE_WAY, exchange=EXCHANGE)
    held_up, free = (waits.play(waits.from_order(order), each)[0] for order in (early, late))
    assert held_up - free == pytest.approx(FORWARD + ONE_WAY)


def test_work_beside_a_message_is_slower(waits):
    order = ["0F0 0SEND_F0 0W0 0RECV_B0 0I0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0"]
    alone, beside = (
        waits.play(waits.from_order(order), costs(waits, 2, one_way=1.0, speed_beside_message=speed))
        for speed in (1.0, 0.5)
    )
    # Beside the work are: F0 for the whole of the first process's W0, and B0 for the whole of the second's.
    assert beside[1] - alone[1] == pytest.approx(0.5 * (0.5 + 0.5))


def test_overlapping_actions_and_other_words_of_torch_are_read(waits):
    [program] = waits.from_order(["0UNSHARD 0F0 (1F0;0B0)OVERLAP_F_B 1I0 1W0 0REDUCE_GRAD"])
    assert [(work.op, work.chunk) for work in program] == [
        ("F", 0), ("F", 1), ("B", 0), ("I", 1), ("W", 1), ("U", 0)
    ]  # fmt: skip


def test_programs_that_wait_for_each_other_are_told_from_slow_ones(waits):
    order = ["0RECV_B0 0B0 0SEND_F0", "1RECV_F0 1F0 1SEND_B0"]
    with pytest.raises(ValueError, match="wait for each other"):
        waits.play(waits.from_order(order), costs(waits, 2))
