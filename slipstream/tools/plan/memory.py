"""Computes the memory of one stage of a pipeline before it exists.

    model = MemoryModel(config, model_of(config, 0))
    stage = Stage(num_stages=4, first_layer=0, num_layers=6, versions=2, delay=1, in_flight=4, ...)
    model.stage_memory(stage, microbatch_size=1).total

The layers of the stage are built on the meta device. The program's own code runs there: forward, backward, weight
versions and update, while `LiveBytes` counts. So both the memory that a stage keeps and its temporary memory are
measured with the code of a real run, and not computed by formulas. All blocks of a kind, dense or with experts, are
equal. So stages with many blocks are extrapolated from a few blocks, which gives the same result in less time. Experts
have equal loads here. Unequal loads move rows from one expert to another, but change neither the number of rows nor the
memory that is kept for them.

Some parts are added by rule, in agreement with the code in pipeline/ and transport/: copies of the weights
(weight_versions.py), a second gradient while an update overlaps the next batch (executor.py), the sums over stages and
replicas (reduction.py), the rounded masters of an evaluation (zero1.py) and messages in transit (process.py). The
result does not include the internal memory of kernels, the buffers that pack small tensors for the sums over replicas,
the CUDA context and the fragmentation of the allocator.

If replicas share the optimizer, the memory is that of the replica that keeps the most. The owners are computed by the
same function as in a run.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...config.defaults import precision_of
from ...config.models import recomputed_layers
from ...config.optimizers import parameter_groups
from ...config.schema import Config
from ...errors import UsageError
from ...model.spec import ModelSpec
from ...optim.groups import is_matrix
from ...optim.optimizer import stack_elements
from ...pipeline.executor import LOOKAHEAD
from ...pipeline.recompute import Recomputing
from ...pipeline.reduction import num_sums
from ...pipeline.update import Updater
from ...pipeline.weight_versions import WeightVersions
from ...precision import Precision
from .group_updates import GroupUpdates, Stepping, Update
from .live import Kernels, LiveBytes, fuse_kernels

Result = TypeVar("Result")


@dataclass(frozen=True)
class Stage:
    """The properties of a stage, apart from the model, on which its memory depends."""

    index: int
    num_stages: int
    first_layer: int
    """Index of the first layer, where the embedding is layer 0."""
    num_layers: int
    versions: int
    """Number of weight versions that the schedule keeps on this stage."""
    delay: int
    in_flight: float
    """Maximum number of microbatches whose activations are held at once, in units of a whole stage."""
    max_in_flight: float
    """The same on the stage with the most. Links keep that many messages."""
    background_update: bool
    """Whether the update of a batch runs while the next batch computes, as in two_bw."""
    flushes: bool
    """Whether no activations are held during the update."""
    num_replicas: int = 1
    """Number of replicas of the whole pipeline."""

    @property
    def drifts(self) -> bool:
        """Whether the only version is overwritten while microbatches are in flight, as in paci."""
        return self.versions == 1 and self.delay > 0


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage in bytes."""

    weights: int
    """All weight versions, masters, and the rotary tables."""
    gradients: int
    optimizer: int
    """Optimizer state and, in mixed precision, the sample of an update that is compared with the next one."""
    activations: int
    """Activations of all microbatches in flight, including the messages between stages that they hold."""
    messages: int
    """Receive buffers that wait for messages, and sent messages that are not yet released."""
    work: int
    """Temporary memory of a backward or of an update, whichever is larger."""
    overlap: int
    """The smaller of the two, if both can happen at the same time. This is rare, but will happen in a long run."""

    @property
    def total(self) -> int:
        """Expected peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.messages + self.work

    @property
    def most(self) -> int:
        """Upper bound of the peak, without the internal memory of kernels."""
        return self.total + self.overlap


@dataclass(frozen=True)
class Blocks:
    """Number of blocks of each kind in a stage, dense blocks first."""

    dense: int
    sparse: int
    """Number of blocks with experts."""

    @property
    def count(self) -> int:
        return self.dense + self.sparse

    def few(self, most: int) -> Blocks:
        return Blocks(min(self.dense, most), min(self.sparse, most))

    def times(self, count: int) -> Blocks:
        return Blocks(count * self.dense, count * self.sparse)


def blocks_of(model: ModelSpec, first_layer: int, num_layers: int) -> Blocks:
    """Returns the blocks among consecutive layers, where the embedding is layer 0."""
    num_dense = model.num_layers - model.num_sparse_layers
    first, last = max(first_layer, 1), min(first_layer + num_layers, model.num_layers + 1)
    dense = max(0, min(last, num_dense + 1) - first)
    return Blocks(dense, max(0, last - first) - dense)


@dataclass(frozen=True)
class Passes:
    """Memory of one microbatch that passes through the layers of a stage."""

    parameters: int
    """Number of values in all parameters. The other fields are bytes."""
    working: int
    """Size of one working copy. Some parameters may keep their own dtype."""
    buffers: int
    activations: int
    """Memory that is held between forward and backward."""
    forward_work: int
    """Peak of a forward, above the memory that remains after it."""
    backward_work: int
    """Peak of a backward that adds to existing gradients, above the memory at its start."""


@dataclass(frozen=True)
class MemoryModel:
    """Computes the memory of stages. It caches its measurements, because a plan needs the same few many times."""

    config: Config
    model: ModelSpec
    kernels: Kernels = "cpu"
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def dtypes(self) -> Precision:
        return precision_of(self.config)

    def stage_memory(self, stage: Stage, microbatch_size: int) -> StageMemory:
        has_embedding, blocks, has_head = self._layers(stage)
        dtypes = self.dtypes
        passes = self.passes(has_embedding, blocks, has_head, microbatch_size, self._recomputed(stage))
        stepping = self._stepping(stage)
        num_owners = stage.num_replicas if self.config.optimizer.sharded else 1
        update = self.update(has_embedding, blocks, has_head, stepping, num_owners)
        activations = round(stage.in_flight * passes.activations)
        owned = passes.parameters if update.owned is None else update.owned
        masters = owned * dtypes.master.itemsize if stepping.separate else 0
        gradients = passes.parameters * dtypes.gradient.itemsize
        tied, norm = self._reduction(stage, has_embedding, blocks, has_head)
        replicas, summed = self._replicas(stage, passes.parameters, owned)
        reduction_held = max(replicas, summed + tied)
        compute_work = max(passes.forward_work, passes.backward_work)
        update_work = summed + max(update.work, replicas, tied + norm)
        if stage.background_update:
            # The stage waits for gradients of other replicas, or of the stage with the tied weight, while it computes
            # the next microbatches.
            work, overlap = max(compute_work + reduction_held, update_work), min(compute_work, update_work)
            # The sums over stages: a vector, and the tensors from which it is concatenated.
            overlap += 2 * 8 * num_sums(len(parameter_groups(self.config)))
        else:  # the update runs between two microbatches: the activations of the last one, or of all, are freed
            freed = activations if stage.flushes else passes.activations
            work, overlap = max(compute_work, update_work - freed), 0
        # No update runs during an evaluation, but a sum may be in progress.
        evaluated = self._evaluated(stepping, num_owners, passes, owned)
        waited = reduction_held if stage.background_update else 0
        most = work + overlap
        work = max(work, compute_work + waited + evaluated)
        return StageMemory(
            weights=stage.versions * passes.working + masters + passes.buffers,
            gradients=gradients * (2 if stage.background_update else 1),
            optimizer=update.optimizer,
            activations=activations,
            messages=self._messages(stage, microbatch_size),
            work=work,
            overlap=max(0, most - work),
        )

    def fully_sharded(self, num_devices: int, microbatch_size: int) -> StageMemory:
        """Returns the memory of a device under FSDP (fsdp.py). Each device has its part of everything, and two whole
        layers: the one that computes and the next."""
        stage = Stage(0, 1, 0, self.model.num_layers + 2, 1, 0, 1.0, 1.0, background_update=False, flushes=True)
        layers, dtypes = self._layers(stage), self.dtypes
        passes = self.passes(*layers, microbatch_size, self._recomputed(stage))
        update = self.update(*layers, self._stepping(stage))
        block = self.passes(False, blocks_of(self.model, self.model.num_layers, 1), False, 1).parameters
        gathered = 2 * max(block, self.model.vocab_size * self.model.dim) * dtypes.compute.itemsize
        return StageMemory(
            weights=passes.parameters * dtypes.master.itemsize // num_devices + passes.buffers + gathered,
            gradients=passes.parameters * dtypes.gradient.itemsize // num_devices + gathered,
            optimizer=update.optimizer // num_devices,
            activations=passes.activations,
            messages=0,
            work=max(passes.forward_work, passes.backward_work, update.work // num_devices),
            overlap=0,
        )

    def owned_share(self, layers: tuple[int, ...], index: int, num_replicas: int) -> float:
        """Returns the largest share of a stage's values that one replica steps."""
        if not self.config.optimizer.sharded or num_replicas == 1:
            return 1.0
        first, num_layers = sum(layers[:index]), layers[index]
        stage = index == 0, blocks_of(self.model, first, num_layers), index == len(layers) - 1
        return self._group_updates().owned_share(_counts(*stage), num_replicas)

    def _layers(self, stage: Stage) -> tuple[bool, Blocks, bool]:
        has_embedding = stage.first_layer == 0
        has_head = stage.first_layer + stage.num_layers == self.model.num_layers + 2
        return has_embedding, blocks_of(self.model, stage.first_layer, stage.num_layers), has_head

    def _recomputed(self, stage: Stage) -> tuple[bool, ...]:
        """Returns for every block of the stage whether it is recomputed."""
        names = self.model.layer_names[stage.first_layer : stage.first_layer + stage.num_layers]
        recomputed = recomputed_layers(self.config, self.model)
        return tuple(name in recomputed for name in names if name not in ("embedding", "head"))

    def _stepping(self, stage: Stage) -> Stepping:
        """Returns the properties of the updates, as Pipeline decides them."""
        error_feedback = 0.0 if stage.drifts else self.config.optimizer.error_feedback
        predicts = error_feedback != 0 and stage.delay > 0 and stage.versions > 1
        compares = self.config.train.track_alignment and stage.versions == 2
        separate = self.dtypes.is_mixed or predicts or compares
        return Stepping(separate, predicts, stage.background_update, error_feedback)

    def _evaluated(self, stepping: Stepping, num_owners: int, passes: Passes, owned: int) -> int:
        """Returns the bytes of the copy of the masters that Executor makes for an evaluation, in the dtype of the
        working copies. It needs the copy if working copies run ahead and no module holds all masters. An owned master
        that already has this dtype is not copied."""
        if not stepping.predicts or not self.config.evaluation.batches:
            return 0
        if self.dtypes.is_mixed:
            return passes.working
        return (passes.parameters - owned) * self.dtypes.compute.itemsize if num_owners > 1 else 0

    def _replicas(self, stage: Stage, parameters: int, owned: int) -> tuple[int, int]:
        """Returns two numbers for sums over replicas in another dtype than that of the gradients: the bytes that
        Reducer.reduce holds while it waits, and the bytes that it leaves in addition to the gradients that it received.
        The background holds those gradients until the update has ended."""
        dtypes = self.dtypes
        if stage.num_replicas == 1 or dtypes.reduction == dtypes.gradient:
            return 0, 0
        return parameters * dtypes.reduction.itemsize, owned * dtypes.gradient.itemsize * stage.background_update

    def _reduction(self, stage: Stage, has_embedding: bool, blocks: Blocks, has_head: bool) -> tuple[int, int]:
        """Returns two numbers: the bytes that Reducer.reduce holds while it waits for other stages, and its temporary
        memory after that. The first is a copy of a tied gradient and space for the copies of both stages. The second
        is, on a CPU, the largest gradient in float64, for its norm."""
        bytes_each = self.dtypes.gradient.itemsize
        is_tied = self.model.tied_embeddings and stage.num_stages > 1 and (has_embedding or has_head)
        tied = 3 * self.model.vocab_size * self.model.dim * bytes_each if is_tied else 0
        rows = [self.model.dim, *([self.model.widest(blocks.sparse > 0)] if blocks.count else [])]
        if has_embedding or has_head:
            rows.append(self.model.vocab_size)
        has_copy = self.kernels == "cpu" and bytes_each < 8  # see norm_dtype
        return tied, 8 * self.model.dim * max(rows) if has_copy else 0

    def _messages(self, stage: Stage, microbatch_size: int) -> int:
        """Returns the bytes of messages as ProcessLink keeps them, between processes and machines. Receives are posted
        up to LOOKAHEAD actions ahead, half of them for forwards. A sent message is released after max_under_way later
        sends. Messages of the forward are outputs, which the microbatches in flight hold anyway."""
        num_evaluations = self.config.evaluation.batches
        under_way = stage.max_in_flight + num_evaluations
        posted = -(-(LOOKAHEAD + 1) // 2)
        message = microbatch_size * self.model.sequence_length * self.model.dim * self.dtypes.compute.itemsize
        num_messages = 0.0
        if stage.index > 0:
            num_messages += posted + under_way  # activations in, gradients out
        if stage.index < stage.num_stages - 1:
            num_messages += posted + max(0.0, under_way - stage.in_flight)  # gradients in, activations out
        return round(num_messages * message)

    # ---- the dry runs

    def passes(
        self,
        has_embedding: bool,
        blocks: Blocks,
        has_head: bool,
        microbatch_size: int,
        recomputed: tuple[bool, ...] = (),
    ) -> Passes:
        """Returns the memory of a microbatch. recomputed: for every block, whether it is recomputed. Empty means
        none."""
        recomputed = recomputed or (False,) * blocks.count
        # A backward starts with the last blocks, when most memory is held. This many blocks include one that is
        # recomputed.
        few = max(2, self.config.train.recompute_every)
        kinds = {Blocks(1, 0): recomputed[: blocks.dense], Blocks(0, 1): recomputed[blocks.dense :]}
        played = blocks.few(few)
        late = tuple(again for flags in kinds.values() for again in flags[-few:])
        key = ("passes", has_embedding, played, late, has_head, microbatch_size, self.config.train.loss_chunk_tokens)
        if key not in self._known:
            self._known[key] = self._play_passes(has_embedding, played, has_head, microbatch_size, late)
        result: Passes = self._known[key]
        for kind, flags in kinds.items():
            for again, more in sorted(Counter(flags[:-few]).items()):
                one, two = (
                    self.passes(False, kind.times(count), False, microbatch_size, (again,) * count) for count in (1, 2)
                )
                result = replace(
                    result,
                    parameters=result.parameters + more * (two.parameters - one.parameters),
                    working=result.working + more * (two.working - one.working),
                    buffers=result.buffers + more * (two.buffers - one.buffers),
                    activations=result.activations + more * (two.activations - one.activations),
                )
        return result

    def update(
        self, has_embedding: bool, blocks: Blocks, has_head: bool, stepping: Stepping, num_owners: int = 1
    ) -> Update:
        """Returns the memory of an update. num_owners: the number of replicas that share the optimizer."""
        dtypes = self.dtypes
        if dtypes.is_mixed or dtypes.gradient != dtypes.master or num_owners > 1:
            layers = _counts(has_embedding, blocks, has_head)
            return self._steppable(lambda: self._group_updates().update(layers, stepping, num_owners))
        return self._update_by_layer(has_embedding, blocks, has_head, stepping.separate)

    def _update_by_layer(self, has_embedding: bool, blocks: Blocks, has_head: bool, separate: bool) -> Update:
        """Measures the parts of a stage separately. This is possible because parameters are updated one at a time, or
        one stack at a time."""
        if has_embedding and has_head and self.model.tied_embeddings:
            return self._update(True, blocks, True, separate)
        few = blocks.few(self._blocks_of_a_stack())
        parts = []
        if blocks.count:
            parts.append(self._update(False, few, False, separate))
        for kind, more in ((Blocks(1, 0), blocks.dense - few.dense), (Blocks(0, 1), blocks.sparse - few.sparse)):
            if more:
                one = self._update(False, kind, False, separate)
                parts.append(replace(one, optimizer=more * one.optimizer))
        if has_embedding:
            parts.append(self._update(True, Blocks(0, 0), False, separate))
        if has_head:
            parts.append(self._update(False, Blocks(0, 0), True, separate))
        return Update(sum(part.optimizer for part in parts), max(part.work for part in parts))

    def _update(self, has_embedding: bool, blocks: Blocks, has_head: bool, separate: bool) -> Update:
        key = ("update", has_embedding, blocks, has_head, separate)
        if key not in self._known:
            self._known[key] = self._steppable(lambda: self._play_update(has_embedding, blocks, has_head, separate))
        result: Update = self._known[key]
        return result

    def _steppable(self, play: Callable[[], Result]) -> Result:
        try:
            return play()
        except Exception as error:  # any optimizer may be configured, and some read the values of tensors
            name = self.config.optimizer.name
            raise UsageError(
                f"optimizer.name = {name!r} cannot step where tensors have no numbers ({error}), so its memory "
                "cannot be counted: plan with muon or adamw"
            ) from error

    def _group_updates(self) -> GroupUpdates:
        if "group updates" not in self._known:
            few = self._blocks_of_a_stack() if self.config.optimizer.name in ("muon", "adamw") else None
            self._known["group updates"] = GroupUpdates(self.config, self.model, self._build_counts, few)
        updates: GroupUpdates = self._known["group updates"]
        return updates

    def _blocks_of_a_stack(self) -> int:
        """Returns the number of blocks from which an update needs no more work space. Muon orthogonalises equal
        matrices together, up to a number of elements. Other optimizers may use temporaries as large as all their
        parameters."""
        if self.config.optimizer.name == "adamw":
            return 1
        if self.config.optimizer.name != "muon":
            return self.model.num_layers
        if "stack" not in self._known:
            self._known["stack"] = self._count_blocks_of_a_stack()
        blocks: int = self._known["stack"]
        return blocks

    def _count_blocks_of_a_stack(self) -> int:
        every_kind = blocks_of(self.model, 0, self.model.num_layers + 2).few(1)
        kinds = [kind for kind in (Blocks(every_kind.dense, 0), Blocks(0, every_kind.sparse)) if kind.count]
        return max(map(self._count_blocks_of_a_kind, kinds))

    def _count_blocks_of_a_kind(self, kind: Blocks) -> int:
        counts: dict[int, int] = {}
        for name, parameter in self._build(False, kind, False)[0].named_parameters():
            counts[parameter.numel()] = counts.get(parameter.numel(), 0) + is_matrix(name, parameter)
        most = stack_elements(getattr(torch, self.config.optimizer.newton_schulz_dtype or "float32"))
        stacks = {size: max(1, most // size) for size, count in counts.items() if count}
        size = max(stacks, key=lambda size: size * stacks[size])
        return -(-stacks[size] // counts[size])

    def _play_passes(
        self,
        has_embedding: bool,
        blocks: Blocks,
        has_head: bool,
        microbatch_size: int,
        recomputed: tuple[bool, ...],
    ) -> Passes:
        module, loss = self._build(has_embedding, blocks, has_head)
        if any(recomputed):
            names = [f"block{i}" for i, again in enumerate(recomputed) if again]
            module = Recomputing(OrderedDict(module.named_children()), names)
        versions = WeightVersions(module, 1, dtype=self.dtypes.compute, gradient_dtype=self.dtypes.gradient)
        ids = torch.empty(microbatch_size, self.model.sequence_length, dtype=torch.int64, device="meta")

        def forward() -> tuple[Tensor, Tensor]:
            inputs = ids.clone()
            if not has_embedding:
                shape, dtype = (*ids.shape, self.model.dim), self.dtypes.compute
                inputs = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            outputs = module(inputs)
            if has_head:
                outputs = loss(outputs, ids.clone()) * 1.0
            return inputs, outputs

        live = LiveBytes()
        fuse_kernels(module, self.kernels)
        with live.watch():
            _, outputs = forward()
            torch.autograd.backward([outputs], [torch.empty_like(outputs)])
            del _, outputs
            before = live.now
            live.restart_peak()
            inputs, outputs = forward()
            activations = live.now - before
            forward_work = live.peak - live.now
            gradient = None if has_head else torch.empty_like(outputs)
            start = live.now
            live.restart_peak()
            torch.autograd.backward([outputs], [gradient])
            backward_work = live.peak - start
        del inputs
        return Passes(
            parameters=sum(parameter.numel() for parameter in versions.parameters(0).values()),
            working=_bytes(versions.parameters(0).values()),
            buffers=_bytes(module.buffers()),
            activations=activations,
            forward_work=forward_work,
            backward_work=backward_work,
        )

    def _play_update(self, has_embedding: bool, blocks: Blocks, has_head: bool, separate: bool) -> Update:
        module, _ = self._build(has_embedding, blocks, has_head)
        kept = WeightVersions(module, 2 if separate else 1, separate_masters=separate)
        groups = parameter_groups(self.config)
        updater = Updater(kept, groups, {}, lambda step: 1.0, self.config.train.track_alignment, torch.device("meta"))
        live = LiveBytes()
        work = 0
        with live.watch():
            for step in range(3):  # the first step creates the optimizer state, the third compares two updates
                gradients = {name: torch.empty_like(master) for name, master in kept.masters.items()}
                start = live.now
                live.restart_peak()
                updater.apply(step, gradients, [0.5] * len(groups), horizon=int(separate))
                kept.close_next()
                if step > 0:
                    work = live.peak - start
        states = (state for optimizer in updater.optimizers if optimizer for state in optimizer.state.values())
        return Update(
            optimizer=_bytes(value for state in states for value in state.values() if isinstance(value, Tensor)),
            work=work,
        )

    def _build(
        self, has_embedding: bool, blocks: Blocks, has_head: bool
    ) -> tuple[nn.Sequential, Callable[[Any, Tensor], Tensor]]:
        num_dense = blocks.dense if self.model.num_experts else 0
        small = self.model.resized(max(1, blocks.count), num_dense)
        with torch.device("meta"):
            whole, loss = small.layers_and_loss(self.config.train.loss_chunk_tokens)
            whole.to(self.dtypes.master)
        first = 0 if has_embedding else 1 if blocks.count else 2
        last = len(whole) if has_head else len(whole) - 1 if blocks.count else 1
        return nn.Sequential(OrderedDict(list(whole.named_children())[first:last])), loss

    def _build_counts(self, embedding: int, dense: int, sparse: int, head: int) -> nn.Sequential:
        return self._build(bool(embedding), Blocks(dense, sparse), bool(head))[0]


def _counts(has_embedding: bool, blocks: Blocks, has_head: bool) -> tuple[int, int, int, int]:
    return int(has_embedding), blocks.dense, blocks.sparse, int(has_head)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the distinct storages."""
    storages = {id(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
