"""The matrix of `slipstream bench`: which contenders run on which workloads, how often and for how many steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...schedule import TRAITS
from .contenders import BARE_LOOP, TORCH_SHAPES, Contender, World, num_steps_to_fill
from .workloads import BACKWARD_SECONDS, FORWARD_SECONDS, NUM_GPU_WARM_UP_STEPS, SLOW_FACTOR, GpuSetting

LATENCY_SECONDS = 0.003
NUM_STEPS = {1: 8, 2: 6, 4: 6}
"""Number of steps, by microbatches per stage. Longer steps need fewer of them for the same precision. At most three
steps are dropped because they are not steady."""
QUICK_NUM_STEPS = 5
REAL_STAGES = 2
REAL_SECONDS = 0.08
"""Rough time of a real microbatch on both stages together. It is only used to estimate how long a run takes."""
GPU_STAGES = 4
GPU_NUM_STEPS, GPU_MIN_NUM_STEPS = 10, 7
"""Number of steps after the warm-up: for m = P microbatches, and the minimum for many more microbatches."""
GPU_FLOPS, GPU_TURN_SECONDS = 1e14, 4.0
"""Rough FLOP/s of a process, and rough time of a turn before its first step. They are only used to estimate how long a
run takes."""

TORCH_CONTENDERS = {f"torch {schedule.removeprefix('Schedule')}": schedule for schedule in TORCH_SHAPES}
OUR_CONTENDERS = {
    "slipstream one_f_one_b": ("one_f_one_b", "minimum"),
    "slipstream two_bw": ("two_bw", "minimum"),
    "slipstream two_bw, double depth": ("two_bw", "double"),
    "slipstream pipedream": ("pipedream", "minimum"),
    "slipstream paci": ("paci", "minimum"),
}
AS_TRAINED = "slipstream two_bw as trained"


def worlds(emulated_stages: Sequence[int], with_real: bool, num_rounds: int, quick: bool = False) -> list[World]:
    """Returns the worlds of the matrix: m = P, 2P and 4P with equal stages. At m = 2P it adds a world with one
    expensive stage. For emulated compute it adds one with slow links, and at m = P one in which slipstream sends over
    gloo, as torch always does, and clips. quick: only m = P with equal stages."""
    matrix = []
    pairs = [*(("emulated", p) for p in emulated_stages), *([("real", REAL_STAGES)] if with_real else [])]
    for workload, p in pairs:
        if quick:
            matrix.append(World(workload, p, _all(p), num_rounds, QUICK_NUM_STEPS))
            continue
        for factor, num_steps in NUM_STEPS.items():
            matrix.append(World(workload, p, _all(factor * p), num_rounds, num_steps))
        matrix.append(World(workload, p, _all(2 * p), num_rounds, NUM_STEPS[2], unbalanced=True))
        if workload == "emulated":
            slow_links = tuple(replace(contender, latency_seconds=LATENCY_SECONDS) for contender in _ours(2 * p))
            matrix.append(World(workload, p, slow_links, num_rounds, NUM_STEPS[2]))
            over_gloo = (
                Contender("torch 1F1B", p, "Schedule1F1B"),
                Contender("slipstream two_bw", p, "two_bw"),
                Contender("slipstream two_bw, clipping", p, "two_bw", clip_norm=1.0),
            )
            matrix.append(World(workload, p, over_gloo, num_rounds, NUM_STEPS[1], shared_memory=False))
    return matrix


def _all(num_microbatches: int) -> tuple[Contender, ...]:
    theirs = [Contender(name, num_microbatches, schedule) for name, schedule in TORCH_CONTENDERS.items()]
    return (Contender(BARE_LOOP, num_microbatches), *theirs, *_ours(num_microbatches))


def _ours(num_microbatches: int) -> list[Contender]:
    return [Contender(name, num_microbatches, schedule, depth) for name, (schedule, depth) in OUR_CONTENDERS.items()]


def gpu_worlds(
    setting: GpuSetting, num_stages: int, microbatches: Sequence[int], num_rounds: int, words: Sequence[str] = ()
) -> list[World]:
    """Returns one world for each number of microbatches.

    words: names of contenders, or parts of names. Empty means all contenders."""
    matrix = []
    for m in microbatches:
        bare, *others = [*_all(m), Contender(AS_TRAINED, m, "two_bw", as_trained=True)]
        names = [contender.name for contender in others]
        wanted = [each for each in others if not words or any(_is_meant(each.name, word, names) for word in words)]
        num_steps = min(max(GPU_MIN_NUM_STEPS, round(GPU_NUM_STEPS * num_stages / m)), GPU_NUM_STEPS)
        num_steps += NUM_GPU_WARM_UP_STEPS
        matrix.append(World("cuda", num_stages, (bare, *wanted), num_rounds, num_steps, gpu=setting))
    return matrix


def _is_meant(name: str, word: str, names: Sequence[str]) -> bool:
    """Returns whether a word selects a contender. A word that is the full name of a contender selects only that
    contender, even if other names contain it."""
    return name == word if word in names else word in name


def title(world: World) -> str:
    parts = [
        f"{world.workload} compute",
        f"P = {world.num_stages}",
        f"m = {world.num_microbatches}",
        f"one process x {SLOW_FACTOR:g}" if world.unbalanced else "equal processes",
    ]
    if world.gpu is not None:
        parts[-1] = "a GPU each" if world.gpu.share is None else f"{world.gpu.share} % of one GPU each"
    if not world.shared_memory:
        parts.append("all links over gloo")
    if world.latency_seconds:
        parts.append(f"{1000 * world.latency_seconds:g} ms links")
    return ", ".join(parts)


def guessed_seconds(world: World, contender: Contender) -> float:
    """Returns the estimated time of one turn of a contender. It is only used for the progress bar."""
    if world.gpu is not None:
        weights = world.gpu.blocks * 12 * world.gpu.dim**2
        seconds = 6 * weights * world.gpu.tokens_per_microbatch / GPU_FLOPS
        return GPU_TURN_SECONDS + seconds * contender.num_microbatches * world.num_steps
    seconds = FORWARD_SECONDS + BACKWARD_SECONDS if world.workload == "emulated" else REAL_SECONDS
    num_steps = world.num_steps + num_steps_to_fill(contender.schedule, world.num_stages) - 1
    never_drains = not contender.schedule or (contender.schedule in TRAITS and not TRAITS[contender.schedule].flushes)
    bubble = 1.0 if never_drains else 1.4
    return seconds * contender.num_microbatches * num_steps * bubble * (SLOW_FACTOR if world.unbalanced else 1.0)


def total_seconds(world: World) -> float:
    return world.num_rounds * sum(guessed_seconds(world, contender) for contender in world.contenders)
