"""Computes the ideal utilisation of a contender's schedule, and the step time that the simulator predicts from
slipstream's measured costs."""

from __future__ import annotations

from statistics import fmean

from ...schedule import SCHEDULES, TRAITS, Op, Schedule, ScheduleError
from ...schedule.simulate import Costs, min_steady_steps, simulate
from .contenders import Contender, StageCosts, steady
from .turns import Round, World
from .workloads import BACKWARD_SECONDS, FORWARD_SECONDS, work_of

SAME_AS = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "one_f_one_b"}
"""torch's schedules that slipstream has too, by class name."""
NUM_SETTLING_STEPS = 8
"""Number of simulated steps after the pipeline has filled. Stages of unequal cost need them to reach a steady state."""


def nominal_seconds(contender: Contender, world: World) -> float:
    """Returns the work of a process in a step of emulated compute, averaged over processes."""
    share = fmean(work_of(world.num_stages, world.unbalanced))
    return share * contender.num_microbatches * (FORWARD_SECONDS + BACKWARD_SECONDS)


def ideal_utilisation(contender: Contender, world: World, facts: dict[str, float]) -> float | None:
    """Returns the utilisation with nominal costs: a backward costs two forwards, injected latency counts, and
    everything else is free. None means that it is unknown."""
    if contender.engine == "bare":
        work = work_of(world.num_stages, world.unbalanced)
        return fmean(work) / max(work)
    name = SAME_AS.get(contender.schedule, contender.schedule)
    if name not in SCHEDULES:
        step = facts.get("ideal_step")
        share = fmean(work_of(world.num_stages, world.unbalanced))
        return None if step is None else share * contender.num_microbatches / step
    work = work_of(world.num_stages, world.unbalanced)
    costs = Costs(
        forward=[share * FORWARD_SECONDS for share in work],
        backward=[share * BACKWARD_SECONDS for share in work],
        latency=contender.latency_seconds,
    )
    try:
        endless = Schedule(
            name,
            world.num_stages,
            contender.num_microbatches,
            depth=contender.depth,
            global_update=contender.clip_norm is not None or TRAITS[name].has_slack,
        )
    except ScheduleError:
        return None
    bounded = Schedule(
        name,
        world.num_stages,
        contender.num_microbatches,
        min_steady_steps(endless) + NUM_SETTLING_STEPS,
        depth=contender.depth,
        global_update=endless.global_update,
    )
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
    spacings = []
    for row in simulate(schedule, costs).boxes_by_stage:
        ends = steady([box.end for box in row if box.action.op is Op.UPDATE], schedule.name)
        spacings.append((ends[-1] - ends[0]) / (len(ends) - 1))
    return max(spacings)
