"""Implements `Pipeline`: a list of layers, a loss and any torch optimizer, trained across stages.

def worker(transport):                                   # runs once per stage
    pipeline = Pipeline(transport, layers, data=data, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1),
                        num_microbatches=4, num_steps=100, error_feedback=1.0)
    for report in pipeline.run(): ...

launch(worker, num_stages=2)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.reading import MASTER
from ..checkpoint.stage_state import StageState, StateError, check_names, flatten, restore_parameter, unflatten
from ..optim.groups import Group
from ..precision import Precision
from ..schedule import Action, EvaluationSteps, Schedule, ScheduleError, waits_for_sum
from ..transport.base import Transport
from .compiled import COMPILER, Backend, Compiled
from .executor import Executor
from .partition import (
    Tied,
    canonical,
    check_sizes,
    cut,
    first_trained_stage,
    own_layers,
    partition,
    tied_parameters,
    trainable,
)
from .recompute import Recomputing
from .reduction import Requests
from .task import Data, Evaluation, EvaluationReport, Loss, StepReport, Task
from .update import Updater, group_indices
from .weight_versions import WeightVersions, is_mixed, weight_layout
from .zero1 import assign_owners, gather_masters

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Pipeline:
    """One stage of a pipeline. Every stage constructs it with the same arguments, then runs it.

    transport          the connection to the other stages, from `launch`
    layers             the model as nn.Sequential would run it: each layer takes the output of the previous one, a
                       tensor or a tuple of tensors. A Parameter that is in two layers is tied, across stages too. One
                       with requires_grad=False is frozen: it has no gradient, no optimizer state, one copy on its
                       stage, and no place in the state
    data               (step, microbatch) -> (inputs, targets); read on the first and on the last stage. Replicas take
                       the microbatches of a step in turn: of R replicas, r takes r, R + r, 2 R + r and so on
    loss               (outputs, targets) -> scalar
    optimizer          list of parameters -> any torch optimizer; or a list of Groups, each with its own optimizer
    num_microbatches   number of microbatches in a step of each replica; all have the same shapes
    num_steps          number of updates to make
    schedule           two_bw, one_f_one_b, gpipe, pipedream or paci
    depth              two_bw: "double" keeps twice as many warm-up forwards in flight as "minimum"
    sync_start_steps   number of steps that run as one_f_one_b before the schedule begins
    error_feedback     lam: how much of the one-step prediction to apply (with Groups: set it there)
    clip_norm          largest norm of the gradient, exact over all stages (with Groups: set it there)
    learning_rate      index of the update -> factor of the optimizer's rate
    loss_scale         step -> factor of each microbatch's loss; None means the mean over microbatches
    evaluation         held-out data, and when to evaluate
    skip_non_finite    skip an update when an inf or nan occurs, instead of raising
    track_alignment    measure how well each update was predicted, for the reports
    layers_per_stage   number of layers of each stage; None means as even as possible. `partition` balances layers of
                       unequal cost
    precision          dtypes to compute and add in; None means those of the layers. With a coarser `compute`, masters
                       are kept in the layers' dtype
    shard_optimizer    replicas share the optimizer: each keeps masters and state of a part of the parameters (ZeRO-1)
    recompute          names of layers (in a list: "0", "1", ...) that keep only their input and are computed again in
                       the backward
    compile            run the layers through torch.compile, with one graph for each kind of layer; or the name of a
                       torch.compile backend
    prepare            called with this stage's layers before anything else, to initialise or move them
    requests           called at the end of every batch; returns what this process requests. A requested stop or pause
                       ends the run a few steps later, on all stages after the same update. A StepReport says when to
                       save
    start              a state of this stage to resume from (see `state`); num_steps counts from the start of the run
    until              number of steps after which to stop, with the pipeline drained, even if num_steps is larger
    device             device to compute on
    """

    def __init__(
        self,
        transport: Transport,
        layers: nn.Sequential | Sequence[nn.Module],
        *,
        data: Data,
        loss: Loss,
        optimizer: MakeOptimizer | Sequence[Group],
        num_microbatches: int,
        num_steps: int,
        schedule: str = "two_bw",
        depth: str = "minimum",
        sync_start_steps: int = 0,
        error_feedback: float = 0.0,
        clip_norm: float | None = None,
        learning_rate: Callable[[int], float] = lambda step: 1.0,
        loss_scale: Callable[[int], float] | None = None,
        evaluation: Evaluation | None = None,
        skip_non_finite: bool = False,
        track_alignment: bool = True,
        layers_per_stage: Sequence[int] | None = None,
        precision: Precision | None = None,
        shard_optimizer: bool = False,
        recompute: Collection[str] = (),
        compile: bool | Backend = False,
        prepare: Callable[[nn.Sequential], None] | None = None,
        requests: Callable[[], Requests] | None = None,
        start: StageState | None = None,
        until: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        self.transport = transport
        model = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
        stage, num_stages = transport.stage, transport.num_stages
        sizes = list(layers_per_stage or partition([1.0] * len(model), num_stages))
        check_sizes(sizes, len(model), num_stages)
        if callable(optimizer):
            groups = [Group("all", optimizer, error_feedback=error_feedback, clip_norm=clip_norm)]
        else:
            groups = list(optimizer)
        tied = tied_parameters(model, sizes)
        stepped = {name: weight for name, weight in tied.items() if not weight.is_frozen}
        self.schedule = plan_schedule(
            Schedule(
                schedule,
                num_stages,
                num_microbatches,
                num_steps,
                depth=depth,
                sync_start_steps=sync_start_steps,
                first_step=0 if start is None else start.step,
                evaluate_after=EvaluationSteps(num_steps, evaluation.every_steps) if evaluation else (),
                num_evaluations=evaluation.num_actions if evaluation else 0,
            ),
            groups,
            bool(stepped),
            skip_non_finite,
            bool(recompute),
            bool(compile),
        )
        transport.max_under_way = self.schedule.max_in_flight + (evaluation.num_batches if evaluation else 0)
        for stages in sorted({weight.stages for weight in tied.values()}):
            transport.open_group(stages)
        own = own_layers(cut(model, sizes, stage), transport.shares_objects)
        module = _stage_module(model, own, recompute, compile)
        if prepare is not None:
            names = set(trainable(module))
            prepare(module)
            if set(trainable(module)) != names:
                raise ValueError("prepare changes requires_grad, which other stages must know: set it in the layers")
        module.to(device)

        self.tied = {name: stepped[name] for name, _ in module.named_parameters() if name in stepped}
        self._copy_tied(module, {name: weight for name, weight in tied.items() if start is None or weight.is_frozen})
        compute_dtype = None if precision is None else precision.compute
        layout = weight_layout(
            self.schedule.num_versions(stage),
            self.schedule.delay(stage),
            drifts=self.schedule.traits.drifts,
            corrects=any(group.error_feedback != 0 for group in groups),
            compares=track_alignment,
            is_mixed=is_mixed(module, compute_dtype),
        )
        self._owners = self._assign_owners(module, groups) if shard_optimizer and transport.num_replicas > 1 else None
        self.versions = WeightVersions(
            module,
            layout,
            dtype=compute_dtype,
            gradient_dtype=None if precision is None else precision.gradient,
            owned=None if self._owners is None else [n for n, o in self._owners.items() if o == transport.replica],
            blank=start is not None,
        )
        self.updater = Updater(self.versions, groups, self.tied, learning_rate, track_alignment, device)
        reduction = None if precision is None or precision.reduction == precision.gradient else precision.reduction
        self.executor = Executor(
            transport=transport,
            schedule=self.schedule,
            versions=self.versions,
            updater=self.updater,
            task=Task(
                data=lambda step, microbatch: data(step, microbatch * transport.num_replicas + transport.replica),
                loss=loss,
                loss_scale=loss_scale or (lambda step: 1 / (num_microbatches * transport.num_replicas)),
                evaluation=evaluation,
                requests=requests or Requests,
                skip_non_finite=skip_non_finite,
            ),
            device=device,
            owners=self._owners,
            reduction_dtype=reduction,
            first_trained=first_trained_stage(model, sizes),
            backward_lock=COMPILER if compile else None,
            until=until,
        )
        self.clock = self.executor.clock
        """Clock that measures how this stage spends its time."""
        if start is not None:
            self._restore(start, {name for name, _ in model.named_parameters()})

    def _assign_owners(self, module: nn.Module, groups: Sequence[Group]) -> dict[str, int]:
        self.transport.open_sharing()
        parameters = trainable(module)
        indices = group_indices(parameters, groups, self.tied)
        elementwise = {name: groups[index].elementwise for name, index in indices.items()}
        return assign_owners(parameters, elementwise, self.tied, self.transport.num_replicas)

    @torch.no_grad()
    def _copy_tied(self, module: nn.Module, tied: Mapping[str, Tied]) -> None:
        """Copies tied weights from the first stage that holds them to the others. So all copies start equal, however
        the stages were initialised."""
        for name, parameter in module.named_parameters():
            if name in tied:
                gathering = self.transport.gather(parameter.detach().clone(), tied[name].stages)
                parameter.copy_(gathering.wait(lambda: "the others' copies of tied weights")[0])

    def run(self) -> Iterator[StepReport | EvaluationReport]:
        """Trains, and yields a report after every update and every evaluation of this stage. The pipeline fills once at
        the start and drains once at the end."""
        return self.executor.play(self.schedule.actions(self.transport.stage))

    def weights(self) -> dict[str, Tensor]:
        """Returns this stage's masters and the buffers of its modules, by their names in the whole model. Use these to
        compare and export weights. Frozen weights, which never change, are not among them. If replicas share the
        optimizer, all of them must call it."""
        dtypes, waiting = self.versions.master_dtypes, lambda: "the other replicas' masters"
        masters = gather_masters(self.transport, self._owners, self.versions, dtypes, waiting, aside=True)
        return {name: tensor.detach() for name, tensor in {**masters, **self.versions.buffers()}.items()}

    # ---- progress

    @property
    def num_updates(self) -> int:
        """Number of updates that this stage has made, counted from the beginning of the run."""
        return self.versions.newest

    @property
    def end(self) -> int:
        """Number of updates after which the run ends: `num_steps`, `until`, or less if a stop or pause was
        requested."""
        return self.executor.end

    @property
    def was_stopped(self) -> bool:
        """Whether the run ends early because a process requested a stop."""
        return self.executor.stop_was_asked and self.end != self.schedule.num_steps

    @property
    def is_sharded(self) -> bool:
        """Whether replicas share the optimizer, so that each of them saves a part of the state."""
        return self._owners is not None

    @property
    def current_action(self) -> Action | None:
        return self.executor.action

    @property
    def peak_in_flight(self) -> int:
        """Maximum number of microbatches that were between their forward and their backward at a time."""
        return self.executor.peak_in_flight

    @property
    def peak_versions(self) -> int:
        """Maximum number of weight versions that were in use at a time."""
        return self.executor.peak_versions

    # ---- state for resuming

    def state(self) -> StageState:
        """Returns the state of this stage after the latest update. It holds the tensors themselves, not copies. Call it
        only in the loop over `run`, after a StepReport, or after the loop."""
        tied, stage, is_first = self.tied, self.transport.stage, self.transport.replica == 0
        # The names here, and the names in the state, of what this stage saves for all stages that hold it.
        names = {
            name: canonical(name, tied)
            for name in self.versions.parameters(0)
            if name not in tied or tied[name].stages[0] == stage
        }
        tensors: dict[str, Tensor] = {}
        optimizer: dict[str, Any] = {}
        for name, optimizer_of, master in self.updater.optimizer_states():
            if name in names and (is_first or self._owners is not None):
                tensors[f"master/{names[name]}"] = master
                state = optimizer_of.state.get(master, {})
                optimizer[names[name]] = flatten(dict(state), f"optimizer/{names[name]}", tensors)
                if name in self.updater.samples():
                    tensors[f"sample/{names[name]}"] = self.updater.samples()[name]
        for lag in self.versions.lags() if is_first else ():
            for name, parameter in self.versions.parameters(self.versions.newest - lag).items():
                if name in names:
                    tensors[f"working/{lag}/{names[name]}"] = parameter
        if is_first:
            tensors |= {f"buffer/{name}": buffer for name, buffer in self.versions.buffers().items()}
        if is_first or self._owners is not None:
            tensors[f"products/{stage}.{self.transport.replica}"] = self.updater.products
        return StageState(self.versions.newest, tensors, {"optimizer": optimizer, **self.updater.facts()})

    def snapshot(self, into: Mapping[str, Tensor] | None = None) -> Callable[[], StageState]:
        """Starts to copy the state to the host in the background. Returns a function that waits for the copies and
        returns the state. `into` holds tensors of an earlier snapshot that are no longer needed and may be
        overwritten."""
        state = self.state()
        copies = self.executor.copy(state.tensors, into or {})
        return lambda: replace(state, tensors=copies())

    def _restore(self, start: StageState, known: Collection[str]) -> None:
        """known: names of all parameters of the model."""
        tensors, parameters = start.tensors, self.versions.parameters(0)
        names = {name: canonical(name, self.tied) for name in parameters}
        kept = {c: tensors[f"{MASTER}{c}"] for c in names.values() if f"{MASTER}{c}" in tensors}
        strange = [name for name in tensors if name.startswith(MASTER) and name.removeprefix(MASTER) not in known]
        check_names(
            {c: master.shape for c, master in kept.items()}
            | {name.removeprefix(MASTER): torch.Size() for name in strange},
            {canonical: parameters[name].shape for name, canonical in names.items()},
        )
        masters = {name: kept[canonical] for name, canonical in names.items()}
        for name, dtype in self.versions.master_dtypes.items():
            if masters[name].dtype != dtype:
                raise StateError(f"{name} is in {masters[name].dtype}, and the model in {dtype}")
        working = []
        for lag in range(self.versions.num_versions):
            versions = {name: tensors.get(f"working/{lag}/{canonical}") for name, canonical in names.items()}
            # Synchronous steps compute with the masters, and no later batch reads a version from before the end of a
            # synchronous start. The newest version has other weights than the masters only if they are predicted.
            is_read = start.step - lag >= self.schedule.sync_start_steps and self.versions.num_versions > 1
            is_read = is_read and (lag > 0 or self.versions.predicts)
            missing = [name for name, weights in versions.items() if weights is None]
            if lag > 0 and is_read and missing:
                raise StateError(
                    f"version {start.step - lag} of {', '.join(missing)} is missing, which the next batch runs on"
                )
            working.append(
                {
                    name: masters[name] if weights is None or not is_read else weights
                    for name, weights in versions.items()
                }
            )
        self.versions.restore(start.step, masters, working, keeps=start.is_given_away)
        buffers = {name: tensors.get(f"buffer/{name}") for name in self.versions.buffers()}
        if missing := [name for name, buffer in buffers.items() if buffer is None]:
            raise StateError(f"the buffers {', '.join(missing)} are missing, which the model keeps")
        self.versions.restore_buffers({name: buffer for name, buffer in buffers.items() if buffer is not None})
        facts = start.facts["optimizer"]
        for name, optimizer, master in self.updater.optimizer_states():
            restore_parameter(optimizer, master, unflatten(facts[names[name]], tensors), keeps=start.is_given_away)
        samples = {name: tensors[f"sample/{c}"] for name, c in names.items() if f"sample/{c}" in tensors}
        self.updater.restore(start.facts, samples)
        # The products are summed over stages, and over replicas that share the optimizer. So one member starts with the
        # total, and the others with zero.
        if self.transport.stage == 0 and (self.transport.replica == 0 or self._owners is None):
            products = [tensors[name] for name in sorted(tensors) if name.startswith("products/")]
            total = [math.fsum(column) for column in zip(*(part.flatten().tolist() for part in products), strict=True)]
            if len(total) == self.updater.products.numel():  # as many parameter groups as before
                self.updater.products.copy_(torch.tensor(total, dtype=torch.float64).view_as(self.updater.products))


def _stage_module(
    model: nn.Sequential, module: nn.Sequential, recompute: Collection[str], compile: bool | Backend
) -> nn.Sequential:
    known = [name for name, _ in model.named_children()]
    for name in recompute:
        if name not in known:
            raise ValueError(f"recompute names {name!r}, which is no layer: the layers are {', '.join(known)}")
    layers = OrderedDict(module.named_children())
    if compile:
        return Compiled(layers, recompute, "inductor" if compile is True else compile)
    return Recomputing(layers, recompute) if recompute else module


def plan_schedule(
    schedule: Schedule,
    groups: Sequence[Group],
    has_tied: bool,
    skip_non_finite: bool,
    recomputes: bool = False,
    compiles: bool = False,
) -> Schedule:
    """Returns the schedule with the settings that these groups need. Raises ScheduleError if the two are not
    compatible."""
    if not schedule.traits.steps_alone:
        return schedule
    if has_tied:
        raise ScheduleError(
            f"tied weights cannot be split over the stages of {schedule.name}, whose stages step at different times: "
            "untie them, or use two_bw"
        )
    if schedule.traits.drifts:
        if recomputes:
            raise ScheduleError(
                "recompute computes layers again with the weights of their forward, and "
                f"{schedule.name} has overwritten them: leave it empty, or use two_bw"
            )
        if compiles:
            raise ScheduleError(
                "compile leaves it to the compiler what a backward keeps of the forward's weights, and under "
                f"{schedule.name} it must read the newest: set it to False, or use two_bw"
            )
        for group in groups:
            if group.error_feedback != 0:
                raise ScheduleError(
                    f"error_feedback = {group.error_feedback:g} of group {group.name!r} needs a weight version to "
                    f"predict into, and {schedule.name} keeps none: set it to 0, or use two_bw"
                )
    clips = any(group.clip_norm is not None for group in groups)
    return replace(schedule, global_update=waits_for_sum(schedule.name, clips, skip_non_finite))
