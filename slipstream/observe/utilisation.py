"""How busy a pipeline's stages should be, given what their actions cost, and where the rest went.

The simulator plays the run's own schedule with the measured cost of every stage's forwards, backwards and updates and
with links that take no time. What it finds idle is the schedule's: its bubble, or stages of unequal cost. Played again
with the time each stage needs for data and for the executor on top, it says what those cost; what is missing still is
the links', and with it whatever else makes a stage wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..pipeline.clock import TimeSplit
from ..schedule import Schedule
from ..schedule.simulate import Costs, min_steady_steps, simulate

MAX_MICROBATCHES = 20_000
"""To simulate, over stages and steps: half a second or so."""
NUM_SETTLING_STEPS = 6
"""Beyond the fewest that show a steady state, so that stages of unequal cost have settled."""


@dataclass(frozen=True)
class UtilisationReport:
    """Shares of the time, averaged over stages unless they say otherwise."""

    expected_by_stage: tuple[float, ...]
    expected: float
    measured: float
    link: float
    """Waits for messages and sums beyond those that the rest explains."""
    data: float
    executor: float

    def __str__(self) -> str:
        return (
            f"stages busy {self.measured:.1%} over the last steps, {self.expected:.1%} possible; lost to links "
            f"{self.link:.1%}, reading data {self.data:.1%}, the program itself {self.executor:.1%}"
        )


def explain_utilisation(schedule: Schedule, steps: Sequence[Sequence[TimeSplit]]) -> UtilisationReport | None:
    """steps: for each of some steady steps, every stage's split. None if that is too much to simulate, or too little to
    go by."""
    num_stages, m = schedule.num_stages, schedule.num_microbatches
    by_stage = [_mean(column) for column in zip(*steps, strict=True)]
    if len(by_stage) != num_stages or any(split.forward + split.backward <= 0 for split in by_stage):
        return None
    steady = replace(schedule, num_steps=None, sync_start_steps=0, evaluate_after=(), num_evaluations=0)
    num_steps = min_steady_steps(steady) + NUM_SETTLING_STEPS
    if num_stages * m * num_steps > MAX_MICROBATCHES:
        return None
    bounded = replace(steady, num_steps=num_steps)
    compute = [split.forward + split.backward + split.update for split in by_stage]
    step_time = _step_time(bounded, by_stage, [0.0] * num_stages)
    overhead = [split.data + split.other for split in by_stage]
    burdened = _step_time(bounded, by_stage, overhead)
    expected, carried = fmean(compute) / step_time, fmean(compute) / burdened
    measured = fmean(split._replace(evaluation=0.0).utilisation for split in by_stage)
    data = sum(split.data for split in by_stage) / sum(overhead) if any(overhead) else 0.0
    return UtilisationReport(
        expected_by_stage=tuple(seconds / step_time for seconds in compute),
        expected=expected,
        measured=measured,
        link=carried - measured,
        data=(expected - carried) * data,
        executor=(expected - carried) * (1 - data),
    )


def _step_time(schedule: Schedule, by_stage: Sequence[TimeSplit], overhead: Sequence[float]) -> float:
    """overhead: seconds of a step that a stage spends beside its computing, in equal shares before its actions."""
    m = schedule.num_microbatches
    pairs = list(zip(by_stage, overhead, strict=True))
    costs = Costs(
        forward=[(split.forward + extra / 2) / m for split, extra in pairs],
        backward=[(split.backward + extra / 2) / m for split, extra in pairs],
        update=[split.update for split in by_stage],
    )
    return simulate(schedule, costs).step_time


def _mean(splits: Sequence[TimeSplit]) -> TimeSplit:
    return TimeSplit(*map(fmean, zip(*splits, strict=True)))
