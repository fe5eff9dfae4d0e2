"""Computes the ideal utilisation of a contender's schedule, and the step time that the simulator predicts from
slipstream's measured costs."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from ...schedule import Op, ScheduleError
from ...schedule.simulate import Costs, min_steady_steps, simulate
from .contenders import Contender, Round, StageCosts, World, seconds_per_step
from .workloads import BACKWARD_SECONDS, FORWARD_SECONDS

SAME_AS = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "one_f_one_b"}
"""torch's schedules that slipstream has too, by class name."""
NUM_SETTLING_STEPS = 8
"""Number of simulated steps after the pipeline has filled. Stages of unequal cost need them to reach a steady state."""


def nominal_seconds(contender: Contender, world: World) -> float:
    """Returns the work of a process in a step of emulated compute, averaged over processes."""
    return fmean(world.work) * contender.num_microbatches * (FORWARD_SECONDS + BACKWARD_SECONDS)


def ideal_utilisation(contender: Contender, world: World, facts: dict[str, float]) -> float | None:
    """Returns the utilisation with nominal costs: a backward costs two forwards, injected latency counts, and
    everything else is free. None means that it is unknown."""
    if contender.engine == "bare":
        return fmean(world.work) / max(world.work)
    same = replace(contender, schedule=SAME_AS.get(contender.schedule, contender.schedule))
    if same.engine == "torch":
        step = facts.get("ideal_step")
        return None if step is None else fmean(world.work) * contender.num_microbatches / step
    costs = Costs(
        forward=[share * FORWARD_SECONDS for share in world.work],
        backward=[share * BACKWARD_SECONDS for share in world.work],
        latency=contender.latency_seconds,
    )
    try:
        plan = same.plan(world.num_stages, world.num_steps)
    except ScheduleError:
        return None
    bounded = replace(plan, num_steps=min_steady_steps(plan) + NUM_SETTLING_STEPS)
    return nominal_seconds(contender, world) / simulate(bounded, costs).step_time


def predicted_seconds(contender: Contender, world: World, measured: Round) -> float:
    """Returns the step time that the simulator predicts for slipstream. It simulates the same schedule, number of steps
    and steady window, with the measured times of the actions, the executor and a message."""
    schedule = contender.plan(world.num_stages, world.num_steps)
    stages = measured.costs
    has_slack, last_to_come = schedule.traits.has_slack, min(stage.sums for stage in stages)

    def update(stage: StageCosts) -> float:
        if has_slack:  # the sums are made in the background, and so may be the update
            return stage.update + stage.overhead if stage.update else 0.0
        return stage.update + stage.overhead + (last_to_come if schedule.global_update else stage.sums)

    costs = Costs(
        forward=[stage.forward + stage.overhead for stage in stages],
        backward=[stage.backward + stage.overhead for stage in stages],
        update=[update(stage) for stage in stages],
        latency=measured.message_seconds,
    )
    rows = simulate(schedule, costs).boxes_by_stage
    ends = [[box.end for box in row if box.action.op is Op.UPDATE] for row in rows]
    return max(seconds_per_step(of_stage, schedule.name) for of_stage in ends)
