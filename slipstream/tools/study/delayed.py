"""Fast training with delayed gradients in one process, for a cell of a study.

It computes the same numbers as a pipeline, without a pipeline. Batch t of a stage with delay d runs on the weights
after t - d updates. So it is enough to keep the last d + 1 versions and to load the right one before each batch. The
masters z, the optimizers and error feedback are those of `pipeline.update`. `reference.py` implements the same in a
slow and simple way.

The weights with the same group and delay are stored end to end in one flat tensor, a `Slab`. Clipping, decay,
prediction and copies then take a few kernels each, whatever the number of parameters. The host never waits for the
device during a step. For small batches, a CUDA graph avoids that the device waits for single kernel launches.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...config.models import recomputed_layers
from ...data import ValidationBatches
from ...model.spec import ModelSpec, on_meta
from ...optim.correction import predict, update_products
from ...optim.groups import Group, assign
from ...optim.optimizer import share_kernels
from ...pipeline.clock import Activity, Clock
from ...pipeline.recompute import Recomputing
from ...train.build import Components
from .cell import Cell
from .cuda_graph import Batch, Result, captured
from .predictors import Predictor, find_predictor, last_update, pipeline_predictor


@dataclass
class Slab:
    """The parameters of one group on all stages with the same delay."""

    names: list[str]
    delay: int
    ahead: int
    """A forward reads the version that was the newest this number of microbatches ago."""
    parameters: list[nn.Parameter]
    """Parameters of the optimizer. They are views of `master`; a view may be a stack of matrices of the same shape. If
    the optimizer works element by element, `master` itself is the only parameter."""
    working: list[nn.Parameter]
    """Parameters that forward and backward read, in the order of `names` and in the compute dtype."""
    room: Tensor | None
    """Flat tensor that holds the working parameters end to end. None means that each has its own memory."""
    master: Tensor
    """Masters z as a flat tensor. The tensors below are flat too."""
    gradient: Tensor
    spare: Tensor
    """Scratch space: z before the update, then x."""
    versions: deque[Tensor]
    """Newest weight versions, in the dtype of `working`. The newest is the last."""

    def load(self, weights: Tensor) -> None:
        """Copies weights into the working parameters. They keep their addresses, because a CUDA graph refers to them by
        address. Autograd does not notice the copy, because PACI copies between a forward and its backward."""
        places = [parameter.data for parameter in self.working] if self.room is None else [self.room]
        for place, view in zip(places, _views(weights, [place.shape for place in places]), strict=True):
            place.copy_(view)

    def add_version(self, weights: Tensor) -> None:
        full = len(self.versions) == self.versions.maxlen
        target = self.versions.popleft() if full else torch.empty_like(self.versions[0])
        target.copy_(weights)
        self.versions.append(target)


@dataclass
class GroupState:
    group: Group
    slabs: list[Slab]
    optimizer: Optimizer
    base_rates: list[float]
    predictor: Predictor
    previous: list[Tensor] | None = None
    """Last update, if the next step computes the cosine of both. None otherwise."""
    products: list[tuple[int, Tensor]] = field(default_factory=list)


class DelayedRun:
    def __init__(self, cell: Cell, components: Components, device: torch.device) -> None:
        self._cell, self._components, self._device = cell, components, device
        config, model = cell.config, components.model
        self.steps = config.train.steps
        self.num_microbatches = config.pipeline.microbatches
        dtype = getattr(torch, config.train.dtype)
        compute_dtype = getattr(torch, cell.compute_dtype) if cell.compute_dtype else dtype
        # The masters are initialised in their own dtype. The working copy is rounded from them.
        is_compiled, recomputed = cell.compile_mode is not None, recomputed_layers(config, model)
        network = _network(model, compute_dtype, device, is_compiled, config.train.loss_chunk_tokens, recomputed)
        self._loss = network.loss
        self._drifts = cell.drift_warmups is not None
        # A graph cannot load other weights between forward and backward, as PACI does. It also cannot wait for a value
        # from the device, which experts may need for their loads.
        can_be_graph = not self._drifts and model.num_experts == 0
        self._uses_graphs = cell.compile_mode == "reduce-overhead" and device.type == "cuda" and can_be_graph
        masters = _masters(model, dtype, device, config.train.seed)
        network.fill({name: weight for name, weight in masters.items() if not weight.requires_grad})
        trained = [(name, weight) for name, weight in masters.items() if weight.requires_grad]
        stages = [stage for stage, size in enumerate(components.layers_per_stage) for _ in range(size)]
        stage_of_layer = dict(zip(model.layer_names, stages, strict=True))
        delays = cell.stage_delays
        ahead = cell.drift_warmups or [delay * self.num_microbatches for delay in delays]
        self.groups: list[GroupState] = []
        for group, members in assign(trained, components.groups):
            if not members:
                continue
            alike: dict[tuple[int, int], list[str]] = {}
            for name, _ in members:
                stage = stage_of_layer[name.split(".")[0]]
                alike.setdefault((delays[stage], ahead[stage]), []).append(name)
            slabs = [
                _slab({name: masters[name] for name in names}, network, group, *lag, self.num_microbatches)
                for lag, names in alike.items()
            ]
            parameters = [slab.parameters for slab in slabs]
            optimizer = group.optimizer([p for piece in parameters for p in piece])
            predictor = pipeline_predictor(optimizer)
            if cell.predictor:
                predictor = find_predictor(cell.predictor).make(cell.predictor_weight, parameters)
            rates = [g["lr"] for g in optimizer.param_groups]
            self.groups.append(GroupState(group, slabs, optimizer, rates, predictor))
        self.losses = torch.zeros(self.steps, dtype=torch.float64, device=device)
        """Training loss by step, on the device."""
        self._clock = Clock(device, 0, 1)

    @property
    def _slabs(self) -> Iterator[Slab]:
        return (slab for state in self.groups for slab in state.slabs)

    def weights(self) -> dict[str, Tensor]:
        """Returns the masters by name."""
        found: dict[str, Tensor] = {}
        for slab in self._slabs:
            views = _views(slab.master, [parameter.shape for parameter in slab.working])
            found |= dict(zip(slab.names, views, strict=True))
        return found

    def snapshot(self) -> list[Any]:
        """Copies everything that decides how the run continues, so that it may continue in more than one way."""
        return copy.deepcopy(
            [
                ([(slab.master, slab.versions) for slab in state.slabs], state.optimizer.state_dict(), state.predictor)
                for state in self.groups
            ]
        )

    @torch.no_grad()
    def restore(self, snapshot: list[Any]) -> None:
        for state, (slabs, values, predictor) in zip(self.groups, copy.deepcopy(snapshot), strict=True):
            for slab, (master, versions) in zip(state.slabs, slabs, strict=True):
                slab.master.copy_(master)
                slab.versions = versions
            state.optimizer.load_state_dict(values)
            state.predictor, state.previous = predictor, None

    def train(
        self,
        track_every: int = 0,
        first: int = 0,
        last: int | None = None,
        learning_rate: Callable[[int], float] | None = None,
    ) -> Iterator[int]:
        """Trains, and yields the number of updates after each update.

        track_every: number of steps between two cosines of consecutive updates. 0 means none. first: number of updates
        that were made before. last: number of updates after which to stop. None means all. learning_rate: schedule to
        follow instead of that of the cell."""
        gradients = self._as_graph(self._gradients, self._components.batches(0, 0))
        learning_rate = learning_rate or self._components.learning_rate
        steps = range(first, self.steps if last is None else last)
        self.losses[steps.start : steps.stop] = 0
        batches = self._batches(steps)
        for step in steps:
            if step == self.steps // 2:
                self._clock.split_since_last()  # optimizer_share forgets the first half
            self._clock.enter(Activity.BACKWARD)
            self._accumulate(step, batches, gradients)
            self._clock.enter(Activity.UPDATE)
            self._update(step, learning_rate(step), track_every)
            self._clock.enter(Activity.OTHER)
            yield step + 1

    def optimizer_share(self) -> float:
        """Returns the share of a step's time that the update takes, over about the second half of the run: after
        compilation and allocation."""
        self._clock.finish()
        split = self._clock.split_since_last()
        return split.update / (split.backward + split.update)

    def _batches(self, steps: range) -> Iterator[Batch]:
        """Yields the batches of the steps, on the device. A thread reads one batch ahead, and the copy to the device
        does not block."""
        batches = (self._components.batches(step, index) for step in steps for index in range(self.num_microbatches))

        def read() -> Batch | None:
            batch = next(batches, None)
            if batch is None or self._device.type != "cuda":
                return batch
            inputs, targets = batch
            return inputs.pin_memory(), targets.pin_memory()

        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(read)
            while (batch := reading.result()) is not None:
                reading = reader.submit(read)
                inputs, targets = batch
                yield inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def _as_graph(self, function: Callable[[Batch], Result], example: Batch) -> Callable[[Batch], Result]:
        """Returns the function, or a CUDA graph of it if the cell uses graphs."""
        if not self._uses_graphs:
            return function
        inputs, targets = example
        return captured(function, (inputs.to(self._device), targets.to(self._device)))

    def _accumulate(self, step: int, batches: Iterator[Batch], gradients: Callable[[Batch], list[Tensor]]) -> None:
        """Computes the gradient of a batch into the gradient of every slab."""
        sync_start = self._cell.config.pipeline.sync_start_steps
        for microbatch in range(self.num_microbatches):
            if microbatch == 0 or self._drifts:
                for slab in self._slabs:
                    version = (step * self.num_microbatches + microbatch - slab.ahead) // self.num_microbatches
                    lag = max(0, step - max(sync_start, version))
                    slab.load(slab.versions[-1 - lag])
            loss, *found = gradients(next(batches))
            self.losses[step] += loss
            for slab, gradient in zip(self._slabs, found, strict=True):
                if microbatch == 0:
                    slab.gradient.copy_(gradient)
                else:
                    slab.gradient.add_(gradient)

    def _gradients(self, batch: Batch) -> list[Tensor]:
        """Returns the contribution of a microbatch to the loss and to the gradient of every slab."""
        loss = self._loss(*batch) * (1 / self._components.batches.num_tokens(0))
        if self._drifts:
            for slab in self._slabs:
                slab.load(slab.versions[-1])
        gradients = iter(torch.autograd.grad(loss, [p for slab in self._slabs for p in slab.working]))
        return [loss.detach(), *(torch.cat([next(gradients).flatten() for _ in slab.working]) for slab in self._slabs)]

    @torch.no_grad()
    def _update(self, step: int, rate_factor: float, track_every: int) -> None:
        synchronous = step < self._cell.config.pipeline.sync_start_steps
        for state in self.groups:
            group, optimizer, slabs = state.group, state.optimizer, state.slabs
            for param_group, base in zip(optimizer.param_groups, state.base_rates, strict=True):
                param_group["lr"] = base * rate_factor
            _clip([slab.gradient for slab in slabs], group.clip_norm)
            decay = 1 - optimizer.param_groups[0]["lr"] * group.weight_decay
            for slab in slabs:
                if decay != 1:
                    slab.master.mul_(decay)
                slab.spare.copy_(slab.master)
            with torch.enable_grad():
                optimizer.step()
            if track_every:
                self._track(step, state, track_every)
            self._predict(state, synchronous)
            for slab in slabs:
                slab.add_version(slab.spare)

    def _track(self, step: int, state: GroupState, track_every: int) -> None:
        if step % track_every == 0 and state.previous is not None:
            current = [(slab.spare, slab.master) for slab in state.slabs]
            before = [(previous, torch.zeros_like(previous)) for previous in state.previous]
            state.products.append((step, update_products(current, before)))
        is_next = (step + 1) % track_every == 0
        state.previous = [slab.spare - slab.master for slab in state.slabs] if is_next else None

    def _predict(self, state: GroupState, synchronous: bool) -> None:
        """Computes x = z - lam d w into the spare of every slab."""
        is_late = not synchronous and any(slab.delay for slab in state.slabs)
        lam = state.group.error_feedback if is_late else 0.0
        if state.predictor is last_update or lam == 0:
            for slab in state.slabs:
                predict([slab.spare], [slab.master], lam * slab.delay)
            return
        updates = [slab.spare - slab.master for slab in state.slabs]
        for slab, expected in zip(state.slabs, state.predictor(updates, state.optimizer), strict=True):
            torch.sub(slab.master, expected, alpha=lam * slab.delay, out=slab.spare)

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Returns the held-out loss of the masters per token, as a tensor on the device."""
        return self._held_out(range(len(self._validation)))

    @torch.no_grad()
    def evaluate_sources(self) -> dict[str, float]:
        """Returns the held-out loss of each source, with evaluation.per_source."""
        parts = self._held_out_batches.parts
        if len(parts) == 1:
            return {}
        return {part.name: self._held_out(self._held_out_batches.indices(i)).item() for i, part in enumerate(parts)}

    def _held_out(self, indices: range) -> Tensor:
        for slab in self._slabs:
            slab.load(slab.master)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index in indices:
            total += self._held_out_loss(self._validation[index])
        return total / sum(map(self._held_out_batches.num_tokens, indices))

    @functools.cached_property
    def _held_out_loss(self) -> Callable[[Batch], Tensor]:
        loss = self._loss  # not self._loss in the lambda: a reference cycle would keep the run and its graph alive
        return self._as_graph(lambda batch: loss(*batch), self._validation[0])

    @property
    def _held_out_batches(self) -> ValidationBatches:
        assert self._components.validation is not None
        return self._components.validation

    @functools.cached_property
    def _validation(self) -> list[Batch]:
        """The held-out set on the device."""
        validation = self._held_out_batches
        found = map(validation, range(len(validation)))
        return [(inputs.to(self._device), targets.to(self._device)) for inputs, targets in found]


