"""Assigns an optimizer to every parameter.

A `Group` names an optimizer and the parameters it applies to, before any stage exists. Every stage applies the same
list of groups to the parameters it holds, so the gradient norm of a group can be summed over stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from .optimizer import AdamW, Muon, SignDescent


def everything(name: str, parameter: Tensor) -> bool:
    return True


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Returns whether a parameter is a hidden matrix or a stack of them. Embeddings, heads and routers are excluded by
    the names of their modules.

    A router is like a head whose classes are experts. Each of its rows scores one expert independently, so making its
    rows orthogonal to each other would be of no use.
    """
    return parameter.ndim in (2, 3) and not {"embedding", "head", "router"} & set(name.split("."))


def is_router_bias(name: str, parameter: Tensor) -> bool:
    return name.split(".")[-2:] == ["router", "bias"]


@dataclass(frozen=True)
class Group:
    """Parameters that share an optimizer, clipping, weight decay and error feedback."""

    name: str
    """Name of the group, in metrics and messages."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    """Function that makes a torch optimizer, such as `partial(torch.optim.SGD, lr=0.1)`. Set no weight decay in the
    optimizer itself, because error feedback would extrapolate it."""
    match: Callable[[str, Tensor], bool] = everything
    """Function that is called with the name of a parameter and the parameter. A parameter belongs to the first group
    that matches."""
    weight_decay: float = 0.0
    """Coefficient of the decoupled weight decay of the master weights. Error feedback never extrapolates it."""
    error_feedback: float = 0.0
    """Coefficient of the correction (lam in the paper). 0 means that the delay is not corrected."""
    clip_norm: float | None = None
    """Norm to which the gradient of this group is scaled down, computed over all stages. A norm shared with other
    groups could scale the gradients of matrices below the epsilon of Newton-Schulz."""
    elementwise: bool = False
    """Whether the optimizer treats every number independently, so that parameters may be concatenated in one tensor."""
    stacks: bool = False
    """Whether the optimizer treats every matrix of a 3-D parameter independently, so that matrices of the same shape
    may be stacked in one tensor."""

    def __post_init__(self) -> None:
        for field in ("weight_decay", "error_feedback"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} of group {self.name!r} is {getattr(self, field)}: use 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm of group {self.name!r} is {self.clip_norm}: use more than 0, or None")


def assign(
    named_parameters: Iterable[tuple[str, nn.Parameter]], groups: Sequence[Group]
) -> list[tuple[Group, list[tuple[str, nn.Parameter]]]]:
    """Assigns every parameter, in order, to the first group that matches. A group may be empty on a stage."""
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} groups are called {name!r}: give every group a name of its own")
    assigned: list[tuple[Group, list[tuple[str, nn.Parameter]]]] = [(group, []) for group in groups]
    for name, parameter in named_parameters:
        for group, members in assigned:
            if group.match(name, parameter):
                members.append((name, parameter))
                break
        else:
            raise ValueError(
                f"no group matches parameter {name!r} of shape {tuple(parameter.shape)}: "
                f"add a group that does, or end the list with one that matches everything"
            )
    return assigned


class Hyperparameters(TypedDict, total=False):
    """Arguments that `muon_and_adamw` passes to `Muon` and `AdamW`. Their defaults are defined only there."""

    muon_beta: float
    muon_nesterov: bool
    muon_lookahead: float
    muon_ns_steps: int
    muon_ns_dtype: torch.dtype
    muon_scale: str
    adamw_beta1: float
    adamw_beta2: float
    adamw_eps: float
    adamw_nesterov: bool
    adamw_predictor: str


def muon_and_adamw(
    *,
    muon_lr: float,
    adamw_lr: float,
    weight_decay: float = Group.weight_decay,
    error_feedback: float = Group.error_feedback,
    clip_norm: float | None = Group.clip_norm,
    **hyperparameters: Unpack[Hyperparameters],
) -> list[Group]:
    """Returns the usual two groups: Muon for hidden matrices, AdamW for the rest.

    `muon_lr=0.02` is the `lr` of Muon, `adamw_beta1=0.9` is the `beta1` of AdamW, and so on for every field of
    `Hyperparameters`. Fields that are left out have the default of the constructor. The exception is `adamw_predictor`,
    whose default here is "last": in combination with Muon the other predictor was no better (docs/results/delay.md).
    Weight decay, error feedback and clipping are the same for both groups, and each group is clipped by its own norm.
    Use `dataclasses.replace` to change one group.
    """
    unknown = sorted(hyperparameters.keys() - Hyperparameters.__annotations__.keys())
    if unknown:
        known = ", ".join(Hyperparameters.__annotations__)
        raise TypeError(f"muon_and_adamw takes no {', '.join(unknown)}: choose from {known}")

    def chosen(prefix: str) -> dict[str, Any]:
        items = {"adamw_predictor": "last", **hyperparameters}.items()
        return {key.removeprefix(prefix): value for key, value in items if key.startswith(prefix)}

    group = partial(Group, weight_decay=weight_decay, error_feedback=error_feedback, clip_norm=clip_norm)
    return [
        group("matrices", partial(Muon, lr=muon_lr, **chosen("muon_")), is_matrix, stacks=True),
        group("rest", partial(AdamW, lr=adamw_lr, **chosen("adamw_")), elementwise=True),
    ]


def balance_experts(rate: float) -> Group:
    """Returns the group for the biases of routers (slipstream/model/experts.py), whose gradients show which experts had
    too many tokens.

    It must come before any group that matches everything: `[balance_experts(0.001), *muon_and_adamw(...)]`. Nothing is
    clipped or decayed. Nothing is predicted either, because the sign of an update does not predict the sign of the next
    one.
    """
    return Group("balance", partial(SignDescent, lr=rate), is_router_bias, elementwise=True)
