"""What a stage has to remember to go on later, by names that do not depend on how the model was cut.

After update c a stage has made c updates. Whatever it has begun of later batches is computed again, so all that counts
is what those batches will read:

    master/NAME          the weights that the optimizer steps
    working/LAG/NAME     the weight version LAG before the newest, where the masters do not tell it
    optimizer/NAME/KEY   the optimizer's state of a parameter
    sample/NAME          of mixed precision: what the next update is compared with
    products/STAGE       of the two latest updates, which the next report tells

A weight that several stages hold goes by its name on the first of them. Where replicas share the optimizer, each
remembers what it owns; of everything else the first replica does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FACTS = ("optimizer", "groups", "coefficients")
"""What a state says beside its tensors."""
TENSOR = "tensor"
"""In the facts of an optimizer's state: a tensor stands here, and goes by this name."""


@dataclass(frozen=True)
class StageState:
    step: int
    """Updates made."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """What is no tensor, in JSON: {"optimizer": {NAME: ...}, "groups": {GROUP: ...}, "coefficients": {GROUP: ...}}"""
    is_given_away: bool = False
    """Nobody else will read or write the tensors: whoever goes on from it may keep them, instead of copies."""


class StateError(ValueError):
    """A state that does not fit; the message lists what is missing, superfluous or of another shape."""


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value in JSON, its tensors aside, under their own names."""
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
    """Whether a flattened value stands for a tensor."""
    return isinstance(value, dict) and set(value) == {TENSOR}


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if is_tensor(value):
            return tensors[value[TENSOR]]
        return {key: unflatten(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    return value


def tensor_names(value: Any) -> Iterable[str]:
    """Of the tensors that a flattened value needs."""
    if isinstance(value, dict):
        if is_tensor(value):
            yield value[TENSOR]
        else:
            for item in value.values():
                yield from tensor_names(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensor_names(item)


def group_facts(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an optimizer keeps in its groups: some count their steps there. Rates are the run's own."""
    return [
        {
            key: value
            for key, value in group.items()
            if key not in ("params", "lr") and isinstance(value, (bool, int, float, str))
        }
        for group in optimizer.param_groups
    ]


def restore_groups(optimizer: Optimizer, facts: list[dict[str, Any]]) -> None:
    """Counters only: hyper-parameters are those of the configuration, which may have changed."""
    for group, kept in zip(optimizer.param_groups, facts, strict=True):
        if "step" in kept:
            group["step"] = kept["step"]


def restore_parameter(optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Any], keeps: bool) -> None:
    """keeps: the tensors of the state, where they are of the device, and not copies of them."""
    optimizer.state[parameter] = {key: _restored(value, parameter.device, keeps) for key, value in state.items()}


def _restored(value: Any, device: torch.device, keeps: bool) -> Any:
    """A step that is counted in a tensor stays on the host, where optimizers want it."""
    if isinstance(value, Tensor):
        return value.detach().to(device if value.ndim else None, copy=not keeps)
    return [_restored(item, device, keeps) for item in value] if isinstance(value, list) else value


def merge_facts(parts: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of several stages' states, what one of them all together says."""
    merged: dict[str, dict[str, Any]] = {kind: {} for kind in FACTS}
    for part in parts:
        for kind, values in merged.items():
            values |= part.get(kind, {})
    return merged


def check_names(found: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Nothing is initialised in silence, and nothing left out."""
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is not in the model" for name in found if name not in expected]
    faults += [
        f"{name} is {tuple(found[name])}, not {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise StateError("; ".join(faults))
