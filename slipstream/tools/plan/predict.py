"""How long a step would take under each schedule, and what every stage would hold, from what one microbatch costs.

    costs = StageCosts(forward=(1.0,) * 4, backward_input=(1.0,) * 4, backward_weight=(1.0,) * 4)
    predict("two_bw", costs, num_microbatches=8).step_time

All figures are of the steady state, as a Timeline's are: filling and draining, which happen once per run, are left out.

Updates. Every update is counted as work of its stage, which does nothing else meanwhile. two_bw makes its update in the
background, but on the device that also computes: on a CPU the two share the cores, on CUDA both go to the one stream.
What the background takes away is the wait for the sums over stages, not the work.

Sums over stages. Clipping and the verdict on inf and nan need them. gpipe, one_f_one_b and interleaved_1f1b wait for
them at the end of every step, two_bw has slack for them. The others are predicted without the wait, as they were
published: pipedream and paci step each stage alone, the zero-bubble schedules step at once and take the step back
should the sums demand it. With a wait they are slower. On 4 stages with 8 microbatches, f = 1 and b = 1 + 1, a step
takes 30 instead of 24 under pipedream and paci (`simulate(Schedule("paci", 4, 8, 16, global_update=True), Costs())`),
and 25.5 instead of 24 under zero_bubble_v, where the first stage to begin a step would wait for the last to end it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

import numpy as np

from ...schedule import TRAITS, Schedule, ScheduleError
from ...schedule.simulate import Costs, simulate
from .orders import Order, Seconds, make_order, play

SCHEDULES = (
    "gpipe",
    "one_f_one_b",
    "interleaved_1f1b",
    "zero_bubble_h1",
    "zero_bubble_v",
    "pipedream",
    "two_bw",
    "two_bw_double",
    "paci",
)
FLUSHING = ("gpipe", "one_f_one_b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v")
IN_CHUNKS = ("interleaved_1f1b", "zero_bubble_v")
UPDATING_ALONE = (*(name for name, traits in TRAITS.items() if traits.steps_alone), "zero_bubble_h1", "zero_bubble_v")

MAX_SIMULATED = 20_000
"""Actions that `slipstream.schedule` is asked to simulate; beyond them, arrays and formulas take over."""
MAX_PLAYS = 12
"""Of one flushing step, in search of its steady state, which nearly always shows in the first or second."""


@dataclass(frozen=True)
class StageCosts:
    """Seconds, of one microbatch through one stage (one entry per stage)."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    """The gradient with respect to the stage's inputs."""
    backward_weight: tuple[float, ...]
    """The gradient with respect to its weights; a schedule that does not split the backward runs both in one."""
    update: tuple[float, ...] = ()
    """Of a whole step. Empty: no time on any stage."""
    latency: float = 0.0
    """From the end of an action on one stage until a neighbour can use its result."""

    def __post_init__(self) -> None:
        if not self.update:
            object.__setattr__(self, "update", (0.0,) * len(self.forward))
        for name in ("forward", "backward_input", "backward_weight", "update"):
            values = getattr(self, name)
            if len(values) != len(self.forward):
                raise ScheduleError(f"{name} has {len(values)} costs for {len(self.forward)} stages: give one for each")
            for value in values:
                _check_time(name, value)
        _check_time("latency", self.latency)
        if sum(self.forward) + sum(self.backward) <= 0:
            raise ScheduleError("forwards and backwards cost nothing: give at least one of them a cost above 0")

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def backward(self) -> tuple[float, ...]:
        """The whole backward."""
        return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))

    def work(self, num_microbatches: int) -> Seconds:
        """By stage, what it computes in a step."""
        slot = np.array(self.forward) + np.array(self.backward)
        return num_microbatches * slot + np.array(self.update)


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ScheduleError(f"{name} = {value} is no time: use a finite number of 0 or more")


@dataclass(frozen=True)
class Prediction:
    schedule: str
    step_time: float
    """Steady state: time from one step to the next."""
    utilisation: tuple[float, ...]
    """Per stage, the share of the steady state that it computes, updates included."""
    bubble: float
    """1 - mean utilisation."""
    in_flight: tuple[float, ...]
    """Most microbatches whose activations a stage holds, in whole stages: a chunk of a stage cut in two counts 0.5.
    Where the backward is split they are held until the gradient of the weights."""
    weight_versions: tuple[int, ...]
    """Copies of its weights that a stage keeps for its microbatches in flight."""
    delay: tuple[int, ...]
    """Updates a stage makes between a microbatch's forward and the update that takes in its gradient; paci: at most."""
    is_simulated: bool
    """Every action was played; otherwise the times are from a closed form."""


