"""How much of the time a stage computes: slipstream beside torch.distributed.pipelining, in one interleaved run.

    make bench-bubble                                       everything, about ten minutes
    .venv/bin/python benchmarks/bubble.py --only emulated   stages that sleep: the schedule, and nothing else
    .venv/bin/python benchmarks/bubble.py --only real       a decoder on two cores

The rules. Some were changed after first results were seen; the dated page says which, and what they gave before:
- One world of processes per table; the rivals take turns in it, round after round, so noise hits all of them.
- Emulated: forward sleeps 10 ms, backward 20 ms, on every stage; utilisation = m (f + b) / step time with the nominal f
  and b, so that whatever the schedule, the messages, Python or the timer add counts as idle, for every rival alike. The
  bare loop is what the machine allows: every process runs the same layer forward and backward, alone, with no message.
- Step time: mean over the steady steps of a round on the slowest stage; two_bw's fill and drain are left out, and the
  first two steps of the others. Reported: median over rounds, and the lowest and highest round.
- slipstream's stages share one machine here and exchange messages in shared memory; "gloo links" is a world of its own,
  beside torch's 1F1B, whose messages always go over gloo.
- No rival clips unless its row says so; diagnostics are off.
- Real: the ratio of step times of torch's Schedule1F1B and two_bw in the same round, AdamW, one thread per stage, and
  plain BLAS for both: oneDNN is slower at these shapes on ARM, and more so when both cores are busy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Queue

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from slipstream import Pipeline, StepReport, launch
from slipstream.model import ModelConfig, decoder, initialise, next_token_loss
from slipstream.pipeline.comm import Link, Message, Transport, Waiting
from slipstream.pipeline.partition import cut, partition

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
TORCH_SCHEDULES = {"torch GPipe": ScheduleGPipe, "torch 1F1B": Schedule1F1B}
BARE_LOOP = "bare loop, no pipeline"


@dataclass(frozen=True)
class Rival:
    name: str
    num_microbatches: int
    schedule: str = ""
    """Of slipstream; empty for torch's own."""
    depth: str = "minimum"
    clip_norm: float | None = None
    latency_seconds: float = 0.0


# ---- what is trained


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x * weight

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD_SECONDS)
        return gradient, gradient.sum().reshape(1)


class SleepingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight)


@dataclass(frozen=True)
class Workload:
    model: nn.Sequential
    sizes: list[int]
    data: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def emulated(num_stages: int) -> Workload:
    return Workload(
        model=nn.Sequential(*(SleepingLayer() for _ in range(num_stages))),
        sizes=[1] * num_stages,
        data=lambda step, microbatch: (torch.ones(1, 2), torch.zeros(1, 2)),
        loss=lambda outputs, targets: (outputs * 0).sum(),
        optimizer=partial(torch.optim.SGD, lr=0.0),
    )


def real(num_stages: int) -> Workload:
    """Equal blocks on both stages; wide, and with a byte vocabulary, so that embedding and head weigh little."""
    config = ModelConfig(
        vocab_size=256, sequence_length=256, dim=256, num_layers=4, num_heads=4, num_kv_heads=4, hidden_dim=704
    )
    model = decoder(config)
    initialise(model, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (8, 1, config.sequence_length + 1), generator=generator)

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return tokens[microbatch, :, :-1].contiguous(), tokens[microbatch, :, 1:].contiguous()

    return Workload(
        model, partition([1.0] * len(model), num_stages), data, next_token_loss, partial(torch.optim.AdamW, lr=1e-4)
    )


# ---- the rivals


def run_slipstream(rival: Rival, workload: Workload, transport: Transport, num_steps: int) -> list[float]:
    """When each steady step ended on this stage."""
    pipeline = Pipeline(
        transport,
        workload.model,
        data=workload.data,
        loss=workload.loss,
        optimizer=workload.optimizer,
        num_microbatches=rival.num_microbatches,
        num_steps=num_steps,
        schedule=rival.schedule,
        depth=rival.depth,
        clip_norm=rival.clip_norm,
        layers_per_stage=workload.sizes,
        track_alignment=False,
    )
    ends = [time.perf_counter() for report in pipeline.run() if isinstance(report, StepReport)]
    return ends[1:] if pipeline.schedule.is_flushing else ends[1:-2]


