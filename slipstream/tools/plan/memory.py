"""Computes the memory of one stage of a pipeline before it exists.

    model = MemoryModel(config, model_of(config, 0))
    stage = Stage(num_stages=4, first_layer=0, num_layers=6, versions=2, delay=1, in_flight=4, ...)
    model.stage_memory(stage, microbatch_size=1).total

The layers of the stage are built on the meta device. The program's own code runs there: forward, backward, weight
versions and update, while `LiveBytes` counts. So both the memory that a stage keeps and its temporary memory are
measured with the code of a real run, and not computed by formulas. All blocks of a kind, dense or with experts, are
equal, so only a few are run, and every further block adds what the last one added. Experts have equal loads here.
Unequal loads move rows from one expert to another, but change neither the number of rows nor the memory that is kept
for them.

Some parts are added by rule, in agreement with the code in pipeline/ and transport/: copies of the weights
(weight_versions.py), a second gradient while an update overlaps the next batch (executor.py), the sums over stages and
replicas (reduction.py), the rounded masters of an evaluation (zero1.py) and messages in transit (process.py). The
result does not include the internal memory of kernels, the buffers that pack small tensors for the sums over replicas,
the CUDA context and the fragmentation of the allocator.

If replicas share the optimizer, the memory is that of the replica that keeps the most. The owners are computed by the
same function as in a run, and the temporary memory is that of an update of as many blocks as the replica owns.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ...config.defaults import precision_of
from ...config.models import recomputed_layers
from ...config.optimizers import parameter_groups
from ...config.schema import Config
from ...errors import UsageError
from ...model.spec import Loss, ModelSpec, on_meta
from ...optim.groups import assign, is_matrix
from ...optim.optimizer import stack_elements
from ...pipeline.executor import LOOKAHEAD
from ...pipeline.partition import Tied
from ...pipeline.recompute import Recomputing
from ...pipeline.reduction import num_sums
from ...pipeline.update import Updater
from ...pipeline.weight_versions import Masters, WeightVersions, weight_layout
from ...pipeline.zero1 import assign_owners
from ...precision import Precision
from ...schedule import TRAITS
from .live import Kernels, LiveBytes, fuse_kernels
from .stage import (
    Layers,
    Passes,
    Stage,
    StageMemory,
    Stepping,
    Update,
    dense_blocks,
    layers_of,
    sparse_blocks,
)

Method = TypeVar("Method", bound=Callable[..., Any])
Memory = TypeVar("Memory", Passes, Update)
ENDS = ("embedding.weight", "head.output.weight")
"""Names of the weights that are one weight if embeddings are tied."""
GROWING = ("optimizer", "work", "values")
"""Fields of an Update that grow with the number of blocks."""


def once(method: Method) -> Method:
    """Caches the results of a method, because a plan needs the same few many times."""

    @wraps(method)
    def cached(self: MemoryModel, *arguments: Any) -> Any:
        key = (method.__name__, arguments)
        if key not in self.known:
            self.known[key] = method(self, *arguments)
        return self.known[key]

    return cast(Method, cached)


@dataclass(frozen=True)
class MemoryModel:
    """Computes the memory of stages."""

    config: Config
    model: ModelSpec
    kernels: Kernels = "cpu"
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Cached results. Models whose configurations differ only in what saves memory (savings.py) may share them."""

    @property
    def dtypes(self) -> Precision:
        return precision_of(self.config)

    def stage_memory(self, stage: Stage, microbatch_size: int) -> StageMemory:
        layers, dtypes = layers_of(self.model, stage.first_layer, stage.num_layers), self.dtypes
        has_slack = stage.traits.has_slack  # the update of a batch runs while the next batch computes
        passes = self.passes(layers, microbatch_size, self._recomputed(stage))
        stepping = self._stepping(stage)
        num_owners = stage.num_replicas if self.config.optimizer.sharded else 1
        update = self.update(layers, stepping, num_owners)
        activations = round(stage.in_flight * passes.activations)
        owned = update.values
        masters = owned * dtypes.master.itemsize if stepping.separate else 0
        tied, norm = self._reduction(stage, layers)
        replicas, summed = self._replicas(stage, passes.parameters, owned)
        compute_work = max(passes.forward_work, passes.backward_work)
        update_work = summed + max(update.work, replicas, tied + norm)
        if has_slack:
            # The stage waits for gradients of other replicas, or of the stage with the tied weight, while it computes
            # the next microbatches.
            waited = max(replicas, summed + tied)
            work, overlap = max(compute_work + waited, update_work), min(compute_work, update_work)
            # The sums over stages: a vector, and the tensors from which it is concatenated.
            overlap += 2 * 8 * num_sums(len(parameter_groups(self.config)))
        else:  # the update runs between two microbatches: the activations of the last one, or of all, are freed
            freed = activations if stage.traits.flushes else passes.activations
            waited, work, overlap = 0, max(compute_work, update_work - freed), 0
        # No update runs during an evaluation, but a sum may be in progress.
        evaluated = self._evaluated(stepping, num_owners, passes, owned)
        most = work + overlap
        work = max(work, compute_work + waited + evaluated)
        return StageMemory(
            weights=stage.versions * passes.working
            + passes.frozen * dtypes.compute.itemsize
            + masters
            + passes.buffers,
            gradients=passes.parameters * dtypes.gradient.itemsize * (2 if has_slack else 1),
            optimizer=update.optimizer,
            activations=activations,
            messages=self._messages(stage, microbatch_size),
            work=work,
            overlap=max(0, most - work),
        )

    def fully_sharded(self, num_devices: int, microbatch_size: int) -> StageMemory:
        """Returns the memory of a device under FSDP (fsdp.py). Each device has its part of everything, and two whole
        layers: the one that computes and the next."""
        stage = Stage(0, 1, 0, self.model.num_layers + 2, 1, 0, 1.0, 1.0, TRAITS["one_f_one_b"])
        layers, dtypes = layers_of(self.model, 0, stage.num_layers), self.dtypes
        passes = self.passes(layers, microbatch_size, self._recomputed(stage))
        update = self.update(layers, self._stepping(stage))
        block = self.passes(layers_of(self.model, self.model.num_layers, 1), 1)
        gathered = (
            2 * max(block.parameters + block.frozen, self.model.vocab_size * self.model.dim) * dtypes.compute.itemsize
        )
        return StageMemory(
            weights=(passes.parameters * dtypes.master.itemsize + passes.frozen * dtypes.compute.itemsize)
            // num_devices
            + passes.buffers
            + gathered,
            gradients=passes.parameters * dtypes.gradient.itemsize // num_devices + gathered,
            optimizer=update.optimizer // num_devices,
            activations=passes.activations,
            messages=0,
            work=max(passes.forward_work, passes.backward_work, update.work // num_devices),
            overlap=0,
        )

    def owned_share(self, layers: Layers, num_replicas: int) -> float:
        """Returns the largest share of a stage's values that one replica steps."""
        if not self.config.optimizer.sharded or num_replicas == 1:
            return 1.0
        values = [sum(share) for share in self._shares(layers, num_replicas)]
        return max(values) / sum(values) if any(values) else 1.0

    def _recomputed(self, stage: Stage) -> tuple[bool, ...]:
        """Returns for every block of the stage whether it is recomputed."""
        names = self.model.layer_names[stage.first_layer : stage.first_layer + stage.num_layers]
        recomputed = recomputed_layers(self.config, self.model)
        return tuple(name in recomputed for name in names if name not in ("embedding", "head"))

    def _stepping(self, stage: Stage) -> Stepping:
        """Returns the properties of the updates."""
        drifts = stage.traits.drifts and stage.delay > 0
        error_feedback = 0.0 if drifts else self.config.optimizer.error_feedback
        layout = weight_layout(
            stage.versions,
            stage.delay,
            corrects=error_feedback != 0,
            compares=self.config.train.track_alignment,
            is_mixed=self.dtypes.is_mixed,
        )
        is_separate = layout.masters is Masters.SEPARATE
        return Stepping(is_separate, layout.predicts, stage.traits.has_slack, error_feedback)

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
        return parameters * dtypes.reduction.itemsize, owned * dtypes.gradient.itemsize * stage.traits.has_slack

    def _reduction(self, stage: Stage, layers: Layers) -> tuple[int, int]:
        """Returns two numbers: the bytes that Reducer.reduce holds while it waits for other stages, and its temporary
        memory after that. The first is a copy of a tied gradient and space for the copies of both stages. The second
        is, on a CPU, the largest gradient in float64, for its norm."""
        bytes_each = self.dtypes.gradient.itemsize
        is_tied = self.model.steps_tied_weights and stage.num_stages > 1 and (layers.embedding or layers.head)
        tied = 3 * self.model.vocab_size * self.model.dim * bytes_each if is_tied else 0
        has_copy = self.kernels == "cpu" and bytes_each < 8  # see norm_dtype
        return tied, 8 * self._largest(layers.few(1)) if has_copy else 0

    @once
    def _largest(self, layers: Layers) -> int:
        """Returns the number of values in the largest parameter that is trained."""
        parameters = self._build(layers)[0].parameters()
        return max((parameter.numel() for parameter in parameters if parameter.requires_grad), default=0)

    def _messages(self, stage: Stage, microbatch_size: int) -> int:
        """Returns the bytes of messages as ProcessLink keeps them, between processes and machines. Receives are posted
        up to LOOKAHEAD actions ahead, half of them for forwards. A sent message is released after max_under_way later
        sends. Messages of the forward are outputs, which the microbatches in flight hold anyway."""
        num_evaluations = self.config.evaluation.batches
        under_way = stage.max_in_flight + num_evaluations
        posted = -(-(LOOKAHEAD + 1) // 2)
        num_messages = 0.0
        if stage.index > 0:
            num_messages += posted + under_way  # activations in, gradients out
        if stage.index < stage.num_stages - 1:
            num_messages += posted + max(0.0, under_way - stage.in_flight)  # gradients in, activations out
        return round(num_messages * self.message(microbatch_size))

    def message(self, microbatch_size: int) -> int:
        """Returns the bytes that a stage sends to the next for one microbatch."""
        return microbatch_size * self.model.sequence_length * self.model.dim * self.dtypes.compute.itemsize

    # ---- from a few blocks to many

    def passes(self, layers: Layers, microbatch_size: int, recomputed: tuple[bool, ...] = ()) -> Passes:
        """Returns the memory of a microbatch. recomputed: for every block, whether it is recomputed. Empty means
        none."""
        recomputed = recomputed or (False,) * layers.blocks
        # A backward starts with the last blocks, when most memory is held. This many blocks include one that is
        # recomputed.
        few = max(2, self.config.train.recompute_every)
        kinds = ((dense_blocks, recomputed[: layers.dense]), (sparse_blocks, recomputed[layers.dense :]))
        late, chunk = tuple(again for _, flags in kinds for again in flags[-few:]), self.config.train.loss_chunk_tokens
        result = self._play_passes(layers.few(few), microbatch_size, late, chunk)
        for blocks, flags in kinds:
            for again, more in Counter(flags[:-few]).items():
                one, two = (self._play_passes(blocks(n), microbatch_size, (again,) * n, chunk) for n in (1, 2))
                grown = ("parameters", "frozen", "working", "buffers", "activations")
                result = _with_more(result, more, one, two, grown)
        return result

    def update(self, layers: Layers, stepping: Stepping, num_owners: int = 1) -> Update:
        """Returns the memory of an update. num_owners: the number of replicas that share the optimizer. Of these it is
        the replica that keeps the most. Its work is that of an update of its share of the blocks."""
        if num_owners > 1:
            each = self.update(layers, stepping).bytes_by_group
            shares = self._shares(layers, num_owners)
            kept = [sum(n * size for n, size in zip(share, each, strict=True)) for share in shares]
            masters = [sum(share) * self.dtypes.master.itemsize * stepping.separate for share in shares]
            largest = max(range(num_owners), key=lambda owner: kept[owner] + masters[owner])
            values = sum(shares[largest])
            part = layers.part(values / max(1, sum(map(sum, shares))))
            return replace(self.update(part, stepping), optimizer=round(kept[largest]), values=values)
        _, few = self._blocks_of_a_stack()
        played = layers.few(few + 1)
        result = self._update_of_few(played, stepping)
        unplayed = (dense_blocks, layers.dense - played.dense), (sparse_blocks, layers.sparse - played.sparse)
        for blocks, more in unplayed:
            if more:
                before, after = (self._update_of_few(blocks(n), stepping) for n in (few, few + 1))
                result = _with_more(result, more, before, after, GROWING)
        return result

    @once
    def _update_of_few(self, layers: Layers, stepping: Stepping) -> Update:
        """Returns the memory of an update of layers that are all counted. Small matrices, such as those of adapters,
        fill no stack even in a large model, and to play all of its blocks takes long. As long as no stack is full, the
        memory of n blocks is the largest of several straight lines. If it is on one line for 2, 3 and the most blocks,
        it is on that line for all numbers between."""
        if layers.blocks:  # ends without parameters to train add nothing
            embedding = layers.embedding and self._largest(Layers(True, 0, 0, False)) > 0
            head = layers.head and self._largest(Layers(False, 0, 0, True)) > 0
            layers = replace(layers, embedding=embedding, head=head)
        blocks = sparse_blocks if layers.sparse else dense_blocks
        most, _ = self._blocks_of_a_stack()
        if layers == blocks(layers.blocks) and 3 < layers.blocks < most:
            two, three, last = (self._played_update(blocks(n), stepping) for n in (2, 3, most))
            if _with_more(two, most - 2, two, three, GROWING) == last:
                return _with_more(two, layers.blocks - 2, two, three, GROWING)
        return self._played_update(layers, stepping)

    @once
    def _shares(self, layers: Layers, num_owners: int) -> list[list[int]]:
        """Returns for every replica the number of values that it owns in each parameter group."""
        groups = parameter_groups(self.config)
        parameters = {name: p for name, p in self._build(layers)[0].named_parameters() if p.requires_grad}
        assigned = enumerate(assign(parameters.items(), groups))
        group_of = {name: index for index, (_, members) in assigned for name, _ in members}
        is_tied = self.model.steps_tied_weights and layers.embedding != layers.head
        tied = {name: Tied(ENDS[0], (0, 1)) for name in ENDS if is_tied and name in parameters}
        elementwise = {name: groups[index].elementwise for name, index in group_of.items()}
        shares = [[0] * len(groups) for _ in range(num_owners)]
        for name, owner in assign_owners(parameters, elementwise, tied, num_owners).items():
            shares[owner][group_of[name]] += parameters[name].numel()
        return shares

    @once
    def _blocks_of_a_stack(self) -> tuple[int, int]:
        """Returns the number of blocks up to which no stack of matrices is full, and that from which an update needs no
        more work space. Muon orthogonalises equal matrices together, up to a number of elements. Other optimizers may
        use temporaries as large as all their parameters."""
        if self.config.optimizer.name == "adamw":
            return 0, 1
        if self.config.optimizer.name != "muon":
            return 0, self.model.num_layers
        most = stack_elements(getattr(torch, self.config.optimizer.newton_schulz_dtype or "float32"))
        every = layers_of(self.model, 0, self.model.num_layers + 2).few(1)
        room, needed = [self.model.num_layers], []
        for blocks in (dense_blocks(every.dense), sparse_blocks(every.sparse)):
            counts = Counter[int]()
            for name, parameter in self._build(blocks)[0].named_parameters() if blocks.blocks else ():
                counts[parameter.numel()] += parameter.requires_grad and is_matrix(name, parameter)
            stacks = {size: max(1, most // size) for size, count in counts.items() if count}
            size = max(stacks, key=lambda size: size * stacks[size], default=0)
            needed += [-(-stacks[size] // counts[size])] if size else []
            room += [stack // counts[size] for size, stack in stacks.items()]
        return min(room), max(needed, default=1)

    # ---- the dry runs

    @once
    def _play_passes(
        self, layers: Layers, microbatch_size: int, recomputed: tuple[bool, ...], loss_chunk_tokens: int
    ) -> Passes:
        module, loss = self._build(layers, loss_chunk_tokens)
        if any(recomputed):
            names = [f"block{i}" for i, again in enumerate(recomputed) if again]
            module = Recomputing(OrderedDict(module.named_children()), names)
        layout = weight_layout(1, is_mixed=self.dtypes.is_mixed)
        versions = WeightVersions(module, layout, dtype=self.dtypes.compute, gradient_dtype=self.dtypes.gradient)
        ids = torch.empty(microbatch_size, self.model.sequence_length, dtype=torch.int64, device="meta")

        def forward() -> tuple[Tensor, Tensor]:
            inputs = ids.clone()
            if not layers.embedding:
                shape, dtype = (*ids.shape, self.model.dim), self.dtypes.compute
                inputs = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            outputs = module(inputs)
            if layers.head:
                outputs = loss(outputs, ids.clone()) * 1.0
            return inputs, outputs

        live = LiveBytes()
        fuse_kernels(module, self.kernels)
        with live.watch():
            _, outputs = forward()
            if is_trained := outputs.requires_grad:
                torch.autograd.backward([outputs], [torch.empty_like(outputs)])
            del _, outputs
            before = live.now
            live.restart_peak()
            inputs, outputs = forward()
            activations = live.now - before
            forward_work = live.peak - live.now
            gradient = None if layers.head else torch.empty_like(outputs)
            start = live.now
            live.restart_peak()
            if is_trained:
                torch.autograd.backward([outputs], [gradient])
            backward_work = live.peak - start
        del inputs
        return Passes(
            parameters=sum(parameter.numel() for parameter in versions.parameters(0).values()),
            frozen=sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad),
            working=_bytes(versions.parameters(0).values()),
            buffers=_bytes(module.buffers()),
            activations=activations,
            forward_work=forward_work,
            backward_work=backward_work,
        )

    @once
    def _played_update(self, layers: Layers, stepping: Stepping) -> Update:
        try:
            return self._play_update(layers, stepping)
        except Exception as error:  # any optimizer may be configured, and some read the values of tensors
            name = self.config.optimizer.name
            raise UsageError(
                f"optimizer.name = {name!r} cannot step where tensors have no numbers ({error}), so its memory "
                "cannot be counted: plan with muon or adamw"
            ) from error

    def _play_update(self, layers: Layers, stepping: Stepping) -> Update:
        dtypes, optimizer = self.dtypes, replace(self.config.optimizer, error_feedback=stepping.error_feedback)
        groups = parameter_groups(replace(self.config, optimizer=optimizer))
        num_versions = 1 if dtypes.is_mixed or not stepping.separate else 2
        layout = weight_layout(num_versions, compares=stepping.separate, is_mixed=dtypes.is_mixed)
        versions = WeightVersions(self._build(layers)[0], layout, dtype=dtypes.compute)
        track_alignment, device = self.config.train.track_alignment, torch.device("meta")
        updater = Updater(versions, groups, {}, lambda step: 1.0, track_alignment, device)
        live, work = LiveBytes(), 0
        with live.watch():
            for step in range(3 if track_alignment else 2):  # the first creates the state, the third compares updates
                gradients = {
                    name: torch.empty_like(master, dtype=dtypes.gradient) for name, master in versions.masters.items()
                }
                held = list(gradients.values()) if stepping.beside else []
                start = live.now
                live.restart_peak()
                updater.apply(step, gradients, [0.5] * len(groups), horizon=int(stepping.predicts))
                versions.close_next()
                held.clear()
                if step > 0:
                    work = live.peak - start
        kept, values = [0] * len(groups), [0] * len(groups)
        samples = updater.samples()
        for name, owner, master in updater.optimizer_states():
            group = updater.group_of[name]
            tensors = [value for value in owner.state.get(master, {}).values() if isinstance(value, Tensor)]
            kept[group] += _bytes([*tensors, *([samples[name]] if name in samples else [])])
            values[group] += master.numel()
        each = tuple(size / max(1, count) for size, count in zip(kept, values, strict=True))
        return Update(sum(kept), work, sum(values), each)

    def _build(self, layers: Layers, loss_chunk_tokens: int = 0) -> tuple[nn.Sequential, Loss]:
        num_dense = layers.dense if self.model.num_experts else 0
        small = self.model.resized(max(1, layers.blocks), num_dense)
        with on_meta():
            whole, loss = small.layers_and_loss(loss_chunk_tokens)
            whole.to(self.dtypes.master)
        first = 0 if layers.embedding else 1 if layers.blocks else 2
        last = len(whole) if layers.head else len(whole) - 1 if layers.blocks else 1
        return nn.Sequential(OrderedDict(list(whole.named_children())[first:last])), loss


def _with_more(result: Memory, more: int, before: Memory, after: Memory, grown: Sequence[str]) -> Memory:
    """Returns the result with more blocks, of which each adds as much as it does from `before` to `after`."""
    changes = {name: getattr(result, name) + more * (getattr(after, name) - getattr(before, name)) for name in grown}
    return replace(result, **changes)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the distinct storages."""
    storages = {id(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
