"""The rules of slipstream/transport/nccl.py on a model of hosts and devices, through every order of events.

A rank has a thread for each of its operations, as a stage has one for each of its links, and a device. To launch its
side of an operation a thread needs the driver, and a kernel that is launched spins until the other side is there. At
any moment, and as often as it likes, something else on the rank may take the driver and wait for all kernels on its
device: a module that is loaded, memory that is freed. A launch is two calls, because what launches a kernel makes an
event afterwards. Every state that can be reached is visited; one from which nothing can happen, before all is done, is
a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest

BEGIN, TURN, LAUNCH, EVENT, RETURNED, DONE = range(6)
"""Where a side of an operation stands: before its turn, with it, about to launch, launched, returned, over."""


@dataclass(frozen=True)
class State:
    sides: tuple[tuple[int, int], ...]
    """By operation: where its lower and its higher side stand."""
    drains: tuple[bool, ...]
    """By rank: something holds its driver and waits for the device."""


@dataclass(frozen=True)
class Model:
    """Operations between ranks, and how they are launched.

    free     each side as soon as it likes
    lower    the higher side after the lower one's call has returned
    own      each side when it has its own rank's turn, which it gives back when its call has returned
    turns    the same, but neither launches before both have their turns, taken in ascending order: what nccl.py does
    """

    operations: tuple[tuple[int, int], ...]
    rule: str

    @property
    def num_ranks(self) -> int:
        return 1 + max(max(pair) for pair in self.operations)

    def start(self) -> State:
        return State(((BEGIN, BEGIN),) * len(self.operations), (False,) * self.num_ranks)

    def is_spinning(self, state: State, rank: int) -> bool:
        """Whether the rank's device is in a kernel whose other side has not been launched."""
        return any(
            rank in pair and sides[pair.index(rank)] >= EVENT and min(sides) < EVENT
            for pair, sides in zip(self.operations, state.sides, strict=True)
        )

    def holds_turn(self, state: State, rank: int) -> bool:
        """Whether an operation has the rank's turn."""
        if self.rule not in ("own", "turns"):
            return False
        return any(
            rank in pair and TURN <= sides[pair.index(rank)] < RETURNED
            for pair, sides in zip(self.operations, state.sides, strict=True)
        )

    def next_of_side(self, state: State, operation: int, side: int) -> int | None:
        """Where a side can get to by its next event; None: nowhere, yet."""
        sides, pair = state.sides[operation], self.operations[operation]
        own, other, rank = sides[side], sides[1 - side], pair[side]
        if own == BEGIN:
            if self.rule == "lower" and side == 1 and other < RETURNED:
                return None
            if self.rule in ("own", "turns"):
                is_out_of_order = self.rule == "turns" and side == 1 and other < TURN
                return None if self.holds_turn(state, rank) or is_out_of_order else TURN
            return LAUNCH
        if own == TURN:
            return LAUNCH if other >= TURN or self.rule == "own" else None
        if own in (LAUNCH, EVENT):  # both calls need the driver
            return None if state.drains[rank] else own + 1
        return DONE if own == RETURNED and other >= EVENT else None

    def successors(self, state: State) -> Iterator[State]:
        for operation, side in product(range(len(self.operations)), range(2)):
            if (place := self.next_of_side(state, operation, side)) is not None:
                sides = list(state.sides[operation])
                sides[side] = place
                changed = list(state.sides)
                changed[operation] = (sides[0], sides[1])
                yield replace(state, sides=tuple(changed))
        for rank in range(self.num_ranks):
            drains = list(state.drains)
            drains[rank] = not drains[rank]
            if drains[rank] or not self.is_spinning(state, rank):  # it may begin at any time, and ends with the device
                yield replace(state, drains=tuple(drains))

    def is_over(self, state: State) -> bool:
        return all(place == DONE for sides in state.sides for place in sides)


def deadlocks(operations: Sequence[tuple[int, int]], rule: str) -> int:
    """How many states can be reached from which the operations cannot all end."""
    model = Model(tuple(operations), rule)
    reached, todo = {model.start()}, [model.start()]
    before: dict[State, list[State]] = {}
    while todo:
        state = todo.pop()
        for after in model.successors(state):
            before.setdefault(after, []).append(state)
            if after not in reached:
                reached.add(after)
                todo.append(after)
    can_end = {state for state in reached if model.is_over(state)}
    todo = list(can_end)
    while todo:
        for earlier in before.get(todo.pop(), []):
            if earlier not in can_end:
                can_end.add(earlier)
                todo.append(earlier)
    return len(reached - can_end)


BOTH_WAYS = [(0, 1), (0, 1)]
"""Activations and gradients between two stages."""
THREE_STAGES = [(0, 1), (0, 1), (1, 2)]
"""Both ways between two of them, and one way to the third: the fourth takes ten times as long and finds as little."""
RING = [(0, 1), (1, 2), (0, 2)]
"""Three stages, of which the first and the last share a weight."""


@pytest.mark.parametrize("operations", [[(0, 1)], BOTH_WAYS, THREE_STAGES, RING])
def test_with_turns_every_operation_ends_whatever_waits_for_a_device(operations):
    assert deadlocks(operations, "turns") == 0


@pytest.mark.parametrize("rule", ["free", "lower", "own"])
def test_with_any_weaker_rule_there_is_a_deadlock(rule):
    assert deadlocks(BOTH_WAYS, rule) > 0


def test_a_single_launch_in_the_order_of_ranks_hangs_when_its_own_call_cannot_return():
    """As it was seen on an H200: the kernel spins, a module is loaded, and the call waits to make its event."""
    assert deadlocks([(0, 1)], "free") == 0
    assert deadlocks([(0, 1)], "lower") > 0
