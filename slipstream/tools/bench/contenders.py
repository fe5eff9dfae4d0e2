"""Who competes: slipstream's schedules, torch.distributed.pipelining's, and a bare loop with no pipeline at all.

A rival runs some steps on one stage of a world and says when each steady step ended there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from ... import Pipeline, StepReport
from ...pipeline.clock import Activity, Clock, Span
from ...schedule import TRAITS, Schedule, ScheduleError, waits_for_sum
from ...transport.base import Transport
from ...transport.nccl import FOREVER, LINK_BLOCKS
from ...transport.process import ProcessTransport
from .replay import replayed_step_time
from .workloads import WORKLOADS, GpuSetting, Placement, Workload, on_gpu, work_of

BARE_LOOP = "bare loop, no pipeline"
TORCH_SHAPES = {
    "ScheduleGPipe": "single",
    "Schedule1F1B": "single",
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
    "ScheduleDualPipeV": "v",
}
"""torch's schedules by the name of their class, and how each places chunks on processes."""
SPLITTING = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Those that compute the gradient of a layer's input and that of its weight apart."""
TYING = ("one_f_one_b", "two_bw")
"""Those that can train a weight which the first and the last stage share."""


class Refused(ValueError):
    """A rival that says, on every stage alike, that it cannot run."""


@dataclass(frozen=True)
class Rival:
    name: str
    num_microbatches: int
    schedule: str = ""
    """slipstream's, or the name of a class of torch.distributed.pipelining; empty for the bare loop."""
    depth: str = "minimum"
    clip_norm: float | None = None
    latency_seconds: float = 0.0
    """Injected on slipstream's links."""
    as_trained: bool = False
    """On GPUs, slipstream: with its own optimizer, and masters in float32."""

    @property
    def engine(self) -> str:
        return "bare" if not self.schedule else "torch" if self.schedule in TORCH_SHAPES else "slipstream"

    def placement(self, num_stages: int) -> Placement:
        return Placement(num_stages, TORCH_SHAPES.get(self.schedule, "single"))

    def plan(self, num_stages: int, num_steps: int) -> Schedule:
        """slipstream: the schedule as it is played. One that takes several steps to fill, and not one, plays as many
        more."""
        more = num_steps_to_fill(self.schedule, num_stages) - 1
        return Schedule(
            self.schedule,
            num_stages,
            self.num_microbatches,
            num_steps + more,
            depth=self.depth,
            global_update=waits_for_sum(self.schedule, clips=self.clip_norm is not None),
        )


@dataclass(frozen=True)
class StageCosts:
    """What an action took on a stage of slipstream, in seconds on average."""

    forward: float
    """What it takes to read the microbatch included."""
    backward: float
    update: float
    """0 where updates are made in the background."""
    sums: float
    """From the end of a batch's last action until the update could begin: the stage's own sums and, where there is one,
    the sum over stages. On the stage that comes last to it, none of it is waiting for others."""
    overhead: float
    """The executor's own, per action: neither computing, nor waiting, nor reading data."""
    overhead_cpu: float = 0.0
    """The part of it that the stage's thread had a core for."""


@dataclass(frozen=True)
class StageRun:
    """One run of a rival, as one stage saw it."""

    ends: list[float]
    """When each steady step ended."""
    costs: StageCosts | None = None
    facts: dict[str, float] = field(default_factory=dict)
    """ideal_step: the step time of torch's own order of actions, in units of one process's work on one microbatch.
    peak_in_flight, of slipstream: most microbatches between their forward and their backward."""
    memory_bytes: int | None = None
    """On a GPU: the most that was allocated there."""

    @property
    def seconds_per_step(self) -> float:
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def num_steps_to_fill(schedule: str, num_stages: int) -> int:
    """Of one of slipstream's: until the first stage has as many batches in flight as it will have."""
    return max(1, TRAITS[schedule].delay(num_stages, 0)) if schedule in TRAITS else 1


def steady(ends: Sequence[float], schedule: str) -> list[float]:
    """The ends of steady steps: the first is left out, and of schedules without a flush the last two, when the pipeline
    drains. Used for what is measured and for what is simulated."""
    has_no_flush = schedule in TRAITS and not TRAITS[schedule].flushes
    return list(ends[1:-2] if has_no_flush else ends[1:])