@torch.no_grad()
def _clip(gradients: list[Tensor], clip_norm: float | None) -> None:
    if clip_norm is None:
        return
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    scale = (clip_norm / (norm + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(scale)


class Network:
    """A model, whose parameters a run fills before every batch, and its loss function."""

    def __init__(self, model: nn.Sequential, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._parameters = dict(model.named_parameters())
        self.loss = loss
        self._rooms: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def fill(self, frozen: Mapping[str, Tensor]) -> None:
        """Sets the weights that no run changes."""
        for name, weight in frozen.items():
            self._parameters[name].copy_(weight)

    def lay_out(self, names: Sequence[str]) -> tuple[list[nn.Parameter], Tensor | None]:
        """Returns the parameters with these names and the flat tensor that holds them end to end. The same names always
        get the same tensor. If a parameter would not start at a multiple of 16 bytes, which compiled kernels expect,
        the tensor is None and the parameters stay where they are."""
        parameters = [self._parameters[name] for name in names]
        if any(p.numel() * p.element_size() % 16 for p in parameters):
            return parameters, None
        room = self._rooms.setdefault(tuple(names), torch.cat([p.detach().flatten() for p in parameters]))
        for parameter, view in zip(parameters, _views(room, [p.shape for p in parameters]), strict=True):
            parameter.data = view
        return parameters, room


@functools.cache
def _network(
    config: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    is_compiled: bool,
    loss_chunk_tokens: int,
    recomputed: tuple[str, ...],
) -> Network:
    """Returns a network. It is cached for the following cells, because compilation takes longer than a short run."""
    with on_meta():
        model, loss_of = config.layers_and_loss(loss_chunk_tokens)
    model.to(dtype).to_empty(device=device)
    config.initialise(model, seed=0)  # initialises the buffers and ties the tied weights
    if recomputed:
        model = Recomputing(OrderedDict(model.named_children()), recomputed)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(model(inputs), targets)

    return Network(model, torch.compile(loss) if is_compiled else loss)


def _masters(config: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, nn.Parameter]:
    model = config.meta_layers()
    model.to(dtype).to_empty(device=device)
    config.initialise(model, seed)
    return dict(model.named_parameters())


@torch.no_grad()
def _slab(
    masters: dict[str, nn.Parameter],
    network: Network,
    group: Group,
    delay: int,
    ahead: int,
    num_microbatches: int,
) -> Slab:
    """Creates a slab from masters and copies them end to end."""
    is_stacked = group.stacks and share_kernels(list(masters.values()))
    if is_stacked:
        masters = dict(sorted(masters.items(), key=lambda item: item[1].shape[-2:]))
    master = torch.cat([master.flatten() for master in masters.values()])
    gradient = torch.zeros_like(master)
    seen = [master.shape for master in masters.values()]
    if group.elementwise:
        seen = [master.shape]
    elif is_stacked:
        seen = _stacked(seen)
    parameters = [nn.Parameter(view) for view in _views(master, seen)]
    for parameter, view in zip(parameters, _views(gradient, seen), strict=True):
        parameter.grad = view
    working, room = network.lay_out(list(masters))
    max_lag = -(-ahead // num_microbatches)
    return Slab(
        names=list(masters),
        delay=delay,
        ahead=ahead,
        parameters=parameters,
        working=working,
        room=room,
        master=master,
        gradient=gradient,
        spare=torch.empty_like(master),
        versions=deque([master.to(working[0].dtype, copy=True)], maxlen=max_lag + 1),
    )


def _stacked(shapes: Sequence[torch.Size]) -> list[torch.Size]:
    """Returns the shapes of stacks of matrices: neighbouring matrices, or stacks, with the same last two dimensions
    become one stack."""
    kinds = itertools.groupby(shapes, key=lambda shape: shape[-2:])
    return [torch.Size((sum(shape.numel() for shape in alike) // kind.numel(), *kind)) for kind, alike in kinds]


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
