"""The weight versions of a stage, and the masters of its optimizer.

Version v is in slot v % n. The n slots are replicas of the stage's module. Each has leaf parameters of its own, and all
share their buffers. A microbatch runs forward and backward in one replica, so no weight is copied, swapped or
recomputed per microbatch. If a replica whose graph is still alive is overwritten, autograd raises instead of returning
a wrong gradient.

The masters (z in docs/concepts/weights.md) are the weights that the optimizer steps. `weight_layout` decides where they
are.

A parameter with requires_grad=False is frozen. All versions share it, in the dtype of the working copies, and it has
no master.

If the replicas of a pipeline share the optimizer (ZeRO-1), a stage has masters only of the parameters that it owns.

Buffers of a module, such as the running means of BatchNorm, have one version, which every forward may write. Their
values before the first forward of a batch are saved, because a resumed run begins with that batch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .partition import trainable


class Masters(Enum):
    """Where the masters of a stage are."""

    IN_PLACE = auto()
    """They are the parameters of the only version."""
    ALIASED = auto()
    """They share the memory of the newest version, and move to the slot of every version that is written: n copies in
    total."""
    SEPARATE = auto()
    """They are a copy of their own: n + 1 copies in total."""


@dataclass(frozen=True)
class WeightLayout:
    """The copies of its weights that a stage keeps."""

    num_versions: int
    masters: Masters
    predicts: bool
    """Whether the working copies are ahead of the masters."""
    drifts: bool
    """Whether the only version is overwritten while microbatches are in flight, whose backwards read the new weights
    (PACI). The masters then write through aliases that autograd does not track."""


def weight_layout(
    num_versions: int,
    delay: int = 0,
    *,
    drifts: bool = False,
    corrects: bool = False,
    compares: bool = False,
    is_mixed: bool = False,
) -> WeightLayout:
    """Decides which copies a stage keeps. This is the only place that does.

    num_versions, delay, drifts   what the schedule says about the stage
    corrects                      some parameter group has error feedback
    compares                      two updates are compared (`track_alignment`)
    is_mixed                      the working copies have a coarser dtype. Then the masters are always separate, so that
                                  small updates are not lost
    """
    predicts = corrects and delay > 0 and num_versions > 1
    if is_mixed or predicts or (compares and num_versions == 2):
        masters = Masters.SEPARATE
    else:
        masters = Masters.ALIASED if num_versions > 1 or drifts else Masters.IN_PLACE
    return WeightLayout(num_versions, masters, predicts, drifts)


def is_mixed(module: nn.Module, dtype: torch.dtype | None) -> bool:
    """Returns whether working copies of this dtype differ from the parameters. None means the module's own dtype."""
    return dtype is not None and any(parameter.dtype != dtype for parameter in trainable(module).values())


