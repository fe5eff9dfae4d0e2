"""Computes the ideal step time of torch's schedules with two chunks per process.

These schedules compute the order of every process's actions in advance and keep it in `pipeline_order`. This module
replays that order with nominal costs and messages that take no time. For all other schedules, slipstream's simulator
has an equivalent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from .workloads import BACKWARD_SECONDS, FORWARD_SECONDS, Placement

FORWARD_SHARE = FORWARD_SECONDS / (FORWARD_SECONDS + BACKWARD_SECONDS)
BACKWARD_SHARE = 1 - FORWARD_SHARE
NUM_REPLAYED_STEPS = 4

_Key = tuple[int, str, int]
"""Chunk, F or B or W, and microbatch: what other actions wait for. B is a full backward, or its half for the input,
because others need only the gradient of the input from a backward. W is the half for the weight."""


def replayed_step_time(
    order: Mapping[int, Sequence[object]], placement: Placement, work: Sequence[float]
) -> float | None:
    """Returns the time from one step to the next. Every process runs its actions in order, step after step, each as
    soon as its inputs are ready. The unit is the work of a process whose share is 1 on one microbatch. None means that
    the order cannot be replayed to its end; this can happen if torch changes the format."""
    num_processes, num_chunks = placement.num_processes, placement.num_chunks
    costs: dict[_Key, float] = {}
    required: dict[_Key, list[_Key]] = {}
    for actions in order.values():
        before: list[_Key] = []
        for chunk, op, microbatch in _parse(actions):
            key = chunk, "B" if op == "I" else op, microbatch
            scale = work[placement.process(chunk)] * num_processes / num_chunks
            costs[key] = scale * _cost(chunk, op)
            required[key] = [*before, *_inputs(key, num_chunks)]
            before = [key]
    try:
        in_turn = list(TopologicalSorter(required).static_order())
    except CycleError:
        return None
    if not required or set(in_turn) != set(required):  # some action waits for one that is in no order
        return None
    free = [0.0] * num_processes
    step_ends = []
    for _ in range(NUM_REPLAYED_STEPS):
        ends: dict[_Key, float] = {}
        for key in in_turn:
            process = placement.process(key[0])
            free[process] = ends[key] = max([free[process], *(ends[each] for each in required[key])]) + costs[key]
        step_ends.append(max(free))
    return step_ends[-1] - step_ends[-2]


def _inputs(key: _Key, num_chunks: int) -> list[_Key]:
    chunk, op, microbatch = key
    if op == "F":
        return [(chunk - 1, "F", microbatch)] if chunk else []
    if op == "W":
        return [(chunk, "B", microbatch)]
    own = (chunk, "F", microbatch)
    return [own] if chunk == num_chunks - 1 else [own, (chunk + 1, "B", microbatch)]


def _cost(chunk: int, op: str) -> float:
    """Returns the cost, in units of the work of one process with one chunk on one microbatch. torch does not split the
    backward of the first chunk: it does the whole backward at W, so I costs nothing there."""
    halves = {"I": 0.0, "W": 1.0} if chunk == 0 else {"I": 0.5, "W": 0.5}
    return FORWARD_SHARE if op == "F" else BACKWARD_SHARE * halves.get(op, 1.0)


def _parse(actions: Sequence[object]) -> list[_Key]:
    """Parses the text of torch's actions. One action is written 2F5. F is a forward, B a full backward, I and W are its
    halves for input and weight. Two actions that may overlap are written (2F5;1B0)OVERLAP_F_B; torch runs them one
    after the other. None is an empty slot."""
    found = re.findall(r"(\d+)([FBIW])(\d+)", " ".join(map(str, actions)))
    return [(int(chunk), op, int(microbatch)) for chunk, op, microbatch in found]
