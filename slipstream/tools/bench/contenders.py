"""The contenders of the benchmark: slipstream's schedules, the schedules of torch.distributed.pipelining, and a bare
loop without a pipeline.

A contender runs a number of steps on one stage of a world and returns the time of a steady step on that stage.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from ... import Pipeline, StepReport
from ...pipeline.clock import Activity, Clock, Span
from ...schedule import TRAITS, Action, Op, Schedule, ScheduleError, waits_for_sum
from ...transport.base import Transport
from ...transport.nccl import LINK_BLOCKS, new_group
from ...transport.process import ProcessTransport
from .replay import replayed_step_time
from .workloads import REAL_DIM, SEQUENCE_LENGTH, GpuSetting, Placement, Workload, emulated, on_gpu, real, work_of

BARE_LOOP = "bare loop, no pipeline"
TORCH_SHAPES = {
    "ScheduleGPipe": "single",
    "Schedule1F1B": "single",
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
    "ScheduleDualPipeV": "v",
}
"""torch's schedules by class name, and how each places chunks on processes (workloads.Placement.shape)."""
SPLITTING = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""torch's schedules that compute the gradient of a layer's input and the gradient of its weight separately."""
TYING = ("one_f_one_b", "two_bw")
"""slipstream's schedules that can train a weight which the first and the last stage share."""


class Refused(ValueError):
    """Raised by a contender that cannot run. It is raised on every stage, so that no stage waits for another."""


@dataclass(frozen=True)
class Contender:
    name: str
    num_microbatches: int
    schedule: str = ""
    """Name of a slipstream schedule, or of a schedule class of torch.distributed.pipelining. Empty for the bare
    loop."""
    depth: str = "minimum"
    clip_norm: float | None = None
    latency_seconds: float = 0.0
    """Latency that is injected into slipstream's links."""
    as_trained: bool = False
    """Whether slipstream uses its own optimizer, and masters in float32. Only on GPUs."""

    @property
    def engine(self) -> str:
        return "bare" if not self.schedule else "torch" if self.schedule in TORCH_SHAPES else "slipstream"

    def placement(self, num_stages: int) -> Placement:
        return Placement(num_stages, TORCH_SHAPES.get(self.schedule, "single"))

    def plan(self, num_stages: int, num_steps: int) -> Schedule:
        """Returns the slipstream schedule of a run. If the pipeline needs n steps to fill, the schedule has n - 1
        additional steps."""
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
class World:
    """A set of contenders, and the workload, number of stages and number of rounds with which they run. All contenders
    have the same number of microbatches and the same latency."""

    workload: str
    """Workload: emulated, real or cuda."""
    num_stages: int
    contenders: tuple[Contender, ...]
    num_rounds: int
    num_steps: int
    """Number of steps in a run. At least 5, because `seconds_per_step` drops the ends of up to three steps, and a step
    time needs two ends."""
    unbalanced: bool = False
    shared_memory: bool = True
    """Whether slipstream's messages use shared memory. torch's messages always use gloo."""
    gpu: GpuSetting | None = None
    """Setting of the workload cuda. None for the other workloads."""

    @property
    def num_microbatches(self) -> int:
        return self.contenders[0].num_microbatches

    @property
    def latency_seconds(self) -> float:
        return self.contenders[0].latency_seconds

    @property
    def work(self) -> list[float]:
        """Returns the relative work of every process."""
        return work_of(self.num_stages, self.unbalanced)

    @property
    def units_per_microbatch(self) -> int:
        """Returns the tokens of a microbatch, or 1 for emulated compute, which counts microbatches."""
        if self.gpu is not None:
            return self.gpu.tokens_per_microbatch
        return SEQUENCE_LENGTH if self.workload == "real" else 1

    def activations(self, device: torch.device) -> Tensor:
        """Returns a tensor like those that pass between stages."""
        if self.gpu is not None:
            return self.gpu.activations(device)
        return torch.ones(1, 2) if self.workload == "emulated" else torch.randn(1, SEQUENCE_LENGTH, REAL_DIM)

    def make_workload(self, contender: Contender, device: torch.device) -> Workload:
        """Returns the layers that a contender runs. If one contender splits backwards into halves, all contenders get
        emulated layers that support this."""
        placement = contender.placement(self.num_stages)
        if self.gpu is not None:
            has_tied = self.gpu.tied and contender.schedule in TYING
            return on_gpu(self.gpu, placement, device, has_tied, contender.as_trained)
        if self.workload == "real":
            return real(placement, self.unbalanced)
        return emulated(placement, self.unbalanced, any(each.schedule in SPLITTING for each in self.contenders))


@dataclass(frozen=True)
class StageCosts:
    """Average seconds of each kind of action on one stage of slipstream."""

    forward: float
    """Time of a forward, including the time to read the microbatch."""
    backward: float
    update: float
    """Time of an update. 0 means that updates run in the background."""
    sums: float
    """Time from the end of a batch's last action until its update can start. It covers the sums inside the stage and,
    if the schedule needs it, the sum over stages. The stage that reaches the sum over stages last does not wait for the
    others."""
    overhead: float
    """Time per action that the executor itself needs: neither computation, nor waiting, nor reading data."""
    overhead_cpu: float = 0.0
    """Part of the overhead in which the stage's thread ran on a core."""