def why_not(name: str, num_stages: int, num_microbatches: int, num_layers: int | None = None) -> str | None:
    """One sentence why this schedule cannot be played with these numbers, or None."""
    if name not in SCHEDULES:
        return f"schedule {name!r} is unknown: choose one of {', '.join(SCHEDULES)}"
    try:
        _schedule("one_f_one_b" if name in FLUSHING else name, num_stages, num_microbatches)
    except ScheduleError as error:
        return str(error).replace("one_f_one_b", name)
    if name == "interleaved_1f1b" and num_microbatches % num_stages:
        fewer = num_microbatches // num_stages * num_stages
        choice = f"{fewer} or {fewer + num_stages}" if fewer else f"{num_stages}"
        return (
            f"{num_microbatches} microbatches do not divide among the {num_stages} stages of interleaved_1f1b: "
            f"use {choice}"
        )
    num_chunks = 2 if name in IN_CHUNKS else 1
    if num_layers is not None and num_layers < num_chunks * num_stages:
        each = "1 layer" if num_chunks == 1 else f"{num_chunks} layers"
        return (
            f"{num_layers} layers are too few for {name} on {num_stages} stages, which needs {each} on each: use at "
            f"least {num_chunks * num_stages} layers or at most {num_layers // num_chunks} stages"
        )
    return None


def predict(name: str, costs: StageCosts, num_microbatches: int) -> Prediction:
    """What a step takes. A combination that `why_not` refuses is a ScheduleError.

    Up to MAX_SIMULATED actions, what the executor can play is simulated by `slipstream.schedule`; so a pipeline that
    never drains is followed for some steps only, and is a little off its final pace. Beyond, an exact recursion over
    arrays plays a step of the flushing schedules, and `_asynchronous_step_time` stands in for the others.
    """
    reason = why_not(name, costs.num_stages, num_microbatches)
    if reason is not None:
        raise ScheduleError(reason)
    if name in FLUSHING:
        return _flushing(name, costs, num_microbatches)
    return _asynchronous(name, costs, num_microbatches)


def _schedule(name: str, num_stages: int, num_microbatches: int, num_steps: int | None = None) -> Schedule:
    """What `slipstream.schedule` calls it."""
    return Schedule(
        "two_bw" if name == "two_bw_double" else name,
        num_stages,
        num_microbatches,
        num_steps,
        depth="double" if name == "two_bw_double" else "minimum",
        global_update=name not in UPDATING_ALONE,
    )


def _simulated(name: str, costs: StageCosts, schedule: Schedule, delay: tuple[int, ...]) -> Prediction:
    timeline = simulate(schedule, Costs(costs.forward, costs.backward, costs.update, latency=costs.latency))
    return Prediction(
        schedule=name,
        step_time=timeline.step_time,
        utilisation=timeline.steady_utilisation,
        bubble=timeline.bubble,
        in_flight=tuple(map(float, timeline.peak_in_flight)),
        weight_versions=tuple(map(schedule.num_versions, range(costs.num_stages))),
        delay=delay,
        is_simulated=True,
    )


def _computed(
    name: str,
    costs: StageCosts,
    num_microbatches: int,
    step_time: float,
    in_flight: tuple[float, ...],
    weight_versions: tuple[int, ...],
    delay: tuple[int, ...],
    is_simulated: bool,
) -> Prediction:
    """All else follows from the step time, because a stage's work does not depend on the schedule."""
    utilisation = tuple((costs.work(num_microbatches) / step_time).tolist())
    bubble = 1 - fmean(utilisation)
    return Prediction(name, step_time, utilisation, bubble, in_flight, weight_versions, delay, is_simulated)


# ---- schedules that drain in every step


def _flushing(name: str, costs: StageCosts, num_microbatches: int) -> Prediction:
    num_stages, num_steps = costs.num_stages, 4
    num_actions = num_stages * (2 * num_microbatches + 1) * num_steps
    none_late = (0,) * num_stages
    if name in ("gpipe", "one_f_one_b") and num_actions <= MAX_SIMULATED:
        return _simulated(name, costs, _schedule(name, num_stages, num_microbatches, num_steps), none_late)
    order = make_order(name, num_stages, num_microbatches)
    tolerance = 1e-9 if order.codes.size <= MAX_SIMULATED else 5e-3
    step_time = _flushing_step_time(order, costs, name in UPDATING_ALONE, tolerance)
    one_version = (1,) * num_stages
    return _computed(
        name, costs, num_microbatches, step_time, order.in_flight, one_version, none_late, is_simulated=True
    )


