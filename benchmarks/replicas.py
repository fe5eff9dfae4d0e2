"""What a second replica costs: emulated stages whose gradients take a slot to be added up over replicas.

    .venv/bin/python benchmarks/replicas.py        about five minutes

The rules, fixed before the first run:
- A forward sleeps 10 ms and a backward 20 ms, so a slot is 30 ms; P = 2 and P = 4 stages, m = 2P microbatches, exact
  clipping.
- "one replica" is the pipeline alone. "two replicas" adds up gradients over two of them, and the sum is made to take a
  slot longer than it does. "slow update": beside that, the optimizer's step takes a slot of the host's time. "shared":
  the replicas share the optimizer (ZeRO-1), so that gradients go to their owner and weights come back.
- They take turns, round after round, each in processes of its own; step time is the mean over the steady steps on
  the slowest stage of the slowest replica. Reported: throughput of a replica as a share of that of one replica alone in
  the same round; median, lowest and highest round.
- Where cores are fewer than processes, each keeps to one, as in `slipstream bench`.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream import Pipeline, StepReport, launch
from slipstream.tools.bench.contenders import seconds_per_step
from slipstream.tools.bench.turns import settle_stage
from slipstream.tools.bench.workloads import BACKWARD_SECONDS, FORWARD_SECONDS, Placement, emulated
from slipstream.transport.base import Exchange, Transport
from slipstream.transport.link import Waiting

SLOT_SECONDS = FORWARD_SECONDS + BACKWARD_SECONDS
WAYS = {
    "one replica": (1, False, False),
    "two replicas": (2, False, False),
    "two replicas, slow update": (2, True, False),
    "two replicas, shared": (2, False, True),
    "two replicas, shared, slow update": (2, True, True),
}
"""Number of replicas, whether the update is slow, and whether they share the optimizer."""


class LateExchange(Exchange):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._ready_at = exchange, time.monotonic() + SLOT_SECONDS

    def wait(self, waiting: Waiting) -> None:
        self._exchange.wait(waiting)
        time.sleep(max(0.0, self._ready_at - time.monotonic()))


@contextmanager
def slow_sums(transport: Transport, sharded: bool) -> Iterator[None]:
    add = transport.add_replicas

    def add_late(tensors: Sequence[Tensor], owners: Sequence[int] | None = None) -> Exchange:
        is_gradients = not sharded or owners is not None  # those that share an optimizer sum a short vector too
        return LateExchange(add(tensors, owners)) if is_gradients else add(tensors)

    transport.add_replicas = add_late  # type: ignore[method-assign]
    yield
    del transport.add_replicas  # type: ignore[method-assign]


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(SLOT_SECONDS)
        return super().step(closure)


def run_stage(transport: Transport, slow_update: bool, sharded: bool, num_steps: int) -> float:
    """Seconds a steady step takes on this stage."""
    rank = transport.replica * transport.num_stages + transport.stage
    settle_stage(rank, transport.num_stages * transport.num_replicas)
    workload = emulated(Placement(transport.num_stages))
    with slow_sums(transport, sharded):
        pipeline = Pipeline(
            transport,
            workload.model,
            data=workload.data,
            loss=workload.loss,
            optimizer=partial(SlowSGD if slow_update else torch.optim.SGD, lr=0.0),
            num_microbatches=2 * transport.num_stages,
            num_steps=num_steps,
            clip_norm=1.0,
            layers_per_stage=workload.sizes,
            track_alignment=False,
            shard_optimizer=sharded,
        )
        ends = [time.perf_counter() for report in pipeline.run() if isinstance(report, StepReport)]
    return seconds_per_step(ends, "two_bw")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start_method = "fork" if platform.system() == "Linux" else None
    print("| P | m | way | seconds a step | of one replica's throughput | lowest - highest round |")
    print("|---:|---:|---|---:|---:|---:|")
    for num_stages in (2, 4):
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way, (num_replicas, slow_update, sharded) in WAYS.items():
                worker = partial(run_stage, slow_update=slow_update, sharded=sharded, num_steps=arguments.steps)
                stages = launch(worker, num_stages, num_replicas=num_replicas, start_method=start_method)
                seconds[way].append(max(stages))
        for way, row in seconds.items():
            shares = [alone / own for alone, own in zip(seconds["one replica"], row, strict=True)]
            print(
                f"| {num_stages} | {2 * num_stages} | {way} | {statistics.median(row):.4f} | "
                f"{statistics.median(shares):.3f} | {min(shares):.3f} - {max(shares):.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
