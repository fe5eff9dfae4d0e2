"""`Muon`, `AdamW` and `SignDescent`: thin torch optimizers over the rules.

    optimizer = Muon(matrices, lr=0.02)

They can be used with any training loop. Under error feedback leave `weight_decay` at 0 and give it to the
`Group` instead: decay done in here would look like a part of the update and be extrapolated with it.

A step never waits for the device. On a GPU small matrices share their kernels, and large tensors are passed over once
(kernels.py); on a CPU every parameter is stepped on its own, so that its bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from . import kernels
from .rules import NS_DTYPES, SCALES, adamw_step_from, adamw_update, momentum_weight, orthogonal_update, sign_update

STACK_ELEMENTS = 2**24
"""Large matrices gain nothing from being stacked, and a stack costs several temporaries of its size."""
ADAMW_PREDICTORS = ("nesterov", "last")
LARGE_ELEMENTS = 2**20
"""From here on a pass over a parameter takes a GPU longer than the launch of its kernel takes the host."""


View = Callable[[Tensor], Tensor]
"""The same part of each of several tensors."""


def whole(tensor: Tensor) -> Tensor:
    return tensor


def stack_elements(ns_dtype: torch.dtype) -> int:
    """At most so many elements, but at least one parameter, are orthogonalised together. In bf16 more: the iteration
    then keeps two copies of two bytes, else four of four. The tiles of several matrices fill a GPU more evenly."""
    return STACK_ELEMENTS * (4 if ns_dtype == torch.bfloat16 else 1)


class PredictingOptimizer(Optimizer):
    """An optimizer that can write predicted weights in the same pass that makes the update."""

    _ahead: tuple[Mapping[Tensor, Tensor], float] | None = None

    @torch.no_grad()
    def step_ahead(self, working: Mapping[Tensor, Tensor], coefficient: float) -> None:
        """A step that leaves z - coefficient w in `working`, which has a copy of every parameter; w is the update
        expected next. Where that is u again, it is what `correction.predict` makes of copies taken before, without the
        copies. Decay is not extrapolated."""
        self._ahead = working, coefficient
        try:
            self.step()
        finally:
            self._ahead = None
        for parameter, copy in working.items():
            if parameter.grad is None:
                copy.copy_(parameter)

    def expected(self, parameter: Tensor, group: dict[str, Any], view: View = whole) -> Tensor | None:
        """After a step, while the gradient is there: the update expected next, or a part of it; None: the same again.
        group: the one of `param_groups` that has the parameter."""
        return None

    def _apply(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        copy, coefficient = self._target(parameter)
        _move(parameter, update, copy, 1 - group["lr"] * group["weight_decay"], coefficient)

    def _target(self, parameter: Tensor) -> tuple[Tensor | None, float]:
        """Where the predicted parameter goes, and how far it is predicted."""
        if self._ahead is None:
            return None, 0.0
        working, coefficient = self._ahead
        return working[parameter].detach(), coefficient


@final
class Muon(PredictingOptimizer):
    """Orthogonalised momentum for hidden matrices, stacked by shape so that small ones share their kernels.

    A 3-D parameter is a stack of matrices, each orthogonalised on its own. Use `AdamW` for embeddings,
    heads and vectors.

    lookahead: how many steps `nesterov` looks ahead. With more steps the newest gradient counts more; at 1 / (1 - beta)
    only the newest gradient counts. Under delay that gradient is itself late, so more than one step may help.
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
        self._stacks: dict[Tensor, tuple[Tensor, list[Tensor]]] = {}
        """By the first parameter of a stack: momenta together, and each parameter's view of them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks = {}

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
                for stack in _stacks(parameters, stack_elements(group["ns_dtype"])):
                    self._step_stack(stack, group)
        return loss

    def _step_stack(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        updates = orthogonal_update(
            self._directions(parameters, group),
            lr=group["lr"],
            ns_steps=group["ns_steps"],
            ns_dtype=group["ns_dtype"],
            scale=group["scale"],
            may_overwrite=True,
        )
        for parameter, update in _pieces(updates, parameters):
            self._apply(parameter, update, group)

    def _directions(self, parameters: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Advances every momentum. Where the iteration is in bf16 the directions are rounded here already: neither
        they nor the updates are ever held in fp32."""
        first, rows, cols = parameters[0], *parameters[0].shape[-2:]
        is_narrow = group["ns_dtype"] == torch.bfloat16
        directions = torch.empty(
            sum(map(torch.Tensor.numel, parameters)) // (rows * cols),
            rows,
            cols,
            dtype=torch.bfloat16 if is_narrow else first.dtype,
            device=first.device,
        )
        weight = momentum_weight(group["beta"], group["nesterov"], group["lookahead"])
        if len(parameters) > 1 and share_kernels(parameters):
            gradient = torch.cat([_gradient(parameter).reshape(-1, rows, cols) for parameter in parameters])
            momentum = self._stacked_momentum(parameters)
            kernels.advance_momentum(gradient, momentum, directions, beta=group["beta"], weight=weight)
            return directions
        for parameter, direction in _pieces(directions, parameters):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            kernels.advance_momentum(
                _gradient(parameter), state["momentum"], direction, beta=group["beta"], weight=weight
            )
        return directions

    def _stacked_momentum(self, parameters: list[Tensor]) -> Tensor:
        """The momenta of like matrices as one tensor, of which every parameter's own state is a view. It is made anew
        when others have come together than the last time, or when a state was loaded."""
        stack, views = self._stacks.get(parameters[0], (None, []))
        states = [self.state[parameter] for parameter in parameters]
        known = [state.get("momentum") for state in states]
        if stack is not None and list(map(id, known)) == list(map(id, views)):
            return stack
        rows, cols = parameters[0].shape[-2:]
        num_matrices = sum(map(torch.Tensor.numel, parameters)) // (rows * cols)
        stack = torch.zeros(num_matrices, rows, cols, dtype=parameters[0].dtype, device=parameters[0].device)
        views = [view for _, view in _pieces(stack, parameters)]
        for state, view in zip(states, views, strict=True):
            if "momentum" in state:
                view.copy_(state["momentum"])
            state["momentum"] = view
        self._stacks[parameters[0]] = stack, views
        return stack


