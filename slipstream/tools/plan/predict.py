"""Predicts the step time of each schedule, and what every stage holds, from the costs of one microbatch.

    costs = StageCosts(forward=(1.0,) * 4, backward_input=(1.0,) * 4, backward_weight=(1.0,) * 4, update=(0.0,) * 4)
    predict("two_bw", costs, num_microbatches=8).step_time

All figures are for the steady state, as in a Timeline. They do not include filling and draining, which happen once per
run.

Updates. Every update counts as work of its stage, which does nothing else at that time. two_bw runs its update in the
background, but on the device that also computes: on a CPU both share the cores, on CUDA both share the GPU. The
background hides the wait for the sums over stages, not the work.

Sums over stages. Clipping and the check for inf and nan need them. gpipe, one_f_one_b and interleaved_1f1b wait for
them at the end of every step. two_bw has slack for them. The others are predicted without the wait, as they were
published: in pipedream and paci each stage updates by itself, and the zero-bubble schedules update at once and undo the
update if the sums require it. With a wait they are slower. On 4 stages with 8 microbatches, f = 1 and b = 1 + 1, a step
takes 30 instead of 24 under pipedream and paci (`simulate(Schedule("paci", 4, 8, 16, global_update=True), Costs())`),
and 25.5 instead of 24 under zero_bubble_v, where the first stage to begin a step would wait for the last stage to end
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from ...schedule import TRAITS, Schedule, ScheduleError, Traits
from ...schedule.simulate import Costs, simulate
from .orders import NUM_CHUNKS, SLOTS, Order, Seconds, make_order, play

PLANNED = ("interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v")
"""Flushing schedules that a plan compares and the trainer does not run."""
DOUBLE = "_double"
"""Ending of the names of schedules that run with depth "double"."""
SCHEDULES = (
    *(name for name, traits in TRAITS.items() if traits.flushes),
    *PLANNED,
    *(
        f"{name}{ending}"
        for name, traits in TRAITS.items()
        if not traits.flushes
        for ending in ("", DOUBLE)[: len(traits.depths)]
    ),
)

MAX_SIMULATED = 20_000
"""Maximum number of actions that `slipstream.schedule` simulates. Larger cases use arrays and formulas."""
MAX_PLAYS = 12
"""Maximum number of simulations of one flushing step until it is steady. Nearly always the first or second is
enough."""


@dataclass(frozen=True)
class StageCosts:
    """Seconds for one microbatch on each stage, with one entry per stage."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    """Time of the gradient with respect to the stage's inputs."""
    backward_weight: tuple[float, ...]
    """Time of the gradient with respect to its weights. A schedule that does not split the backward computes both in
    one."""
    update: tuple[float, ...]
    """Time of the update in a step."""
    latency: float = 0.0
    """Time from the end of an action on one stage until a neighbour can use its result."""

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def backward(self) -> tuple[float, ...]:
        """Time of the whole backward."""
        return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))

    @property
    def slot(self) -> tuple[float, ...]:
        """Time of a forward and a whole backward."""
        return tuple(map(sum, zip(self.forward, self.backward, strict=True)))

    def work(self, num_microbatches: int) -> Seconds:
        """Returns for every stage the time that it computes in a step."""
        return num_microbatches * np.array(self.slot) + np.array(self.update)


@dataclass(frozen=True)
class Prediction:
    step_time: float
    """Time from one step to the next in the steady state."""
    utilisation: tuple[float, ...]
    """Share of the steady state in which each stage computes, including updates."""
    in_flight: tuple[float, ...]
    """Maximum number of microbatches whose activations each stage holds, in units of a whole stage: a chunk of a stage
    that is cut in two counts 0.5. If the backward is split, activations are held until the gradient of the weights."""
    weight_versions: tuple[int, ...]
    """Number of copies of its weights that each stage keeps for its microbatches in flight."""
    delay: tuple[int, ...]
    """Number of updates that each stage makes between the forward of a microbatch and the update that uses its
    gradient. For paci, the maximum."""
    is_simulated: bool
    """Whether every action was simulated. Otherwise the times come from a closed formula."""


