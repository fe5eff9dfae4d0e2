"""What torch's schedules with two chunks per process allow in theory.

They compute the order of every process's actions beforehand and keep it in `pipeline_order`. Here it is replayed with
nominal costs and free messages. All other schedules have their like in slipstream's simulator.
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
    """One action of torch: F forward, B joint backward, I and W its halves for input and weight."""

    chunk: int
    op: str
    microbatch: int

    def key(self) -> tuple[int, str, int]:
        """What others need of a backward is the gradient of its input, which the half for the input gives as well."""
        return self.chunk, "B" if self.op == "I" else self.op, self.microbatch

    def requires(self, num_chunks: int) -> list[tuple[int, str, int]]:
        if self.op == "F":
            return [(self.chunk - 1, "F", self.microbatch)] if self.chunk else []
        if self.op == "W":
            return [(self.chunk, "B", self.microbatch)]
        own = (self.chunk, "F", self.microbatch)
        return [own] if self.chunk == num_chunks - 1 else [own, (self.chunk + 1, "B", self.microbatch)]

    def cost(self) -> float:
        """In the work of one process with one chunk on one microbatch. torch does not part the backward of the first
        chunk: all of it is done where its half for the weight stands."""
        halves = {"I": 0.0, "W": 1.0} if self.chunk == 0 else {"I": 0.5, "W": 0.5}
        return FORWARD_SHARE if self.op == "F" else BACKWARD_SHARE * halves.get(self.op, 1.0)


def replayed_step_time(
    order: Mapping[int, Sequence[object]], placement: Placement, work: Sequence[float]
) -> float | None:
    """The time from one step to the next when every process plays its actions step after step, each as soon as what it
    needs is there, in units of the work of a process whose share is 1 on one microbatch. None if the order cannot be
    played to its end, should torch ever write it in another way."""
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
    """From the text of torch's actions, such as 2F5, or (2F5;1B0)OVERLAP_F_B for two that are to overlap and that torch
    plays one after the other. Empty slots are None."""
    texts = [
        text for action in actions if action is not None for text in re.findall(r"(\d+)([FBIW])(\d+)", str(action))
    ]
    return [_Played(int(chunk), op, int(microbatch)) for chunk, op, microbatch in texts]
