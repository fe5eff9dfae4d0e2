"""Which parameter gets which optimizer.

A `Group` is a recipe: it names an optimizer and the parameters it wants, before any stage exists. Every
stage applies the same list of groups to what it holds, so a group's gradient norm can be summed over stages.
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
    """A hidden matrix or a stack of them; embeddings, heads and routers are told apart by their module's name.

    A router is a head for experts: each row scores one choice for itself, and there is no use for rows that are
    orthogonal to each other."""
    return parameter.ndim in (2, 3) and not {"embedding", "head", "router"} & set(name.split("."))


def is_router_bias(name: str, parameter: Tensor) -> bool:
    return name.split(".")[-2:] == ["router", "bias"]


@dataclass(frozen=True)
class Group:
    """Parameters that share an optimizer, clipping, weight decay and error feedback."""

    name: str
    """Name of the group, in metrics and messages."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    """A function that makes a torch optimizer, such as `partial(torch.optim.SGD, lr=0.1)`. Error feedback would
    extrapolate its own weight decay."""
    match: Callable[[str, Tensor], bool] = everything
    """Called with the name of a parameter and the parameter. The first group that matches takes it."""
    weight_decay: float = 0.0
    """Decoupled; acts on the masters. Error feedback never extrapolates it."""
    error_feedback: float = 0.0
    """Coefficient of the correction (lam in the paper). 0 is plain delay."""
    clip_norm: float | None = None
    """The gradient of this group is scaled down to this norm, taken over all stages. A norm shared with other groups
    could push matrices below Newton-Schulz's epsilon."""
    elementwise: bool = False
    """The optimizer treats every number alone, so parameters may be put end to end in one tensor."""
    stacks: bool = False
    """The optimizer treats every matrix of a 3-D parameter alone, so equal matrices may be put together in one."""

    def __post_init__(self) -> None:
        for field in ("weight_decay", "error_feedback"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} of group {self.name!r} is {getattr(self, field)}: use 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm of group {self.name!r} is {self.clip_norm}: use more than 0, or None")


def assign(
    named_parameters: Iterable[tuple[str, nn.Parameter]], groups: Sequence[Group]
) -> list[tuple[Group, list[tuple[str, nn.Parameter]]]]:
    """Give every parameter, in order, to the first group that matches; a group may stay empty on a stage."""
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
    """What `muon_and_adamw` passes on; the defaults are those of `Muon` and `AdamW`, written there alone."""

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
    """The usual two groups: Muon for hidden matrices, AdamW for the rest.

    `muon_lr=0.02` is Muon's `lr`, `adamw_beta1=0.9` is AdamW's `beta1`, and so on for every field of
    `Hyperparameters`. What is left out has the default of the constructor, except `adamw_predictor`, which is "last":
    beside Muon the other one was no better (docs/results/delay.md). Weight decay, error feedback and clipping are the
    same for both groups, and each group is clipped by its own norm. `dataclasses.replace` changes one of them.
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
    """For the biases of routers (slipstream/model/experts.py), whose gradients say which experts had too many tokens.
    It stands before any group that takes everything: `[balance_experts(0.001), *muon_and_adamw(...)]`.

    Nothing is clipped or decayed, and nothing predicted: a sign that turns around says nothing of the next one.
    """
    return Group("balance", partial(SignDescent, lr=rate), is_router_bias, elementwise=True)
