"""Counts the memory of updates that step a whole parameter group at once, a part of it, or the part that one replica
owns.

Two amounts are a fixed number of bytes per value, for as many parameters as are stepped together, whatever their layers
(pipeline/update.py). Gradients in another dtype than the masters are cast. If working copies have a lower precision
than the masters, z[t] is kept for optimizers that cannot predict by themselves. All other memory of an optimizer is
measured in a dry run of a few parameters of one shape, because it processes no more than that at once. Parameters of a
kind (for example the queries of all dense blocks) are equal, so they are only counted.

If replicas share the optimizer, the owners are computed by the same function as in a run. The memory is that of the
replica that keeps the most. Another replica may need a little more for a short time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config.defaults import precision_of
from ...config.optimizers import parameter_groups
from ...config.schema import Config
from ...model.spec import ModelSpec
from ...optim.groups import Group, assign
from ...optim.optimizer import PredictingOptimizer
from ...pipeline.partition import Tied
from ...pipeline.update import PART_ELEMENTS, SAMPLE_ELEMENTS, Updater
from ...pipeline.weight_versions import WeightVersions
from ...pipeline.zero1 import assign_owners
from .live import LiveBytes


@dataclass(frozen=True)
class Update:
    optimizer: int
    """Bytes of the optimizer state, and of the sample of an update that is compared with the next one."""
    work: int
    """Peak memory of an update, above the memory at its start."""
    owned: int | None = None
    """Number of values that are stepped on this device. None means all."""


@dataclass(frozen=True)
class Stepping:
    """Properties of a stage's updates on which their memory depends."""

    separate: bool
    """Whether the masters are a separate copy of the weights."""
    predicts: bool
    """Whether the working copies run ahead of the masters."""
    beside: bool
    """Whether the update runs in the background, which holds the gradients of the batch until the update has ended."""
    error_feedback: float


Kinds = dict[str, int]
"""Number of parameters of each kind, by name. The name is that of one parameter, with one of LAYERS as the name of its
layer."""
LAYERS = ("embedding", "dense", "sparse", "head")


