"""Computes the ideal step time of torch's schedules with two chunks per process.

These schedules compute the order of every process's actions in advance and keep it in `pipeline_order`. This module
replays that order with nominal costs and messages that take no time. For all other schedules, slipstream's simulator
has an equivalent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .workloads import BACKWARD_SECONDS, FORWARD_SECONDS, Placement

FORWARD_SHARE = FORWARD_SECONDS / (FORWARD_SECONDS + BACKWARD_SECONDS)
BACKWARD_SHARE = 1 - FORWARD_SHARE
NUM_REPLAYED_STEPS = 4


@dataclass(frozen=True)
class _Played:
    """One action of a torch schedule. F is a forward, B a full backward, I and W are its halves for input and
    weight."""

    chunk: int
    op: str
    microbatch: int

    def key(self) -> tuple[int, str, int]:
        """Returns the key under which other actions wait for this one. I has the key of B, because others need only the
        gradient of the input from a backward."""
        return self.chunk, "B" if self.op == "I" else self.op, self.microbatch

    def requires(self, num_chunks: int) -> list[tuple[int, str, int]]:
        if self.op == "F":
            return [(self.chunk - 1, "F", self.microbatch)] if self.chunk else []
        if self.op == "W":
            return [(self.chunk, "B", self.microbatch)]
        own = (self.chunk, "F", self.microbatch)
        return [own] if self.chunk == num_chunks - 1 else [own, (self.chunk + 1, "B", self.microbatch)]

    def cost(self) -> float:
        """Returns the cost, in units of the work of one process with one chunk on one microbatch. torch does not split
        the backward of the first chunk: it does the whole backward at W, so I costs nothing there."""
        halves = {"I": 0.0, "W": 1.0} if self.chunk == 0 else {"I": 0.5, "W": 0.5}
        return FORWARD_SHARE if self.op == "F" else BACKWARD_SHARE * halves.get(self.op, 1.0)


def replayed_step_time(
    order: Mapping[int, Sequence[object]], placement: Placement, work: Sequence[float]
) -> float | None:
    """Returns the time from one step to the next. Every process runs its actions in order, step after step, each as
    soon as its inputs are ready. The unit is the work of a process whose share is 1 on one microbatch. None means that
    the order cannot be replayed to its end; this can happen if torch changes the format."""
    if sorted(order) != list(range(placement.num_processes)):
        return None
    num_processes, num_chunks = placement.num_processes, placement.num_chunks
    rows = [_flatten(order[process]) for process in range(num_processes)]
    scale = [work[placement.process(chunk)] * num_processes / num_chunks for chunk in range(num_chunks)]
    free = [0.0] * num_processes
    step_ends = []
    for _ in range(NUM_REPLAYED_STEPS):
        ends: dict[tuple[int, str, int], float] = {}
        position = [0] * num_processes
        while any(position[process] < len(row) for process, row in enumerate(rows)):
            before = list(position)
            for process, row in enumerate(rows):
                while position[process] < len(row):
                    action = row[position[process]]
                    required = action.requires(num_chunks)
                    if not all(key in ends for key in required):
                        break
                    start = max([free[process], *(ends[key] for key in required)])
                    free[process] = ends[action.key()] = start + scale[action.chunk] * action.cost()
                    position[process] += 1
            if position == before:
                return None
        step_ends.append(max(free))
    return step_ends[-1] - step_ends[-2]


def _flatten(actions: Sequence[object]) -> list[_Played]:
    """Parses the text of torch's actions. One action is written 2F5. Two actions that may overlap are written
    (2F5;1B0)OVERLAP_F_B; torch runs them one after the other. None is an empty slot."""
    texts = [
        text for action in actions if action is not None for text in re.findall(r"(\d+)([FBIW])(\d+)", str(action))
    ]
    return [_Played(int(chunk), op, int(microbatch)) for chunk, op, microbatch in texts]
