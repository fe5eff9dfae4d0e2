"""Computes how busy the stages of a pipeline should be, given the cost of their actions, and what the rest of the time
was lost to.

The simulator runs the schedule with the measured cost of every stage's forwards, backwards and updates, and with links
that take no time. Idle time in this simulation is caused by the schedule: by its bubble, or by stages of unequal cost.
A second simulation adds the time that each stage needs for data and for the executor, and so shows what these cost. The
remaining difference to the measurement is attributed to the links, together with anything else that makes a stage wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..pipeline.clock import TimeSplit
from ..schedule import Schedule
from ..schedule.simulate import Costs, min_steady_steps, simulate

MAX_MICROBATCHES = 20_000
"""Largest number of microbatches to simulate, summed over stages and steps. This takes about half a second."""
NUM_SETTLING_STEPS = 6
"""Number of simulated steps in addition to the fewest that show a steady state, so that stages of unequal cost
settle."""


@dataclass(frozen=True)
class UtilisationReport:
    """Shares of the time, averaged over stages unless the name says otherwise."""

    expected_by_stage: tuple[float, ...]
    expected: float
    measured: float
    link: float
    """Share of waits for messages and sums over stages that the other shares do not explain."""
    data: float
    executor: float

    def __str__(self) -> str:
        return (
            f"stages busy {self.measured:.1%} over the last steps, {self.expected:.1%} possible; lost to links "
            f"{max(0.0, self.link):.1%}, reading data {self.data:.1%}, the program itself {self.executor:.1%}"
        )


def explain_utilisation(schedule: Schedule, steps: Sequence[Sequence[TimeSplit]]) -> UtilisationReport | None:
    """Compares measured and expected utilisation.

    steps: for each of several steady steps, the time split of every stage. Returns None if the simulation would be too
    long, or if a stage has no measured costs.
    """
    num_stages, m = schedule.num_stages, schedule.num_microbatches
    by_stage = [TimeSplit(*map(fmean, zip(*splits, strict=True))) for splits in zip(*steps, strict=True)]
    if any(split.forward + split.backward <= 0 for split in by_stage):
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
    """Returns the simulated time of a step.

    overhead: seconds per step that each stage spends on other things than computing. They are spread equally over its
    forwards and backwards.
    """
    m = schedule.num_microbatches
    pairs = list(zip(by_stage, overhead, strict=True))
    costs = Costs(
        forward=[(split.forward + extra / 2) / m for split, extra in pairs],
        backward=[(split.backward + extra / 2) / m for split, extra in pairs],
        update=[split.update for split in by_stage],
    )
    return simulate(schedule, costs).step_time