@final
class AdamW(PredictingOptimizer):
    """Adam with decoupled weight decay; `nesterov` looks one step ahead, which helps under delay.

    predictor: what error feedback expects of the next update. "last": this update again, as in the paper. "nesterov":
    this update with Nesterov's term, whether or not the step itself has it. It turns with the mean and loses far less
    to the delay (docs/results/delay.md).
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        nesterov: bool = False,
        predictor: str = "nesterov",
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "nesterov": nesterov,
            "predictor": predictor,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        with _newest_group(self) as group:
            _require_not_negative(group, "lr", "eps", "weight_decay")
            _require_fraction(group, "beta1", "beta2")
            if group["predictor"] not in ADAMW_PREDICTORS:
                raise ValueError(f"predictor is {group['predictor']!r}: use one of {', '.join(ADAMW_PREDICTORS)}")

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
                self._step_parameter(parameter, state, group)
        return loss

    def expected(self, parameter: Tensor, group: dict[str, Any], view: View = whole) -> Tensor | None:
        if parameter.grad is None or not expects_nesterov(group):
            return None
        return self.forecast(parameter, group, nesterov=True, view=view)

    @torch.no_grad()
    def forecast(self, parameter: Tensor, group: dict[str, Any], nesterov: bool, view: View = whole) -> Tensor:
        """After a step, what it would have been with Nesterov's term, or without; or a part of that."""
        state = self.state[parameter]
        tensors = map(view, (_gradient(parameter), state["mean"], state["square"]))
        return adamw_step_from(*tensors, **_settings(group, state) | {"nesterov": nesterov})

    def _step_parameter(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        settings, is_ahead = _settings(group, state), expects_nesterov(group)
        decay = 1 - group["lr"] * group["weight_decay"]
        copy, coefficient = self._target(parameter)
        gradient, mean, square = _gradient(parameter), state["mean"], state["square"]
        tensors = [parameter, gradient, mean, square, *_present(copy)]
        if kernels.usable(*tensors):
            kernels.adamw_step(
                parameter,
                gradient,
                mean,
                square,
                copy,
                expects_nesterov=is_ahead,
                decay=decay,
                coefficient=coefficient,
                **settings,
            )
            return
        for p, g, m, v, *x in _chunks(tensors):
            _move(p, adamw_update(g, m, v, **settings), x[0] if x and not is_ahead else None, decay, coefficient)
            if x and is_ahead:
                torch.sub(p, adamw_step_from(g, m, v, **settings | {"nesterov": True}), alpha=coefficient, out=x[0])


@final
class SignDescent(PredictingOptimizer):
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
                    self._apply(parameter, sign_update(parameter.grad, lr=group["lr"]), group)
        return loss


def _settings(group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """What AdamW's rule takes beside its tensors."""
    return {"step": state["step"]} | {key: group[key] for key in ("lr", "beta1", "beta2", "eps", "nesterov")}


def expects_nesterov(group: dict[str, Any]) -> bool:
    """Of AdamW: whether the next update is expected to differ from the last."""
    return group["predictor"] == "nesterov" and not group["nesterov"]


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _stacks(parameters: list[Tensor], max_elements: int) -> Iterator[list[Tensor]]:
    """Cut a list of like matrices into stacks of at most so many elements, but at least one parameter each."""
    stack: list[Tensor] = []
    elements = 0
    for parameter in parameters:
        if stack and elements + parameter.numel() > max_elements:
            yield stack
            stack, elements = [], 0
        stack.append(parameter)
        elements += parameter.numel()
    yield stack


def share_kernels(parameters: list[Tensor]) -> bool:
    """Whether launches cost more than the copies that save them."""
    return parameters[0].is_cuda and all(parameter.numel() < LARGE_ELEMENTS for parameter in parameters)


def _pieces(stack: Tensor, parameters: list[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    """Every parameter with its part of the stack, in its shape."""
    rows, cols = stack.shape[-2:]
    parts = stack.split([parameter.numel() // (rows * cols) for parameter in parameters])
    return ((parameter, part.view(parameter.shape)) for parameter, part in zip(parameters, parts, strict=True))


def _move(
    parameter: Tensor,
    update: Tensor,
    copy: Tensor | None,  # where the predicted parameter goes
    decay: float,
    coefficient: float,
) -> None:
    if parameter.numel() >= LARGE_ELEMENTS and kernels.usable(parameter, update, *_present(copy)):
        kernels.apply_update(parameter, update, copy, decay=decay, coefficient=coefficient)
        return
    if decay != 1:
        # p <- (1 - lr wd) p
        parameter.mul_(decay)
    # p <- p - u
    parameter.sub_(update)
    if copy is not None:
        # x <- p - lam u
        torch.sub(parameter, update, alpha=coefficient, out=copy)


def _chunks(tensors: list[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """The tensors, or pieces of them all: temporaries as large as an embedding would be the peak of an update. Never
    on a CPU, where the last bit of a sum depends on its place in the tensor."""
    if tensors[0].is_cpu or not all(tensor.is_contiguous() for tensor in tensors):
        return [tuple(tensors)]
    return zip(*(tensor.view(-1).split(STACK_ELEMENTS) for tensor in tensors), strict=True)


def _present(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


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
