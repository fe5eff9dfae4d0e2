"""The state that a stage saves to resume later. Its names do not depend on how the model is split into stages.

After update c a stage has made c updates. If it has already begun later batches, they are computed again. So the state
only needs to hold what those batches will read:

    master/NAME              the weights that the optimizer steps
    working/LAG/NAME         the weight version LAG updates before the newest, where the masters do not determine it
    optimizer/NAME/KEY       the optimizer state of a parameter
    sample/NAME              in mixed precision: the sample of an update with which the next one is compared
    buffer/NAME              a buffer of a module
    products/STAGE.REPLICA   inner products of the two latest updates, for the next report

A weight that several stages hold is saved under its name on the first of them. If replicas share the optimizer, each
saves what it owns. The first replica saves everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import first_of

FACTS = ("optimizer", "groups", "coefficients")
"""Kinds of data that a state holds in addition to its tensors."""
TENSOR = "tensor"
"""Key that marks a tensor in the facts of an optimizer state. Its value is the name of the tensor."""


@dataclass(frozen=True)
class StageState:
    """The state of one stage after a number of updates."""

    step: int
    """Number of updates made."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Other data, in JSON: {"optimizer": {NAME: ...}, "groups": {GROUP: ...}, "coefficients": {GROUP: ...}}"""
    is_given_away: bool = False
    """Whether nothing else will read or write the tensors. If so, the pipeline that resumes from the state may keep
    them instead of copying them."""


class StateError(ValueError):
    """Raised for a state that does not fit. The message lists what is missing, superfluous or of another shape."""


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns the value in JSON. Its tensors are added to `tensors`, and the JSON refers to them by name."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): flatten(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [flatten(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise StateError(f"{name} is a {type(value).__name__}, which no checkpoint can hold")


def is_tensor(value: Any) -> bool:
    """Tells whether a flattened value is a reference to a tensor."""
    return isinstance(value, dict) and set(value) == {TENSOR}


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if is_tensor(value):
            return tensors[value[TENSOR]]
        return {key: unflatten(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    return value


def group_facts(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the data that an optimizer keeps in its parameter groups: some count their steps there. Learning rates
    are excluded, because the run sets them."""
    return [
        {
            key: value
            for key, value in group.items()
            if key not in ("params", "lr") and isinstance(value, (bool, int, float, str))
        }
        for group in optimizer.param_groups
    ]


def restore_groups(optimizer: Optimizer, facts: list[dict[str, Any]]) -> None:
    """Restores only the step counters. Hyper-parameters come from the configuration, which may have changed."""
    for group, kept in zip(optimizer.param_groups, facts, strict=True):
        if "step" in kept:
            group["step"] = kept["step"]


def restore_parameter(optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Any], keeps: bool) -> None:
    """Restores the optimizer state of one parameter. With `keeps`, tensors that are on the right device already are
    used without a copy."""
    on_device = _counts_on_device(optimizer, parameter)
    optimizer.state[parameter] = {
        key: _restored(value, parameter.device, keeps, on_device) for key, value in state.items()
    }


def _counts_on_device(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Tells whether step counters belong to the parameter's device, as in torch's fused and capturable optimizers."""
    groups = (group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    return any(group.get("fused") or group.get("capturable") for group in groups)


def _restored(value: Any, device: torch.device, keeps: bool, counts_on_device: bool) -> Any:
    """Moves tensors to the device. A scalar tensor, such as a step counter, stays where it is unless
    `counts_on_device`: most optimizers expect it on the host."""
    if isinstance(value, Tensor):
        return value.detach().to(device if value.ndim or counts_on_device else None, copy=not keeps)
    return [_restored(item, device, keeps, counts_on_device) for item in value] if isinstance(value, list) else value


def merge_facts(parts: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merges the facts of the states of several stages."""
    merged: dict[str, dict[str, Any]] = {kind: {} for kind in FACTS}
    for part in parts:
        for kind, values in merged.items():
            values |= part.get(kind, {})
    return merged


def check_names(found: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Raises StateError unless names and shapes are as expected, so that nothing is silently initialised or left
    out."""
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is not in the model" for name in found if name not in expected]
    faults += [
        f"{name} is {tuple(found[name])}, not {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise StateError(first_of(faults))