class Ticks:
    """The moments at which steps end: by the host's clock on a CPU. On CUDA they are events of the current stream, so
    nothing waits, and the time is the device's."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def tick(self) -> None:
        if not self._is_cuda:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Waits for the device, where there is one."""
        if not self._is_cuda:
            return self._times
        torch.cuda.synchronize()
        return [self._events[0].elapsed_time(event) / 1000 for event in self._events]


def run(rival: Rival, workload: str | GpuSetting, unbalanced: bool, transport: Transport, num_steps: int) -> StageRun:
    """A stage of one run. Raises Refused, on every stage alike, where there is no such schedule."""
    placement = rival.placement(transport.num_stages)
    if isinstance(workload, str):
        return _run(rival, WORKLOADS[workload](placement, unbalanced), unbalanced, transport, num_steps)
    assert isinstance(transport, ProcessTransport)
    device = transport.device
    if device.type == "cuda":
        gc.collect()  # a pipeline refers to itself, and the rival before must not count here
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    has_tied = workload.tied and rival.schedule in TYING
    made = on_gpu(workload, placement, device, has_tied, rival.as_trained)
    measured = _run(rival, made, unbalanced, transport, num_steps)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return replace(measured, memory_bytes=memory)


def _run(rival: Rival, made: Workload, unbalanced: bool, transport: Transport, num_steps: int) -> StageRun:
    if rival.engine == "slipstream":
        return _run_slipstream(rival, made, transport, num_steps)
    if rival.engine == "torch":
        assert isinstance(transport, ProcessTransport)
        with transport.process_group():  # gloo's threads must not disturb the other rivals
            return _run_torch(rival, made, unbalanced, transport, num_steps)
    return _run_bare(rival, made, transport, num_steps)


def _run_slipstream(rival: Rival, workload: Workload, transport: Transport, num_steps: int) -> StageRun:
    try:
        plan = rival.plan(transport.num_stages, num_steps)
    except ScheduleError as error:
        raise Refused(str(error)) from error
    assert plan.num_steps is not None
    pipeline = Pipeline(
        transport,
        workload.model,
        data=workload.data,
        loss=workload.loss,
        optimizer=workload.groups or workload.optimizer,
        num_microbatches=rival.num_microbatches,
        num_steps=plan.num_steps,
        schedule=rival.schedule,
        depth=rival.depth,
        clip_norm=rival.clip_norm,
        layers_per_stage=workload.sizes,
        track_alignment=False,
        prepare=workload.prepare,
        device=workload.device,
        precision=workload.precision,
    )
    ends = [time.perf_counter() for report in pipeline.run() if isinstance(report, StepReport)]
    clock, num_warm_up = pipeline.clock, workload.num_warm_up_steps
    if workload.device.type == "cuda":  # the host runs ahead
        ends = _ends_on_device(clock.spans, rival.num_microbatches)
    facts = {"peak_in_flight": float(pipeline.peak_in_flight)}
    num_steady = plan.num_steps - (0 if plan.traits.flushes else 2)
    costs = _costs(clock, rival.num_microbatches, num_warm_up, num_steady)
    return StageRun(steady(ends[num_warm_up:], rival.schedule), costs, facts)


def _ends_on_device(spans: Sequence[Span], num_microbatches: int) -> list[float]:
    """When the last backward of every step ended, in the time of the stream that computes. Updates may be made beside
    it, so that they have no place in this time."""
    return [
        span.end
        for span in spans
        if span.activity is Activity.BACKWARD and (span.action.microbatch + 1) % num_microbatches == 0
    ]