@dataclass(frozen=True)
class Round:
    """Measurements of one run of a contender, on one stage or over all stages."""

    seconds_per_step: float
    """Time of a step, on the slowest stage."""
    costs: tuple[StageCosts, ...] = ()
    """Costs of every stage. Empty for contenders that are not slipstream's."""
    message_seconds: float = 0.0
    """Time of a message from one stage to the next, including injected latency. A ping at the start of the world
    measures it."""
    exchange: tuple[float, float] | None = None
    """Time of a message of torch's over NCCL, and of two in opposite directions at once (`links.exchange_seconds`).
    None for contenders that are not torch's, and without a GPU."""
    facts: dict[str, float] = field(default_factory=dict)
    """Further measurements. ideal_step is the step time of torch's own order of actions, in units of one process's work
    on one microbatch. peak_in_flight, only of slipstream, is the largest number of microbatches between their forward
    and their backward. Both are those of the first stage. mean_stage_seconds is the mean of the step time over all
    stages."""
    memory_bytes: int | None = None
    """Peak of the allocated memory of a process, the largest of all. None means that the device is no GPU."""
    order: tuple[str, ...] = ()
    """torch's own actions in a step, with its sends and receives: one text for each process. Empty where torch keeps no
    such list."""


def num_steps_to_fill(schedule: str, num_stages: int) -> int:
    """Returns the number of steps until the first stage has its full number of batches in flight. 1 for schedules that
    are not slipstream's."""
    return max(1, TRAITS[schedule].delay(num_stages, 0)) if schedule in TRAITS else 1


def seconds_per_step(ends: Sequence[float], schedule: str = "") -> float:
    """Returns the mean time between the ends of steady steps. It drops the first step. For schedules without a flush it
    also drops the last two, in which the pipeline drains. The benchmark uses it for measured and for simulated times.
    nan means that fewer than two ends are left."""
    has_no_flush = schedule in TRAITS and not TRAITS[schedule].flushes
    steady = ends[1:-2] if has_no_flush else ends[1:]
    return (steady[-1] - steady[0]) / (len(steady) - 1) if len(steady) > 1 else math.nan


def run(contender: Contender, world: World, transport: Transport, num_steps: int) -> Round:
    """Runs one stage of one run of a contender. Raises Refused on every stage if the schedule cannot run."""
    is_cuda = transport.device.type == "cuda"
    if is_cuda:
        gc.collect()  # frees the pipeline of the previous contender, which has reference cycles
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    workload = world.make_workload(contender, transport.device)
    if contender.engine == "slipstream":
        measured = _run_slipstream(contender, workload, transport, num_steps)
    elif contender.engine == "torch":
        assert isinstance(transport, ProcessTransport)
        with transport.process_group():  # so that gloo's threads do not disturb the other contenders
            measured = _run_torch(contender, world, workload, transport, num_steps)
    else:
        measured = _run_bare(contender, world, workload, transport, num_steps)
    return replace(measured, memory_bytes=torch.cuda.max_memory_allocated()) if is_cuda else measured


def _run_slipstream(contender: Contender, workload: Workload, transport: Transport, num_steps: int) -> Round:
    try:
        plan = contender.plan(transport.num_stages, num_steps)
    except ScheduleError as error:
        raise Refused(str(error)) from error
    assert plan.num_steps is not None
    pipeline = Pipeline(
        transport,
        workload.model,
        data=workload.data,
        loss=workload.loss,
        optimizer=workload.optimizer,
        num_microbatches=contender.num_microbatches,
        num_steps=plan.num_steps,
        schedule=contender.schedule,
        depth=contender.depth,
        clip_norm=contender.clip_norm,
        layers_per_stage=workload.sizes,
        track_alignment=False,
        prepare=workload.prepare,
        device=workload.device,
        precision=workload.precision,
    )
    ends = [time.perf_counter() for report in pipeline.run() if isinstance(report, StepReport)]
    clock, num_warm_up = pipeline.clock, workload.num_warm_up_steps
    if workload.device.type == "cuda":  # the host runs ahead of the device
        ends = _ends_on_device(clock.spans, contender.num_microbatches)
    num_steady = plan.num_steps - (0 if plan.traits.flushes else 2)
    return Round(
        seconds_per_step(ends[num_warm_up:], contender.schedule),
        (costs_of(clock, contender.num_microbatches, num_warm_up, num_steady),),
        facts={"peak_in_flight": float(pipeline.peak_in_flight)},
    )


def _ends_on_device(spans: Sequence[Span], num_microbatches: int) -> list[float]:
    """Returns when the last backward of every step ended, in the time of the compute stream. Updates are not used,
    because they may run in the background on another stream."""
    return [
        span.end
        for span in spans
        if span.activity is Activity.BACKWARD and (span.action.microbatch + 1) % num_microbatches == 0
    ]