def run_torch(rival: Rival, workload: Workload, transport: Transport, num_steps: int) -> list[float]:
    is_first, is_last = transport.stage == 0, transport.stage == transport.num_stages - 1
    module = cut(workload.model, workload.sizes, transport.stage)
    stage = PipelineStage(module, transport.stage, transport.num_stages, torch.device("cpu"))
    schedule = TORCH_SCHEDULES[rival.name](stage, rival.num_microbatches, loss_fn=workload.loss)
    optimizer = workload.optimizer(list(module.parameters()))
    ends = []
    for step in range(num_steps):
        pairs = [workload.data(step, microbatch) for microbatch in range(rival.num_microbatches)]
        inputs = (torch.cat([x for x, _ in pairs]),) if is_first else ()
        targets = {"target": torch.cat([y for _, y in pairs]), "losses": []} if is_last else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return ends[1:]


def run_bare(rival: Rival, workload: Workload, transport: Transport, num_steps: int) -> list[float]:
    """The same work without a pipeline."""
    layer = workload.model[transport.stage]
    inputs, _ = workload.data(0, 0)
    ends = []
    for _ in range(num_steps):
        for _ in range(rival.num_microbatches):
            outputs = layer(inputs.clone().requires_grad_())
            outputs.backward(torch.ones_like(outputs))
        ends.append(time.perf_counter())
    return ends[1:]


class DelayedLink(Link):
    """A message leaves `seconds` after it was sent, from a thread of the link's own."""

    def __init__(self, link: Link, seconds: float) -> None:
        self._link, self._seconds = link, seconds
        self._queue: Queue[tuple[float, str, Message, Waiting]] = Queue()
        threading.Thread(target=self._carry, name="slow link", daemon=True).start()

    def _carry(self) -> None:
        _sleep_precisely()
        while True:
            leaves_at, kind, message, waiting = self._queue.get()
            time.sleep(max(0.0, leaves_at - time.monotonic()))
            self._link.send(kind, message, waiting)
            self._queue.task_done()

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        self._queue.put((time.monotonic() + self._seconds, kind, message, waiting))

    def expect(self, kind: str) -> None:
        self._link.expect(kind)

    def take(self, waiting: Waiting) -> Message:
        return self._link.take(waiting)

    def empty(self) -> None:
        self._queue.join()


@contextmanager
def link_latency(transport: Transport, seconds: float) -> Iterator[None]:
    """Delays everything that passes between neighbours, for a while."""
    links = {name: getattr(transport, name) for name in ("forward_out", "backward_out") if hasattr(transport, name)}
    slow_links = {name: DelayedLink(link, seconds) for name, link in links.items()}
    flush = transport.flush

    def empty_and_flush() -> None:
        for link in slow_links.values():
            link.empty()
        flush()

    for name, link in {**slow_links, "flush": empty_and_flush}.items():
        setattr(transport, name, link)
    try:
        yield
    finally:
        for name, link in {**links, "flush": flush}.items():
            setattr(transport, name, link)


# ---- the run


def _sleep_precisely() -> None:
    """Linux lets a sleep end up to 50 microseconds late to save power; here it is asked not to."""
    if platform.system() == "Linux":
        set_timer_slack, one_nanosecond = 29, 1
        ctypes.CDLL(None).prctl(set_timer_slack, one_nanosecond, 0, 0, 0)