def _flushing_step_time(order: Order, costs: StageCosts, steps_alone: bool, tolerance: float) -> float:
    """Plays step after step until all stages are late by the same time, which is then that of a step.

    When each stage begins a step depends on when each began the one before; a delay of some of them never speeds up
    another, nor delays it by more. So the time of a step in the long run lies between the least and the most that a
    stage is late by, and `tolerance` bounds the error, as a share of the step.
    """
    update = np.array(costs.update)
    arrival = np.array([0.0, *accumulate(one / order.num_chunks + costs.latency for one in costs.forward[:-1])])

    def first_forwards(free: Seconds) -> Seconds:
        """When a stage that is free begins: not before the first microbatch has come down to it."""
        return np.maximum.accumulate(free - arrival) + arrival

    begin = first_forwards(update if steps_alone else update + costs.latency * (arrival > 0))
    for _ in range(MAX_PLAYS):
        end = play(order, costs.forward, costs.backward_input, costs.backward_weight, costs.latency, begin)
        following = first_forwards((end if steps_alone else _all_known(end, costs.latency)) + update)
        late = following - begin
        begin = following
        if late.max() - late.min() <= tolerance * late.max():
            break
    return float(late.max() + late.min()) / 2


def _all_known(end: Seconds, latency: float) -> Seconds:
    """When each stage knows that every stage has ended: its own end at once, that of another with a latency."""
    latest = int(end.argmax())
    others = np.delete(end, latest)
    known = np.maximum(end, end[latest] + latency)
    known[latest] = max(end[latest], others.max(initial=-math.inf) + latency)
    return known


# ---- schedules that never drain


def _asynchronous(name: str, costs: StageCosts, num_microbatches: int) -> Prediction:
    num_stages = costs.num_stages
    endless = _schedule(name, num_stages, num_microbatches)
    delay = tuple(max(endless.delay(stage), endless.max_drift(stage)) for stage in range(num_stages))
    depth = {"two_bw_double": 2, "pipedream": num_microbatches}.get(name, 1)
    actions_per_step = num_stages * (2 * num_microbatches + 1)
    # The pipeline has filled after so many steps. Stages of unequal cost settle in a few times that; steps of a few
    # microbatches have rhythms longer than a step, which are evened out over many.
    steps_to_fill = 1 + depth * (num_stages - 1) // num_microbatches
    num_steps = max(20 * steps_to_fill, MAX_SIMULATED // 8 // actions_per_step)
    if num_steps * actions_per_step <= MAX_SIMULATED:
        return _simulated(name, costs, _schedule(name, num_stages, num_microbatches, num_steps), delay)
    return _computed(
        name,
        costs,
        num_microbatches,
        step_time=_asynchronous_step_time(costs, num_microbatches, depth, is_two_bw=endless.name == "two_bw"),
        in_flight=tuple(float(depth * (num_stages - 1 - stage) + 1) for stage in range(num_stages)),
        weight_versions=tuple(map(endless.num_versions, range(num_stages))),
        delay=delay,
        is_simulated=False,
    )


def _asynchronous_step_time(costs: StageCosts, num_microbatches: int, depth: int, is_two_bw: bool) -> float:
    """The pace of a pipeline that never drains: that of its slowest round trip.

    A stage is `depth` forwards further ahead than the next. So a round trip from stage s to stage t and back, which
    costs all forwards and backwards on the way and 2 (t - s) latencies, moves s on by n = depth (t - s) + 1
    microbatches, and a step takes at least m / n of it. With s = t this is the work of one stage. The slowest of these
    is exact when updates take no time.

    An update is added once per step, or per round trip if that is longer, as it stands in the way of the stage where a
    trip ends (in two_bw also of that where it turns). That is an approximation, off by a part of update /
    step time: at most 0.9 % where tests/plan/test_predict.py compares it with simulations, at most 0.7 % on 16 stages
    with 50 or 64 microbatches and updates of up to ten slots, and 2.2 % for paci on 3 stages with 7 microbatches and a
    latency as long as a forward. So small a pipeline is simulated.
    """
    stages = np.arange(costs.num_stages)
    slot, update = np.array(costs.forward) + np.array(costs.backward), np.array(costs.update)
    before = np.concatenate([[0.0], np.cumsum(slot)])
    hops = stages[None, :] - stages[:, None]  # from s, down, to t, across
    trip = before[None, 1:] - before[:-1, None] + 2 * costs.latency * hops
    num_moved = depth * hops + 1
    met = np.maximum(update[:, None], update[None, :] if is_two_bw else 0.0)
    share = np.minimum(1.0, num_microbatches / np.maximum(num_moved, 1))
    step_time = num_microbatches * trip / np.where(hops < 0, 1, num_moved) + met * share
    return float(step_time[hops >= 0].max())
