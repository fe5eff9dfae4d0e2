"""What `plan` says of the step times that `slipstream bench --device cuda` measured, from a profile of one slice.

    slipstream profile --share 12 --output slice.json --train.device cuda --pipeline.stages 4 --optimizer.name adamw \\
        --optimizer.error-feedback 0 --train.no-track-alignment --train.gradient-dtype bfloat16 \\
        --train.microbatch-size 1 \\
        --model.dim 4096 --model.num-layers 16 --model.num-heads 32 --model.num-kv-heads 32 --model.hidden-dim 10880 \\
        --model.vocab-size 256 --model.sequence-length 1024
    slipstream profile ... the same with --output alone.json --pipeline.stages 1
    python benchmarks/plan_on_slices.py slice.json m4/results.json m8/results.json --alone alone.json

The first table compares. The second says what the same stages would do in longer pipelines: four blocks, the same
update and the same time of a message on each of 64 or 1,024 GPUs.

Forwards and backwards cost what the profile says, which knows nothing of pipelines. A message takes as long as the
bench measured between two stages, and an update as long as in the bench's one_f_one_b, which makes it in turn: the
bench keeps gradients and optimizer in bfloat16, and the trainer's optimizer never is. The first profile is of a slice
next to busy slices, and the second of one next to idle ones: the slices of a GPU share its memory bandwidth and its
power, so costs lie between the two by the share of the time that a stage computes in the predicted schedule. Stages
with a GPU each have no such neighbours, so the second table is of the first profile alone. torch's stages wait for more
than plan's do, and torch_waits.py plays their actions with the messages' times that the bench measured over torch's
communicator. Larger differences are last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torch_waits import Costs, from_order, one_f_one_b, play

from slipstream.model.registry import Decoder
from slipstream.tools.bench.contenders import TORCH_SHAPES
from slipstream.tools.bench.workloads import GpuSetting, Placement, layers_per_chunk
from slipstream.tools.plan.costs import measured_costs
from slipstream.tools.plan.predict import SCHEDULES, StageCosts, predict
from slipstream.train.layer_profile import read_profile
from slipstream.transport.nccl import LINK_BLOCKS

MULTIPROCESSORS = 132
"""Of an H200."""
ITERATIONS = 5
"""Until the costs and the share of the time that stages compute agree."""
LONGER = ("one_f_one_b", "zero_bubble_v", "two_bw")


def update_seconds(worlds: list[dict[str, Any]]) -> float | None:
    """Of a stage; None: the bench did not play one_f_one_b."""
    contenders = [
        contender
        for world in worlds
        for contender in world["contenders"]
        if contender["contender"]["schedule"] == "one_f_one_b"
    ]
    found = [stage["update"] for contender in contenders for each in contender["rounds"] for stage in each["costs"]]
    return median(found) if found else None


def stage_costs(
    path: Path, world: dict[str, Any], update: float | None, num_stages: int, shape: str = "single"
) -> StageCosts:
    """The costs of the stages of one command of the bench, or of as many others, with the profile at `path`. shape:
    whether a stage has one chunk or two, and which (Placement.shape)."""
    setting = GpuSetting(**world["gpu"])
    costs = measured_costs(read_profile(path), Decoder(**asdict(setting.config(num_stages))), path)
    sizes = layers_per_chunk(Placement(num_stages, shape), [setting.blocks] * num_stages)
    messages = [each["message_seconds"] for contender in world["contenders"] for each in contender["rounds"]]
    latency = median([seconds for seconds in messages if seconds] or [0.0])
    stages = costs.stages(sizes, setting.batch, latency)
    return stages if update is None else replace(stages, update=(update,) * stages.num_stages)


def between(alone: StageCosts, busy: StageCosts, share: float) -> StageCosts:
    """Costs of stages whose neighbours compute this share of the time."""

    def mix(name: str) -> tuple[float, ...]:
        pairs = zip(getattr(alone, name), getattr(busy, name), strict=True)
        return tuple(low + share * (high - low) for low, high in pairs)

    changed = {name: mix(name) for name in ("forward", "backward_input", "backward_weight")}
    return replace(busy, **changed)


def torch_step(
    num_microbatches: int, order: Sequence[str], messages: tuple[float, float], speed: float, costs: StageCosts
) -> tuple[float, float]:
    """Seconds of a step of a schedule of torch, and those in it in which a process computes.

    order: the actions of every process, if the schedule keeps a list. messages: the seconds of one, and of two in
    opposite directions. speed: of work beside a message. costs: of all chunks, with the update of a whole process."""
    compute = {}
    for chunk, (forward, for_input, for_weight) in enumerate(
        zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
    ):
        joint = chunk == 0  # torch does not split the backward of the first chunk
        compute["F", chunk], compute["B", chunk] = forward, for_input + for_weight
        compute["I", chunk] = 0.0 if joint else for_input
        compute["W", chunk] = for_weight + for_input if joint else for_weight
    programs = from_order(order) if order else one_f_one_b(costs.num_stages, num_microbatches)
    return play(programs, Costs(compute, costs.update[0], *messages, speed_beside_message=speed))


def our_step(name: str, num_microbatches: int, costs: StageCosts) -> tuple[float, float]:
    """The same for a schedule that plan knows."""
    found = predict(name, costs, num_microbatches)
    return found.step_time, found.step_time * fmean(found.utilisation)


def step_time(step: Callable[[StageCosts], tuple[float, float]], alone: StageCosts, busy: StageCosts) -> float:
    share = 1.0
    for _ in range(ITERATIONS):
        seconds, computing = step(between(alone, busy, share))
        share = computing / seconds
    return seconds


def rows(
    alone: Path | None, busy: Path, world: dict[str, Any], update: float | None
) -> list[tuple[str, int, float, float]]:
    """Of one command of the bench: contender, microbatches, measured and predicted seconds."""
    found = []
    for outcome in world["contenders"]:
        contender, rounds, measured = outcome["contender"], outcome["rounds"], outcome["row"]["step_seconds"]
        name, num_microbatches = contender["schedule"], contender["num_microbatches"]
        if measured is None or not name:
            continue
        shape = TORCH_SHAPES.get(name, "single")
        pair = [stage_costs(path, world, update, world["num_stages"], shape) for path in (alone or busy, busy)]
        step: Callable[[StageCosts], tuple[float, float]]
        if name in SCHEDULES:
            step = partial(our_step, name + "_double" * (contender["depth"] == "double"), num_microbatches)
        elif "exchange" in rounds[0] and (rounds[0]["order"] or name == "Schedule1F1B"):
            one_way, exchange = zip(*(each["exchange"] for each in rounds), strict=True)
            messages = median(one_way), median(exchange)
            speed = 1 - LINK_BLOCKS / round(MULTIPROCESSORS * world["gpu"]["share"] / 100)
            step = partial(torch_step, num_microbatches, rounds[0]["order"], messages, speed)
        else:
            continue
        found.append((contender["name"], num_microbatches, measured["median"], step_time(step, *pair)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="that slipstream bench --device cuda wrote")
    parser.add_argument("--alone", type=Path, help="profile of a slice whose neighbours are idle")
    given = parser.parse_args()
    profile = read_profile(given.profile)
    worlds = [world for path in given.results for world in json.loads(path.read_text(encoding="utf-8"))["worlds"]]
    update = update_seconds(worlds)
    found = [row for world in worlds for row in rows(given.alone, given.profile, world, update)]
    print(f"{profile.device}, torch {profile.torch}\n")
    print("| | m | measured, ms | predicted, ms | off by |\n|---|---:|---:|---:|---:|")
    for name, num_microbatches, measured, predicted in sorted(found, key=lambda row: abs(row[3] / row[2] - 1)):
        print(
            f"| {name} | {num_microbatches} | {1e3 * measured:.0f} | {1e3 * predicted:.0f} | "
            f"{100 * (predicted / measured - 1):+.1f} % |"
        )
    print("\n| stages | m | " + " | ".join(f"{name}, ms" for name in LONGER) + " | two_bw over 1F1B | over ZB-V |")
    print("|---:|---:|" + "---:|" * (len(LONGER) + 2))
    for num_stages in (64, 1024):
        stages = stage_costs(given.profile, worlds[0], update, num_stages)
        for num_microbatches in (num_stages, 2 * num_stages, 4 * num_stages):
            times = [1e3 * predict(name, stages, num_microbatches).step_time for name in LONGER]
            cells = [f"{milliseconds:,.0f}" for milliseconds in times]
            cells += [f"{times[0] / times[-1]:.2f}", f"{times[1] / times[-1]:.2f}"]
            print(f"| {num_stages:,} | {num_microbatches:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