def costs_of(clock: Clock, num_microbatches: int, num_warm_up: int, num_steady: int) -> StageCosts:
    """Returns the average cost of each action, from the recorded spans. The window starts two steps after the warm-up
    and ends where the pipeline begins to drain, as for the step time. The overhead comes from the clock's steady window
    or, if there is a warm-up, from the time between spans. For this all spans count that lie in the window, because the
    update of a batch, and with it its span, may come a whole step after the batch."""
    steady_microbatches = range((2 + num_warm_up) * num_microbatches, num_steady * num_microbatches)
    spans = [span for span in clock.spans if span.action.microbatch in steady_microbatches]

    def mean(activity: Activity) -> float:
        seconds = [span.end - span.start for span in spans if span.activity is activity]
        return fmean(seconds) if seconds else 0.0

    overhead, overhead_cpu = clock.executor_seconds_per_action if clock.num_actions else (0.0, 0.0)
    if num_warm_up:
        computed = [span for span in spans if span.activity in (Activity.FORWARD, Activity.BACKWARD)]
        start, end = min(span.start for span in computed), max(span.end for span in computed)
        in_turn = [span for span in clock.spans if not span.in_background and start <= span.start and span.end <= end]
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


def _run_torch(
    contender: Contender, world: World, workload: Workload, transport: ProcessTransport, num_steps: int
) -> Round:
    placement = contender.placement(world.num_stages)
    indices = placement.chunks(transport.stage)
    modules = [workload.chunk(index) for index in indices]
    group = nccl_group(transport) if workload.device.type == "cuda" else None
    stages = [
        PipelineStage(module, index, placement.num_chunks, workload.device, group=group)
        for module, index in zip(modules, indices, strict=True)
    ]
    make: Any = getattr(pipelining, contender.schedule, None)
    if make is None:
        raise Refused(f"torch {torch.__version__} has no {contender.schedule}")
    try:
        schedule = make(
            stages[0] if placement.shape == "single" else stages, contender.num_microbatches, loss_fn=workload.loss
        )
    except ValueError as error:
        raise Refused(f"torch says: {error}") from error
    assert callable(workload.optimizer)
    optimizer = workload.optimizer([weight for module in modules for weight in module.parameters()])
    has_first, has_last = 0 in indices, placement.num_chunks - 1 in indices

    def train(step: int) -> None:
        pairs = [workload.data(step, microbatch) for microbatch in range(contender.num_microbatches)]
        inputs = (torch.cat([x for x, _ in pairs]),) if has_first else ()
        targets: dict[str, Any] = {"target": torch.cat([y for _, y in pairs]), "losses": []} if has_last else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    seconds = _time_steps(train, workload, num_steps)
    order = getattr(schedule, "pipeline_order", None) if placement.shape != "single" else None
    ideal_step = replayed_step_time(order, placement, world.work) if order else None
    with_messages = getattr(schedule, "pipeline_order_with_comms", {})
    return Round(
        seconds,
        facts={} if ideal_step is None else {"ideal_step": ideal_step},
        order=tuple(" ".join(map(str, with_messages[process])) for process in sorted(with_messages)),
    )


@cache
def nccl_group(transport: ProcessTransport) -> dist.ProcessGroup:
    """Returns an NCCL group of all stages for torch's schedules, because the default group uses gloo. It is cached, so
    it is created only once. Its kernels have the same priority and number of blocks as those of slipstream's links.
    Otherwise, on a slice of a GPU, waiting receives would block the computation for which they wait."""
    return new_group(range(dist.get_world_size()), None, LINK_BLOCKS)


def _run_bare(contender: Contender, world: World, workload: Workload, transport: Transport, num_steps: int) -> Round:
    """Runs the same work without a pipeline: every process runs its own layers alone and sends no messages."""
    module = workload.chunk(transport.stage)
    inputs, targets = workload.data(0, 0)
    if transport.stage > 0:
        inputs = world.activations(workload.device)
    is_last = transport.stage == transport.num_stages - 1

    def train(step: int) -> None:
        for _ in range(contender.num_microbatches):
            own = inputs.clone().requires_grad_(inputs.is_floating_point())
            outputs = module(own)
            if is_last:
                workload.loss(outputs, targets).backward()
            else:
                outputs.backward(torch.ones_like(outputs))

    return Round(_time_steps(train, workload, num_steps))


def _time_steps(train: Callable[[int], None], workload: Workload, num_steps: int) -> float:
    """Calls train with the number of every step. Returns the seconds of a steady step, in the time of the device."""
    clock = Clock(workload.device, 0, 1)
    for step in range(num_steps):
        clock.enter(Activity.OTHER, Action(0, Op.UPDATE, step, step))  # a span that lasts until the next step
        train(step)
    clock.finish()
    return seconds_per_step([span.end for span in clock.spans][workload.num_warm_up_steps :])