@dataclass(frozen=True)
class GroupUpdates:
    config: Config
    model: ModelSpec
    build: Callable[[int, int, int, int], nn.Sequential]
    """Function that builds a model on the meta device, with the given number of each of LAYERS."""
    few: int | None
    """Number of blocks from which an optimizer needs no more work space for parameters of one shape. Parameters of
    another shape need their work space at another time. None means that the optimizer may use temporaries as large as
    all its parameters."""
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def update(self, layers: tuple[int, int, int, int], stepping: Stepping, num_owners: int) -> Update:
        """Returns the memory of an update. layers: the stage's number of each of LAYERS. num_owners: the number of
        replicas that share the optimizer."""
        key = ("update", layers, stepping, num_owners)
        if key not in self._known:
            self._known[key] = self._count(layers, stepping, num_owners)
        update: Update = self._known[key]
        return update

    def _count(self, layers: tuple[int, int, int, int], stepping: Stepping, num_owners: int) -> Update:
        dtypes, sizes = precision_of(self.config), self._sizes()
        kept = self._kept()
        masters = {name: size * dtypes.master.itemsize * stepping.separate for name, size in sizes.items()}
        shares = self.shares(layers, num_owners)
        own = max(shares, key=lambda share: sum(n * (kept[name] + masters[name]) for name, n in share.items()))
        works = [self._work(index, own, stepping) for index in range(len(self._groups(stepping.error_feedback)))]
        return Update(
            optimizer=sum(number * kept[name] for name, number in own.items()),
            work=max(works),
            owned=sum(number * sizes[name] for name, number in own.items()),
        )

    def owned_share(self, layers: tuple[int, int, int, int], num_owners: int) -> float:
        """Returns the largest share of a stage's values that one replica steps."""
        key = ("share", layers, num_owners)
        if key not in self._known:
            sizes = self._sizes()
            owned = [sum(n * sizes[name] for name, n in share.items()) for share in self.shares(layers, num_owners)]
            self._known[key] = max(owned) / sum(owned)
        share: float = self._known[key]
        return share

    def shares(self, layers: tuple[int, int, int, int], num_owners: int) -> list[Kinds]:
        """Returns for every replica the parameters of a stage that it owns."""
        numbers = dict(zip(LAYERS, layers, strict=True))
        has_both_ends = bool(numbers["embedding"] and numbers["head"])
        stage = {name: numbers[_layer(name)] for name in self._parameters() if numbers[_layer(name)]}
        if self.model.tied_embeddings and has_both_ends:
            del stage["head.output.weight"]  # the same parameter as the embedding
        if num_owners == 1:
            return [stage]
        elementwise = {
            name: group.elementwise
            for group, members in assign(self._parameters().items(), self._groups(0.0))
            for name, _ in members
        }
        named = {f"{name} {i}": name for name, number in stage.items() for i in range(number)}
        ends = ("embedding.weight", "head.output.weight")
        is_tied = self.model.tied_embeddings and not has_both_ends
        owners = assign_owners(
            {one: self._parameters()[name] for one, name in named.items()},
            {one: elementwise[name] for one, name in named.items()},
            {one: Tied(ends[0], (0, 1)) for one, name in named.items() if is_tied and name in ends},
            num_owners,
        )
        shares: list[Kinds] = [Counter() for _ in range(num_owners)]
        for one, owner in owners.items():
            shares[owner][named[one]] += 1
        return shares

    # ---- one group

    def _work(self, index: int, own: Kinds, stepping: Stepping) -> int:
        """Returns the work space of a group: the bytes for each value that is stepped together with others, and what
        else the optimizer needs."""
        dtypes, group = precision_of(self.config), self._groups(stepping.error_feedback)[index]
        members = {name: parameter for name, parameter in self._members(index).items() if own.get(name)}
        if not members:
            return 0
        is_parted = dtypes.is_mixed and group.error_feedback != 0 and not _can_predict(group, members)
        freed = 0 if stepping.beside else dtypes.gradient.itemsize  # a gradient is freed when it is cast
        cast = max(0, dtypes.master.itemsize - freed) if dtypes.gradient != dtypes.master else 0
        bytes_each = cast + (dtypes.master.itemsize if is_parted and stepping.predicts else 0)
        together = sum(own[name] * parameter.numel() for name, parameter in members.items())
        if is_parted:
            together = min(together, max(PART_ELEMENTS, *(parameter.numel() for parameter in members.values())))
        samples = sum(own[name] * self._sample(name) for name in members)
        samples = min(samples, together * dtypes.master.itemsize)
        alike: dict[tuple[int, ...], Kinds] = {}
        for name, parameter in members.items():
            shape = () if self.few is None else tuple(parameter.shape)
            alike.setdefault(shape, {})[name] = min(own[name], self.few or own[name])
        return (
            together * bytes_each
            + samples
            + max(self._besides(index, kinds, bytes_each, stepping) for kinds in alike.values())
        )

    def _besides(self, index: int, kinds: Kinds, bytes_each: int, stepping: Stepping) -> int:
        sizes = self._sizes()
        by_rule = sum(number * (sizes[name] * bytes_each + self._sample(name)) for name, number in kinds.items())
        return max(0, self._play(index, kinds, stepping)[0] - by_rule)

    def _kept(self) -> dict[str, int]:
        """Returns for one parameter of each kind the bytes of the optimizer state and of the sample of its last
        update."""
        kept = {name: self._sample(name) for name in self._parameters()}
        for index in range(len(self._groups(0.0))):
            for layer in LAYERS:  # one layer at a time, because embedding and head may be one parameter
                kinds = {name: 1 for name in self._members(index) if _layer(name) == layer}
                if kinds:
                    state = self._play(index, kinds, Stepping(False, False, False, 0.0))[1]
                    kept |= {name: kept[name] + size for name, size in state.items()}
        return kept

    def _sample(self, name: str) -> int:
        """Returns the bytes of the sample by which mixed precision compares two updates."""
        if not (precision_of(self.config).is_mixed and self.config.train.track_alignment):
            return 0
        parameter = self._parameters()[name]
        return len(range(0, parameter.numel(), max(1, parameter.numel() // SAMPLE_ELEMENTS))) * parameter.itemsize

    def _play(self, index: int, kinds: Kinds, stepping: Stepping) -> tuple[int, dict[str, int]]:
        """Returns the work space, and the optimizer state for a parameter of each kind."""
        key = ("play", index, tuple(sorted(kinds.items())), stepping)
        if key not in self._known:
            self._known[key] = self._play_group(kinds, stepping)
        result: tuple[int, dict[str, int]] = self._known[key]
        return result

    def _play_group(self, kinds: Kinds, stepping: Stepping) -> tuple[int, dict[str, int]]:
        dtypes, groups = precision_of(self.config), self._groups(stepping.error_feedback)
        numbers = [max((n for name, n in kinds.items() if _layer(name) == layer), default=0) for layer in LAYERS]
        kind_of = {
            real: name for name, number in kinds.items() for real in _real_names(name, number, num_dense=numbers[1])
        }
        versions = WeightVersions(
            self.build(*numbers),
            1 if dtypes.is_mixed or not stepping.separate else 2,
            separate_masters=stepping.separate,
            dtype=dtypes.compute,
            owned=kind_of,
        )
        track_alignment, device = self.config.train.track_alignment, torch.device("meta")
        updater = Updater(versions, groups, {}, lambda step: 1.0, track_alignment, device)
        live = LiveBytes()
        work = 0
        with live.watch():
            for step in range(3):  # the first step creates the optimizer state, the third compares two updates
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
        kind_by_master = {id(master): kind_of[name] for name, master in versions.masters.items()}
        state = dict.fromkeys(kinds, 0)
        for optimizer in updater.optimizers:
            for master, values in optimizer.state.items():
                state[kind_by_master[id(master)]] = sum(v.nbytes for v in values.values() if isinstance(v, Tensor))
        return work, state

    # ---- what the parameters are

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Returns one parameter of each kind, in the dtype of the masters."""
        if "parameters" not in self._known:
            found: dict[str, nn.Parameter] = {}
            num_dense = self.model.num_layers - self.model.num_sparse_layers
            present = (1, min(1, num_dense), min(1, self.model.num_sparse_layers), 1)
            for i, layer in enumerate(LAYERS):
                if present[i]:
                    for name, parameter in self.build(*(int(i == j) for j in range(4))).named_parameters():
                        found[f"{layer}.{name.partition('.')[2]}"] = parameter
            self._known["parameters"] = found
        parameters: dict[str, nn.Parameter] = self._known["parameters"]
        return parameters

    def _sizes(self) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in self._parameters().items()}

    def _groups(self, error_feedback: float) -> list[Group]:
        optimizer = replace(self.config.optimizer, error_feedback=error_feedback)
        return parameter_groups(replace(self.config, optimizer=optimizer))

    def _members(self, index: int) -> Mapping[str, nn.Parameter]:
        return dict(assign(self._parameters().items(), self._groups(0.0))[index][1])


def _can_predict(group: Group, members: Mapping[str, nn.Parameter]) -> bool:
    return isinstance(group.optimizer(list(members.values())[:1]), PredictingOptimizer)


def _layer(name: str) -> str:
    return name.partition(".")[0]


def _real_names(name: str, number: int, num_dense: int) -> list[str]:
    """Returns the names in a model of `number` parameters of a kind, if num_dense dense blocks come before those with
    experts."""
    layer, _, rest = name.partition(".")
    if layer in ("embedding", "head"):
        return [name]
    first = num_dense if layer == "sparse" else 0
    return [f"block{first + i}.{rest}" for i in range(number)]
