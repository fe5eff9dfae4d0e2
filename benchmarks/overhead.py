"""Does the executor's own time per action grow with the length of a run?

    .venv/bin/python benchmarks/overhead.py        about half a minute

Two stages as processes, two_bw, two microbatches to a step, layers that sleep 1 ms forward and 2 ms backward, thousands
of updates. The overhead is what the stage's clock calls `other`, sending included, over the actions of a step (two
forwards, two backwards, an update); the median over each eighth of the run, stage by stage.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

from slipstream import Pipeline, StepReport, launch
from slipstream.tools.bench.workloads import SleepingLayer, no_loss, sleep_precisely, sleeping_data
from slipstream.transport.base import Transport

NUM_MICROBATCHES, NUM_PARTS = 2, 8
ACTIONS_PER_STEP = 2 * NUM_MICROBATCHES + 1


def measure(transport: Transport, num_steps: int) -> list[float]:
    """Microseconds per action, for each part of the run."""
    torch.set_num_threads(1)
    sleep_precisely()
    pipeline = Pipeline(
        transport,
        [SleepingLayer(0.001, 0.002) for _ in range(transport.num_stages)],
        data=sleeping_data,
        loss=no_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        num_microbatches=NUM_MICROBATCHES,
        num_steps=num_steps,
        track_alignment=False,
    )
    stage = transport.stage
    seconds = [report.splits[stage].other for report in pipeline.run() if isinstance(report, StepReport)]
    size = num_steps // NUM_PARTS
    parts = [seconds[part * size : (part + 1) * size] for part in range(NUM_PARTS)]
    return [1e6 * statistics.median(part) / ACTIONS_PER_STEP for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    arguments = parser.parse_args()
    stages = launch(partial(measure, num_steps=arguments.steps), num_stages=2)
    print(f"{arguments.steps} updates in {NUM_PARTS} parts: microseconds per action")
    for stage, parts in enumerate(stages):
        print(f"stage {stage}: " + "  ".join(f"{part:.0f}" for part in parts))


if __name__ == "__main__":
    main()