def cast_frozen(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Gives frozen parameters the dtype of the working copies, because no other copy of them is kept. None means that
    they keep theirs."""
    exempt = _exempt(module)
    for name, parameter in module.named_parameters():
        if dtype is not None and not parameter.requires_grad and name not in exempt and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class WeightVersions:
    """The weight versions and masters of one stage."""

    def __init__(
        self,
        module: nn.Module,
        layout: WeightLayout,
        dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        owned: Collection[str] | None = None,
        blank: bool = False,
    ) -> None:
        """Creates the versions.

        dtype              dtype of the working copies, except for parameters that their module names in `keeps_dtype`;
                           None means that of the module
        gradient_dtype     dtype in which a batch's gradients are added up; None means that of the working copies
        owned              names of the parameters that have masters here; None means all that are not frozen
        blank              the weights to train are irrelevant: they will be restored, and use no memory before that
        """
        cast_frozen(module, dtype)
        trained, exempt = trainable(module), _exempt(module)
        names = [name for name in trained if owned is None or name in owned]
        self.is_mixed = is_mixed(module, dtype)
        has_copies = self.is_mixed or owned is not None  # masters that no replica of the module can hold
        self.separate_masters = layout.masters is Masters.SEPARATE
        if self.is_mixed and not self.separate_masters:
            raise ValueError(f"working copies in {dtype} need separate masters: pass is_mixed to weight_layout")
        self.master_dtypes = {name: p.dtype for name, p in trained.items()}
        """Dtype of the master of every parameter, owned or not."""
        self.newest = 0
        self.predicts, self._drifting = layout.predicts, layout.drifts
        if self.separate_masters and has_copies:
            self.masters = {name: _replica(trained[name], blank) for name in names}
        for name, parameter in trained.items():
            own_dtype = parameter.dtype if dtype is None or name in exempt else dtype
            parameter.data = _placeholder(parameter, own_dtype) if blank else parameter.data.to(own_dtype)
        owns = {name for name, _ in module.named_buffers()}
        shared = {id(t): t for t in chain(module.buffers(), module.parameters()) if not t.requires_grad}

        def replicate() -> nn.Module:
            replicas = {id(p): _replica(p, blank) for p in trained.values()}
            return copy.deepcopy(module, {**shared, **replicas})

        self._buffers = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name in owns}
        self._buffers_before: dict[int, dict[str, Tensor]] = {}
        """Buffers by step, as they were before the first forward of the step."""
        self._slots = [module, *(replicate() for _ in range(layout.num_versions - 1))]
        self._parameters = [trainable(slot) for slot in self._slots]
        self._master_module = None
        if self.separate_masters and not has_copies:
            self._master_module = replicate()
            self.masters = trainable(self._master_module)
        elif not self.separate_masters:
            is_alias, own = layout.masters is Masters.ALIASED, self._parameters[0]
            self.masters = {name: nn.Parameter(own[name].data) if is_alias else own[name] for name in names}
        self.gradient_dtype = gradient_dtype
        self._summed: list[dict[str, Tensor]] = [{} for _ in self._slots]
        """Gradients that are added up in another dtype than their parameter's, by slot."""
        if gradient_dtype is not None:
            for sums, parameters in zip(self._summed, self._parameters, strict=True):
                for name, parameter in parameters.items():
                    if parameter.dtype != gradient_dtype:
                        hook = partial(_add_to, sums, name, gradient_dtype)
                        parameter.register_post_accumulate_grad_hook(hook)

    @property
    def num_versions(self) -> int:
        return len(self._slots)

    def module(self, version: int) -> nn.Module:
        if not self.newest - self.num_versions < version <= self.newest:
            raise RuntimeError(f"version {version} is not kept: the newest of {self.num_versions} is {self.newest}")
        return self._slots[version % self.num_versions]

    def parameters(self, version: int) -> Mapping[str, nn.Parameter]:
        return self._parameters[version % self.num_versions]

    def master_module(self) -> nn.Module | None:
        """Returns the module that computes with the masters, rounded to the dtype of the working copies. It is used for
        evaluation. None means that there is no such module. Then use `with_weights`."""
        return self._master_module if self.predicts else self._slots[self.newest % self.num_versions]

    def with_weights(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Returns the stage's module with other weights than those of its versions."""
        return _WithWeights(self._slots[self.newest % self.num_versions], weights)

    def remember_buffers(self, step: int) -> None:
        """Saves the buffers. Call it before the first forward of a step."""
        if self._buffers:
            self._buffers_before[step] = {name: buffer.clone() for name, buffer in self._buffers.items()}
            for old in [each for each in self._buffers_before if each < self.newest]:
                del self._buffers_before[old]

    def buffers(self) -> Mapping[str, Tensor]:
        """Returns the buffers of the module, as they were before the first forward of the step after the newest
        update."""
        return self._buffers_before.get(self.newest, self._buffers)

    @torch.no_grad()
    def restore_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            buffer.copy_(buffers[name])

    def lags(self) -> list[int]:
        """Returns which versions the masters do not determine, as the number of updates before the newest. 0 is the
        newest itself."""
        return [*([0] if self.predicts else []), *range(1, min(self.num_versions, self.newest + 1))]

    @torch.no_grad()
    def restore(
        self,
        newest: int,
        masters: Mapping[str, Tensor],
        working: Sequence[Mapping[str, Tensor]],
        keeps: bool = False,
    ) -> None:
        """Restores versions and masters. `masters` has all parameters, owned or not. `working` lists versions by the
        number of updates before the newest. With `keeps`, tensors that fit are used without a copy."""
        self.newest = newest
        kept: set[int] = set()

        def put(parameter: nn.Parameter, weight: Tensor) -> None:
            """Puts a weight into a parameter. A tensor is used without a copy only once. If other parameters need the
            same weights, they get a copy."""
            is_like = (weight.dtype, weight.device) == (parameter.dtype, parameter.device) and weight.is_contiguous()
            if weight.shape != parameter.shape:
                raise RuntimeError(f"weights of {tuple(weight.shape)} do not fit into {tuple(parameter.shape)}")
            if keeps and is_like and weight.data_ptr() not in kept:
                kept.add(weight.data_ptr())
                parameter.data = weight.detach()
            elif parameter.is_contiguous():
                parameter.copy_(weight)
            else:
                order = torch.contiguous_format
                parameter.data = weight.detach().to(parameter.device, parameter.dtype, copy=True, memory_format=order)

        if self.separate_masters:
            for name, master in self.masters.items():
                put(master, masters[name])
        for lag, weights in enumerate(working):
            for name, parameter in self.parameters(newest - lag).items():
                put(parameter, weights[name])
        if not self.separate_masters:
            for name, master in self.masters.items():
                master.data = self.parameters(newest)[name].data

    def take_gradients(self, version: int) -> dict[str, Tensor]:
        """Returns the gradient accumulated in a version and clears it, so that the next batch of this slot starts from
        zero."""
        parameters, sums = self.parameters(version), self._summed[version % self.num_versions]
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None} | sums
        sums.clear()
        for parameter in parameters.values():
            parameter.grad = None
        return gradients

    @torch.no_grad()
    def open_next(self) -> dict[str, Tensor]:
        """Begins the version after the newest, in the slot of the version that retires. Returns its weights, to be
        written.

        If the masters are in the slots, they move there first.
        """
        target = self.next_weights()
        if self.num_versions > 1 and not self.separate_masters:
            newest = self.parameters(self.newest)
            for name, master in self.masters.items():
                target[name].copy_(newest[name])
                master.data = target[name].data
        return target

    def next_weights(self) -> dict[str, Tensor]:
        """Returns the weights of the version that is being written. If versions drift, the weights are written while
        graphs that hold them are alive, so autograd must not track the writes."""
        return {name: p.data if self._drifting else p for name, p in self.parameters(self.newest + 1).items()}

    def close_next(self) -> None:
        self.newest += 1


class _WithWeights(nn.Module):
    """A module that runs with other weights than its own."""

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._module, self._weights = module, dict(weights)

    def forward(self, inputs: Any) -> Any:
        return functional_call(self._module, self._weights, (inputs,))


def _replica(parameter: nn.Parameter, blank: bool) -> nn.Parameter:
    return nn.Parameter(_placeholder(parameter, parameter.dtype) if blank else parameter.detach().clone())


def _placeholder(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a tensor of the right shape that stores a single number. Allocating full memory has a cost, even if it is
    never read."""
    return torch.empty((), dtype=dtype, device=like.device).expand(like.shape)


@torch.no_grad()
def _add_to(sums: dict[str, Tensor], name: str, dtype: torch.dtype, parameter: Tensor) -> None:
    """Adds the gradient that a backward left in `grad` to the sums, and clears it."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if name in sums:
        sums[name] += gradient
    else:
        sums[name] = gradient.to(dtype)


def _exempt(module: nn.Module) -> set[str]:
    """Returns the names of parameters that keep their dtype, because their module lists them in `keeps_dtype`."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in getattr(child, "keeps_dtype", ())
    }