def _costs(clock: Clock, num_microbatches: int, num_warm_up: int, num_steady: int) -> StageCosts:
    """Actions by their spans, from after the first two steps to where a pipeline begins to drain, as for the step time;
    the overhead by the clock's steady window or, after a warm-up, by the time between spans."""
    steady_microbatches = range((2 + num_warm_up) * num_microbatches, num_steady * num_microbatches)
    spans = [span for span in clock.spans if span.action.microbatch in steady_microbatches]

    def mean(activity: Activity) -> float:
        seconds = [span.end - span.start for span in spans if span.activity is activity]
        return fmean(seconds) if seconds else 0.0

    overhead, overhead_cpu = clock.executor_seconds_per_action if clock.num_actions else (0.0, 0.0)
    if num_warm_up:
        in_turn = [span for span in spans if not span.in_background]
        num_actions = sum(span.activity.is_compute for span in in_turn)
        overhead = sum(after.start - before.end for before, after in pairwise(in_turn)) / max(1, num_actions)
    return StageCosts(
        forward=mean(Activity.DATA) + mean(Activity.FORWARD),
        backward=mean(Activity.BACKWARD),
        update=0.0 if clock.num_background_updates else mean(Activity.UPDATE),
        sums=mean(Activity.WAIT_SUMS),
        overhead=overhead,
        overhead_cpu=overhead_cpu,
    )


def _run_torch(rival: Rival, workload: Workload, unbalanced: bool, transport: Transport, num_steps: int) -> StageRun:
    placement = rival.placement(transport.num_stages)
    indices = placement.chunks(transport.stage)
    modules = [workload.chunk(index) for index in indices]
    assert isinstance(transport, ProcessTransport)
    group = nccl_group(transport) if workload.device.type == "cuda" else None
    stages = [
        PipelineStage(module, index, placement.num_chunks, workload.device, group=group)
        for module, index in zip(modules, indices, strict=True)
    ]
    make: Any = getattr(pipelining, rival.schedule, None)
    if make is None:
        raise Refused(f"torch {torch.__version__} has no {rival.schedule}")
    try:
        schedule = make(
            stages[0] if placement.shape == "single" else stages, rival.num_microbatches, loss_fn=workload.loss
        )
    except ValueError as error:
        raise Refused(f"torch says: {error}") from error
    optimizer = workload.optimizer([weight for module in modules for weight in module.parameters()])
    has_first, has_last = 0 in indices, placement.num_chunks - 1 in indices
    ticks = Ticks(workload.device)
    for step in range(num_steps):
        pairs = [workload.data(step, microbatch) for microbatch in range(rival.num_microbatches)]
        inputs = (torch.cat([x for x, _ in pairs]),) if has_first else ()
        targets: dict[str, Any] = {"target": torch.cat([y for _, y in pairs]), "losses": []} if has_last else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        ticks.tick()
    order = getattr(schedule, "pipeline_order", None) if placement.shape != "single" else None
    ideal_step = replayed_step_time(order, placement, work_of(transport.num_stages, unbalanced)) if order else None
    ends = steady(ticks.seconds()[workload.num_warm_up_steps :], rival.schedule)
    return StageRun(ends, facts={} if ideal_step is None else {"ideal_step": ideal_step})


@cache
def nccl_group(transport: ProcessTransport) -> dist.ProcessGroup:
    """Of all stages, for torch's schedules: the default group is gloo's. It is made once, because it is kept. Its
    kernels have the priority and the number of blocks that ours have: on a slice of a GPU, receives that wait would
    otherwise keep the stage from computing what they wait for."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = LINK_BLOCKS
    return dist.new_group(backend="nccl", timeout=FOREVER, pg_options=options)


def _run_bare(rival: Rival, workload: Workload, transport: Transport, num_steps: int) -> StageRun:
    """The same work without a pipeline: every process runs its own layers, alone and with no message."""
    module = workload.chunk(transport.stage)
    inputs, targets = workload.data(0, 0)
    if workload.activations is not None and transport.stage > 0:
        inputs = workload.activations()
    else:
        with torch.no_grad():
            for index in range(transport.stage):
                inputs = workload.chunk(index)(inputs)
    is_last = transport.stage == transport.num_stages - 1
    ticks = Ticks(workload.device)
    for _ in range(num_steps):
        for _ in range(rival.num_microbatches):
            own = inputs.clone().requires_grad_(inputs.is_floating_point())
            outputs = module(own)
            if is_last:
                workload.loss(outputs, targets).backward()
            else:
                outputs.backward(torch.ones_like(outputs))
        ticks.tick()
    return StageRun(steady(ticks.seconds()[workload.num_warm_up_steps :], rival.schedule))