def traits_of(name: str) -> Traits:
    """Returns the traits of a schedule in a plan. Those that the trainer does not run flush, as one_f_one_b does."""
    return TRAITS["one_f_one_b" if name in PLANNED else name.removesuffix(DOUBLE)]


def endless(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the schedule without an end. Those that the trainer does not run have the promises of one_f_one_b."""
    return Schedule(
        "one_f_one_b" if name in PLANNED else name.removesuffix(DOUBLE),
        num_stages,
        num_microbatches,
        depth="double" if name.endswith(DOUBLE) else "minimum",
        global_update=not traits_of(name).steps_alone,
    )


def why_not(name: str, num_stages: int, num_microbatches: int, num_layers: int) -> str | None:
    """Returns one sentence that says why the schedule cannot run with these numbers, or None if it can."""
    try:
        endless(name, num_stages, num_microbatches)
    except ScheduleError as error:
        return str(error).replace("one_f_one_b", name)
    if name == "interleaved_1f1b" and num_microbatches % num_stages:
        fewer = num_microbatches // num_stages * num_stages
        choice = f"{fewer} or {fewer + num_stages}" if fewer else f"{num_stages}"
        return (
            f"{num_microbatches} microbatches do not divide among the {num_stages} stages of interleaved_1f1b: "
            f"use {choice}"
        )
    num_chunks = NUM_CHUNKS.get(name, 1)
    if num_layers < num_chunks * num_stages:
        each = "1 layer" if num_chunks == 1 else f"{num_chunks} layers"
        return (
            f"{num_layers} layers are too few for {name} on {num_stages} stages, which needs {each} on each: use at "
            f"least {num_chunks * num_stages} layers or at most {num_layers // num_chunks} stages"
        )
    return None


def predict(name: str, costs: StageCosts, num_microbatches: int) -> Prediction:
    """Predicts a step of a schedule that can run with these numbers (see `why_not`).

    Up to MAX_SIMULATED actions, `slipstream.schedule` simulates the schedules that the executor can run. A pipeline
    that never drains is then simulated only for some steps, so its step time differs slightly from the final one.
    Beyond that, flushing schedules use an exact recursion over arrays, and the others use `_asynchronous_step_time`.
    """
    num_stages = costs.num_stages
    schedule = endless(name, num_stages, num_microbatches)
    weight_versions = tuple(map(schedule.num_versions, range(num_stages)))
    delay = tuple(max(schedule.delay(stage), schedule.max_drift(stage)) for stage in range(num_stages))
    flushes, depth = schedule.traits.flushes, (schedule.max_in_flight - 1) // max(1, num_stages - 1)
    actions_per_step = num_stages * (2 * num_microbatches + 1)
    num_steps = 4
    if not flushes:
        # The pipeline is full after this many steps. Stages of unequal cost need a few times that until they are
        # steady. Steps of few microbatches have patterns longer than a step, which average out over many steps.
        steps_to_fill = 1 + depth * (num_stages - 1) // num_microbatches
        num_steps = max(20 * steps_to_fill, MAX_SIMULATED // 8 // actions_per_step)
    is_small = num_steps * actions_per_step <= MAX_SIMULATED
    if name not in PLANNED and (is_small or (flushes and name not in SLOTS)):
        timeline = simulate(
            replace(schedule, num_steps=num_steps),
            Costs(costs.forward, costs.backward, costs.update, latency=costs.latency),
        )
        step_time, utilisation = timeline.step_time, timeline.steady_utilisation
        in_flight = tuple(map(float, timeline.peak_in_flight))
        return Prediction(step_time, utilisation, in_flight, weight_versions, delay, is_simulated=True)
    if flushes:
        order = make_order(name, num_stages, num_microbatches)
        step_time, in_flight = _flushing_step_time(order, costs), order.in_flight
    else:
        step_time = _asynchronous_step_time(costs, num_microbatches, depth, schedule.traits.has_slack)
        in_flight = tuple(float(depth * (num_stages - 1 - stage) + 1) for stage in range(num_stages))
    utilisation = tuple((costs.work(num_microbatches) / step_time).tolist())
    return Prediction(step_time, utilisation, in_flight, weight_versions, delay, is_simulated=flushes)


def _flushing_step_time(order: Order, costs: StageCosts) -> float:
    """Simulates step after step until all stages start later than in the step before by the same time, which is then
    the step time.

    When each stage starts a step depends on when each started the one before. If some stages start later, no other
    stage becomes faster, and none is delayed by more than that. So the step time in the long run lies between the
    smallest and the largest of these differences, and `tolerance` limits the error as a share of the step.

    The zero-bubble schedules, which split their backwards, update without waiting for other stages.
    """
    tolerance = 1e-9 if order.codes.size <= MAX_SIMULATED else 5e-3
    update = np.array(costs.update)
    arrival = np.array([0.0, *accumulate(one / order.num_chunks + costs.latency for one in costs.forward[:-1])])

    def first_forwards(free: Seconds) -> Seconds:
        """Returns when each stage starts: not before the first microbatch has reached it."""
        return np.maximum.accumulate(free - arrival) + arrival

    begin = first_forwards(update if order.is_split else update + costs.latency * (arrival > 0))
    for _ in range(MAX_PLAYS):
        end = play(order, costs.forward, costs.backward_input, costs.backward_weight, costs.latency, begin)
        following = first_forwards((end if order.is_split else _all_known(end, costs.latency)) + update)
        late = following - begin
        begin = following
        if late.max() - late.min() <= tolerance * late.max():
            break
    return float(late.max() + late.min()) / 2


def _all_known(end: Seconds, latency: float) -> Seconds:
    """Returns when each stage knows that every stage has ended. It knows its own end at once, and that of others after
    a latency."""
    latest = int(end.argmax())
    others = np.delete(end, latest)
    known = np.maximum(end, end[latest] + latency)
    known[latest] = max(end[latest], others.max(initial=-math.inf) + latency)
    return known


def _asynchronous_step_time(costs: StageCosts, num_microbatches: int, depth: int, has_slack: bool) -> float:
    """Returns the step time of a pipeline that never drains. Its slowest round trip determines it.

    A stage is `depth` forwards further ahead than the next. A round trip from stage s to stage t and back costs all
    forwards and backwards on the way and 2 (t - s) latencies. It advances s by n = depth (t - s) + 1 microbatches, so a
    step takes at least m / n round trips. For s = t this is the work of one stage. The slowest of these is exact if
    updates take no time.

    An update is added once per step, or per round trip if that is longer, because it delays the stage where a trip ends
    (in two_bw also the stage where it turns). This is an approximation. Its error is a part of update / step time: at
    most 0.9 % where tests/tools/plan/test_predict.py compares it with simulations, at most 0.7 % on 16 stages with 50
    or 64 microbatches and updates of up to ten slots, and 2.2 % for paci on 3 stages with 7 microbatches and a latency
    as long as a forward. But such a small pipeline is simulated.
    """
    stages = np.arange(costs.num_stages)
    update, before = np.array(costs.update), np.concatenate([[0.0], np.cumsum(costs.slot)])
    hops = stages[None, :] - stages[:, None]  # rows: from s, columns: to t
    trip = before[None, 1:] - before[:-1, None] + 2 * costs.latency * hops
    num_moved = depth * hops + 1
    met = np.maximum(update[:, None], update[None, :] if has_slack else 0.0)
    share = np.minimum(1.0, num_microbatches / np.maximum(num_moved, 1))
    step_time = num_microbatches * trip / np.where(hops < 0, 1, num_moved) + met * share
    return float(step_time[hops >= 0].max())