def compete(
    transport: Transport, make: Callable[[int], Workload], rivals: list[Rival], num_rounds: int, num_steps: int
) -> list[list[float]]:
    """Seconds per step, by rival and round, on this stage."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    _sleep_precisely()
    seconds: list[list[float]] = [[] for _ in rivals]
    for _ in range(num_rounds):
        for rival, row in zip(rivals, seconds, strict=True):
            workload = make(transport.num_stages)
            dist.barrier()
            run = run_slipstream if rival.schedule else run_torch if rival.name in TORCH_SCHEDULES else run_bare
            with link_latency(transport, rival.latency_seconds) if rival.latency_seconds else nullcontext():
                ends = run(rival, workload, transport, num_steps)
            row.append((ends[-1] - ends[0]) / (len(ends) - 1))
    return seconds


def table_of(
    console: Console,
    num_stages: int,
    make: Callable[[int], Workload],
    rivals: list[Rival],
    num_rounds: int,
    num_steps: int,
    shared_memory: bool = True,
) -> list[dict[str, object]]:
    worker = partial(compete, make=make, rivals=rivals, num_rounds=num_rounds, num_steps=num_steps)
    with console.status(f"{num_stages} stages: {len(rivals)} rivals, {num_rounds} rounds of {num_steps} steps"):
        by_stage = launch(worker, num_stages, timeout_seconds=60, shared_memory=shared_memory)
    rows = []
    for index, rival in enumerate(rivals):
        rounds = [max(stage[index][i] for stage in by_stage) for i in range(num_rounds)]
        rows.append(asdict(rival) | {"num_stages": num_stages, "seconds_per_step": rounds})
    return rows


def emulated_tables(console: Console, num_rounds: int) -> list[dict[str, object]]:
    everything = []
    for num_stages, num_steps in ((4, 14), (8, 10)):
        p = num_stages
        rivals = [
            Rival(BARE_LOOP, p),
            Rival("torch GPipe", p),
            Rival("torch 1F1B", p),
            Rival("slipstream 1F1B", p, "one_f_one_b"),
            Rival("slipstream 2BW", p, "two_bw"),
            Rival("slipstream 2BW, clipping", p, "two_bw", clip_norm=1.0),
            Rival("2BW, 3 ms links", 2 * p, "two_bw", latency_seconds=0.003, clip_norm=1.0),
            Rival("2BW deep, 3 ms links", 2 * p, "two_bw", depth="double", latency_seconds=0.003, clip_norm=1.0),
        ]
        rows = table_of(console, p, emulated, rivals, num_rounds, num_steps)
        over_gloo = [Rival("torch 1F1B", p), Rival("slipstream 2BW, gloo links", p, "two_bw")]
        rows += table_of(console, p, emulated, over_gloo, num_rounds, num_steps, shared_memory=False)[1:]
        table = Table(title=f"emulated stages, P = {p}: share of the time spent computing")
        for column in ("schedule", "m", "utilisation", "lowest - highest round", "ideal"):
            table.add_column(column, justify="left" if column == "schedule" else "right")
        for row in rows:
            m = row["num_microbatches"]
            busy = m * (FORWARD_SECONDS + BACKWARD_SECONDS)
            shares = sorted(busy / seconds for seconds in row["seconds_per_step"])
            row["utilisation"] = statistics.median(shares)
            flushes = row["name"] in TORCH_SCHEDULES or row["schedule"] == "one_f_one_b"
            ideal = f"{m / (m + p - 1):.3f}" if flushes else "1.000"
            table.add_row(
                row["name"], str(m), f"{row['utilisation']:.3f}", f"{shares[0]:.3f} - {shares[-1]:.3f}", ideal
            )
        console.print(table)
        everything += rows
    return everything


def real_table(console: Console, num_rounds: int) -> list[dict[str, object]]:
    ms = (2, 4, 8)
    rivals = [rival for m in ms for rival in (Rival("torch 1F1B", m), Rival("slipstream 2BW", m, "two_bw"))]
    rows = table_of(console, 2, real, rivals, num_rounds, num_steps=9)
    table = Table(title="real compute, P = 2, one thread per stage: time per step, torch 1F1B over slipstream 2BW")
    for column in ("m", "ratio", "lowest - highest round", "ideal"):
        table.add_column(column, justify="right")
    for m, theirs, ours in zip(ms, rows[::2], rows[1::2], strict=True):
        pairs = zip(theirs["seconds_per_step"], ours["seconds_per_step"], strict=True)
        ratios = sorted(their / our for their, our in pairs)
        ours["ratio"] = statistics.median(ratios)
        table.add_row(str(m), f"{ours['ratio']:.3f}", f"{ratios[0]:.3f} - {ratios[-1]:.3f}", f"{(m + 1) / m:.3f}")
    console.print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("emulated", "real"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write every round's figures here")
    arguments = parser.parse_args()
    console = Console()
    rows = []
    if arguments.only != "real":
        rows += emulated_tables(console, arguments.rounds)
    if arguments.only != "emulated":
        rows += real_table(console, arguments.rounds)
    if arguments.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
