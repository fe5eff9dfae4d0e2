"""`Muon`, `AdamW` and `SignDescent`: thin torch optimizers over the rules.

    optimizer = Muon(matrices, lr=0.02)

They can be used with any training loop. Under error feedback leave `weight_decay` at 0 and give it to the
`Group` instead: decay done in here would look like a part of the update and be extrapolated with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from .rules import NS_DTYPES, SCALES, adamw_update, momentum_direction, orthogonal_update, sign_update

# Large matrices gain nothing from being stacked, and a stack costs several temporaries of its size.
STACK_ELEMENTS = 2**24


@final
class Muon(Optimizer):
    """Orthogonalised momentum for hidden matrices, stacked by shape so that small ones share their kernels.

    A 3-D parameter is a stack of matrices, each orthogonalised on its own. Embeddings, heads and vectors want
    `AdamW`.

    lookahead: how far `nesterov` looks, in steps; the more, the more the newest gradient counts, up to 1 / (1 - beta),
    where it is all that counts. Under delay, when that gradient is late itself, more than one may serve.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        beta: float = 0.95,
        nesterov: bool = True,
        lookahead: float = 1.0,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.float32,
        scale: str = "spectral",
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta": beta,
            "nesterov": nesterov,
            "lookahead": lookahead,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "scale": scale,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        with _newest_group(self) as group:
            _require_not_negative(group, "lr", "weight_decay", "lookahead")
            _require_fraction(group, "beta")
            if group["lookahead"] * (1 - group["beta"]) > 1 + 1e-9:
                raise ValueError(
                    f"lookahead is {group['lookahead']}, more than 1 / (1 - beta) = {1 / (1 - group['beta']):g}, where "
                    "the newest gradient is all that counts: use less"
                )
            if group["ns_steps"] < 1:
                raise ValueError(f"ns_steps is {group['ns_steps']}: use at least 1 Newton-Schulz step")
            if group["ns_dtype"] not in NS_DTYPES:
                raise ValueError(f"ns_dtype is {group['ns_dtype']}: use one of {', '.join(map(str, NS_DTYPES))}")
            if group["scale"] not in SCALES:
                raise ValueError(f"scale {group['scale']!r} is unknown: choose one of {', '.join(SCALES)}")
            for parameter in group["params"]:
                if parameter.ndim not in (2, 3):
                    raise ValueError(
                        f"Muon needs matrices (2-D) or stacks of them (3-D) and was given a parameter of "
                        f"shape {tuple(parameter.shape)}: give that one to AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluate(closure)
        for group in self.param_groups:
            alike: defaultdict[tuple[object, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[*parameter.shape[-2:], parameter.dtype, parameter.device].append(parameter)
            for parameters in alike.values():
                for stack in _stacks(parameters):
                    self._step_stack(stack, group)
        return loss

    def _step_stack(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        rows, cols = parameters[0].shape[-2:]
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            direction = momentum_direction(
                parameter.grad,
                state["momentum"],
                beta=group["beta"],
                nesterov=group["nesterov"],
                lookahead=group["lookahead"],
            )
            directions.append(direction.reshape(-1, rows, cols))
        updates = orthogonal_update(
            torch.cat(directions),
            lr=group["lr"],
            ns_steps=group["ns_steps"],
            ns_dtype=group["ns_dtype"],
            scale=group["scale"],
        )
        sizes = [len(direction) for direction in directions]
        for parameter, update in zip(parameters, updates.split(sizes), strict=True):
            _apply(parameter, update.reshape(parameter.shape), group)


@final
class AdamW(Optimizer):
    """Adam with decoupled weight decay; `nesterov` looks one step ahead, which helps under delay."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        with _newest_group(self) as group:
            _require_not_negative(group, "lr", "eps", "weight_decay")
            _require_fraction(group, "beta1", "beta2")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    # The count is a Python int: reading it never waits for a device.
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros_like(parameter)
                state["step"] += 1
                update = adamw_update(
                    parameter.grad,
                    state["mean"],
                    state["square"],
                    step=state["step"],
                    lr=group["lr"],
                    beta1=group["beta1"],
                    beta2=group["beta2"],
                    eps=group["eps"],
                    nesterov=group["nesterov"],
                )
                _apply(parameter, update, group)
        return loss


@final
class SignDescent(Optimizer):
    """A step of `lr` against the sign of the gradient, and none where that is zero."""

    def __init__(self, params: ParamsT, *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        with _newest_group(self) as group:
            _require_not_negative(group, "lr", "weight_decay")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _apply(parameter, sign_update(parameter.grad, lr=group["lr"]), group)
        return loss


def _apply(parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    if group["weight_decay"] != 0:
        # p <- (1 - lr wd) p
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    # p <- p - u
    parameter.sub_(update)


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _stacks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list of like matrices into stacks of at most STACK_ELEMENTS, but at least one parameter each."""
    stack: list[Tensor] = []
    elements = 0
    for parameter in parameters:
        if stack and elements + parameter.numel() > STACK_ELEMENTS:
            yield stack
            stack, elements = [], 0
        stack.append(parameter)
        elements += parameter.numel()
    yield stack


@contextmanager
def _newest_group(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """The group just added, for checking; it is taken out again if it is refused."""
    try:
        yield optimizer.param_groups[-1]
    except ValueError:
        optimizer.param_groups.pop()
        raise


def _require_not_negative(group: dict[str, Any], *fields: str) -> None:
    for field in fields:
        if not group[field] >= 0:
            raise ValueError(f"{field} is {group[field]}: use 0 or more")


def _require_fraction(group: dict[str, Any], *fields: str) -> None:
    for field in fields:
        if not 0 <= group[field] < 1:
            raise ValueError(f"{field} is {group[field]}: use a value from 0 up to, but not including, 1")
