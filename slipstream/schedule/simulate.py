"""Simulates a schedule with given costs. The result is a timeline with its bubble and its microbatches in flight.

    timeline = simulate(Schedule("two_bw", num_stages=4, num_microbatches=4, num_steps=3), Costs(latency=0.1))

A Timeline is a schedule and its boxes. The boxes may be simulated or measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from .action import Action, Key, Op
from .check import bounded_actions, peak_in_flight, play
from .schedule import Schedule, ScheduleError


@dataclass(frozen=True)
class Costs:
    """The duration of each kind of action, in any unit of time: one number for all stages, or one for each stage."""

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    update: float | Sequence[float] = 0.0
    evaluate: float | Sequence[float] | None = None
    """Duration of an evaluation. None means the same as a forward."""
    latency: float = 0.0
    """Time from the end of an action on one stage until another stage can use its result."""

    def by_stage(self, num_stages: int) -> list[dict[Op, float]]:
        """Returns the cost of every kind of action, for each stage."""
        evaluate = self.forward if self.evaluate is None else self.evaluate
        rows = {
            Op.FORWARD: _by_stage("a forward", self.forward, num_stages),
            Op.BACKWARD: _by_stage("a backward", self.backward, num_stages),
            Op.UPDATE: _by_stage("an update", self.update, num_stages),
            Op.EVALUATE: _by_stage("an evaluation", evaluate, num_stages),
        }
        if not any(rows[Op.FORWARD] + rows[Op.BACKWARD]):
            raise ScheduleError("forwards and backwards cost nothing: give at least one of them a cost above 0")
        return [{op: row[stage] for op, row in rows.items()} for stage in range(num_stages)]


def _by_stage(name: str, cost: float | Sequence[float], num_stages: int) -> list[float]:
    costs = [float(one) for one in cost] if isinstance(cost, Sequence) else [float(cost)] * num_stages
    if len(costs) != num_stages:
        raise ScheduleError(f"{len(costs)} costs of {name} for {num_stages} stages: give one, or one each")
    if min(costs) < 0:
        raise ScheduleError(f"the cost of {name} is {min(costs)}: use 0 or more")
    return costs


@dataclass(frozen=True, slots=True)
class Box:
    """An action, and the time when it started and ended."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The start and end times of all actions of a bounded schedule.

    The steady figures exclude filling and draining, which happen once per run. They include every bubble that returns
    with each step. They cover whole steps: on each stage, from the start of the first forward of a first step to the
    start of the first forward of the last step. In a short run, the first step is the first one that enters the first
    stage after a backward, when the pipeline is full (backwards of the synchronous start do not count). In a longer run
    it is the step halfway between that one and the last, so that stages of unequal cost have settled.
    """

    schedule: Schedule
    boxes: tuple[Box, ...]
    """Boxes sorted by start time. The run begins at time 0. The boxes of a stage are in the order in which they are
    played."""

    @cached_property
    def boxes_by_stage(self) -> tuple[tuple[Box, ...], ...]:
        rows: list[list[Box]] = [[] for _ in range(self.schedule.num_stages)]
        for box in self.boxes:
            rows[box.action.stage].append(box)
        return tuple(map(tuple, rows))

    @cached_property
    def makespan(self) -> float:
        return max(box.end for box in self.boxes)

    @cached_property
    def steady_utilisation(self) -> tuple[float, ...]:
        """Returns the share of the steady state in which each stage works."""
        return tuple(
            sum(box.end - box.start for box in row[:-1]) / (row[-1].start - row[0].start) for row in self._steady_boxes
        )

    @cached_property
    def bubble(self) -> float:
        """Returns the share of the steady state in which the stages are idle, on average."""
        return 1 - fmean(self.steady_utilisation)

    @cached_property
    def step_time(self) -> float:
        """Returns the time from one step to the next in the steady state."""
        first, last = self._steady_steps
        return fmean(row[-1].start - row[0].start for row in self._steady_boxes) / (last - first)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Returns the largest number of microbatches that each stage holds between their forward and their backward."""
        return tuple(peak_in_flight([box.action for box in row]) for row in self.boxes_by_stage)

    @cached_property
    def _steady_steps(self) -> tuple[int, int]:
        num_steps, needed = self.schedule.num_steps, min_steady_steps(self.schedule)
        if num_steps is None or num_steps < needed:
            name = self.schedule.name
            raise ScheduleError(f"{num_steps} steps of {name} show no steady state: use at least {needed}")
        full, last = needed - 2, num_steps - 1
        return (full + last) // 2, last

    @cached_property
    def _steady_boxes(self) -> tuple[tuple[Box, ...], ...]:
        """Returns for each stage its boxes in the steady state, and the box that ends it."""
        first, last = (step * self.schedule.num_microbatches for step in self._steady_steps)
        rows = []
        for row in self.boxes_by_stage:
            place = {box.action.microbatch: i for i, box in enumerate(row) if box.action.op is Op.FORWARD}
            rows.append(row[place[first] : place[last] + 1])
        return tuple(rows)


def min_steady_steps(schedule: Schedule) -> int:
    """Returns the smallest number of steps that show a steady state: enough to fill the first stage, and two more."""
    m = schedule.num_microbatches
    endless = replace(schedule, num_steps=None).actions(stage=0)
    own = (action for action in endless if action.microbatch >= schedule.sync_start_steps * m)
    next(action for action in own if action.op is Op.BACKWARD)
    first = next(action for action in own if action.op is Op.FORWARD and action.microbatch % m == 0)
    return first.microbatch // m + 2


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulates a schedule. Each stage plays its actions in order. An action begins when its stage is free and the
    results it requires have arrived."""
    if costs.latency < 0:
        raise ScheduleError(f"the latency is {costs.latency}: use 0 or more")
    cost = costs.by_stage(schedule.num_stages)
    free = [0.0] * schedule.num_stages
    ends: dict[Key, float] = {}
    boxes: list[Box] = []
    for action, required in play(bounded_actions(schedule), schedule.global_update):
        stage = action.stage
        arrivals = [ends[key] + (costs.latency if key.stage != stage else 0.0) for key in required]
        start = max([free[stage], *arrivals])
        end = start + cost[stage][action.op]
        free[stage] = ends[action.key] = end
        boxes.append(Box(action, start, end))
    # The sort is stable, so an update that takes no time stays before the action that follows it on its stage.
    return Timeline(schedule, tuple(sorted(boxes, key=lambda box: (box.start, box.action.stage))))
