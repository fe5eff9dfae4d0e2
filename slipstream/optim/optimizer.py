"""Defines `Muon`, `AdamW` and `SignDescent`: thin torch optimizers that call the rules of rules.py.

    optimizer = Muon(matrices, lr=0.02)

They can be used in any training loop. With error feedback, leave `weight_decay` at 0 and set it in the `Group` instead:
decay made by the optimizer would be a part of the update and would be extrapolated with it.

A step never waits for the device. On a GPU, small matrices share kernels, and large tensors are processed in one pass
(kernels.py). On a CPU every parameter is updated separately, so that its bits do not depend on other parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from . import kernels
from .rules import NS_DTYPES, SCALES, adamw_step_from, adamw_update, momentum_weight, orthogonal_update

STACK_ELEMENTS = 2**24
"""Largest number of elements of a stack in fp32, and of a piece of a large tensor. Large matrices do not profit from
being stacked, and a stack needs several temporaries of its size."""
ADAMW_PREDICTORS = ("nesterov", "last")
LARGE_ELEMENTS = 2**20
"""Number of elements from which a pass over a parameter takes a GPU longer than the host needs to launch its kernel."""


View = Callable[[Tensor], Tensor]
"""Function that selects the same part of each of several tensors."""
Item = TypeVar("Item")


def whole(tensor: Tensor) -> Tensor:
    return tensor


def stack_elements(ns_dtype: torch.dtype) -> int:
    """Returns the largest number of elements that are orthogonalised together. A single parameter may have more.

    In bf16 the number is larger, because the iteration keeps two copies of two bytes per element, otherwise four of
    four bytes. The tiles of several matrices use a GPU more evenly.
    """
    return STACK_ELEMENTS * (4 if ns_dtype == torch.bfloat16 else 1)


class PredictingOptimizer(Optimizer):
    """An optimizer that can write predicted weights in the same pass that makes the update."""

    _ahead: tuple[Mapping[Tensor, Tensor], float] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        """Raises a ValueError if a new param group has a value that is out of range."""
        _require_not_negative(group, "lr", "weight_decay")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group([parameter for parameter in group["params"] if parameter.grad is not None], group)
        return loss

    @abstractmethod
    def _step_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Updates those parameters of a param group that have a gradient."""

    @torch.no_grad()
    def step_ahead(self, working: Mapping[Tensor, Tensor], coefficient: float) -> None:
        """Makes a step, and writes z - coefficient w to `working`. z are the new parameters, and w is the update that
        is expected next.

        working: a tensor for every parameter. If w is the last update u, the result is the same as that of
        `correction.predict`, but no copies of the old parameters are needed. Weight decay is not extrapolated.
        """
        self._ahead = working, coefficient
        try:
            self.step()
        finally:
            self._ahead = None
        for parameter, copy in working.items():
            if parameter.grad is None:
                copy.copy_(parameter)

    def expected(self, parameter: Tensor, group: dict[str, Any], view: View = whole) -> Tensor | None:
        """Returns the update that is expected next, or None if that is the last update again.

        Call it after a step, while the gradient still exists. group: the entry of `param_groups` that contains the
        parameter. view: selects a part of the update.
        """
        return None

    def _apply(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        copy, coefficient = self._target(parameter)
        _move(parameter, update, copy, 1 - group["lr"] * group["weight_decay"], coefficient)

    def _target(self, parameter: Tensor) -> tuple[Tensor | None, float]:
        """Returns the tensor for the predicted parameter, and the coefficient of the prediction."""
        if self._ahead is None:
            return None, 0.0
        working, coefficient = self._ahead
        return working[parameter].detach(), coefficient


@final
class Muon(PredictingOptimizer):
    """Updates hidden matrices with orthogonalised momentum.

    Matrices of the same shape are stacked, so that small ones share kernels. A 3-D parameter is a stack of matrices,
    and each is orthogonalised separately. Use `AdamW` for embeddings, heads and vectors.

    lookahead: number of steps that `nesterov` looks ahead. With more steps the newest gradient has more weight. With 1
    / (1 - beta) steps, only the newest gradient counts. With delay that gradient is itself late, so more than one step
    may help.
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
        """Stacks by their first parameter: a tensor of all momenta, and the view of it for each parameter."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks = {}

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        _require_not_negative(group, "lookahead")
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

    def _step_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        alike: defaultdict[tuple[object, ...], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            alike[*parameter.shape[-2:], parameter.dtype, parameter.device].append(parameter)
        settings = {key: group[key] for key in ("lr", "ns_steps", "ns_dtype", "scale")}
        for of_one_shape in alike.values():
            for stack in split(of_one_shape, Tensor.numel, stack_elements(group["ns_dtype"])):
                updates = orthogonal_update(self._directions(stack, group), **settings, may_overwrite=True)
                for parameter, update in _pieces(updates, stack):
                    self._apply(parameter, update, group)

    def _directions(self, parameters: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Updates every momentum. Returns the directions.

        If the iteration is in bf16, the directions are rounded here already. So neither they nor the updates are ever
        held in fp32.
        """
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
        """Returns the momenta of matrices of the same shape as one tensor. The state of every parameter is a view of
        it.

        The tensor is created again if the parameters differ from those of the last call, or if a state was loaded.
        """
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
    """Implements Adam with decoupled weight decay. `nesterov` looks one step ahead, which helps with delay.

    predictor: the update that error feedback expects next. "last" is this update again, as in the paper. "nesterov" is
    this update with Nesterov's term, even if the step itself does not have it. It follows changes of the mean, and
    loses far less to the delay (docs/results/delay.md).
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

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        _require_not_negative(group, "eps")
        _require_fraction(group, "beta1", "beta2")
        if group["predictor"] not in ADAMW_PREDICTORS:
            raise ValueError(f"predictor is {group['predictor']!r}: use one of {', '.join(ADAMW_PREDICTORS)}")

    def _step_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                # The count is a Python int, so reading it never waits for a device.
                state["step"] = 0
                state["mean"] = torch.zeros_like(parameter)
                state["square"] = torch.zeros_like(parameter)
            state["step"] += 1
            self._step_parameter(parameter, state, group)

    def expected(self, parameter: Tensor, group: dict[str, Any], view: View = whole) -> Tensor | None:
        if parameter.grad is None or not expects_nesterov(group):
            return None
        return self.forecast(parameter, group, nesterov=True, view=view)

    @torch.no_grad()
    def forecast(self, parameter: Tensor, group: dict[str, Any], nesterov: bool, view: View = whole) -> Tensor:
        """Returns what the last step would have been with Nesterov's term, or without it. view: selects a part."""
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
    """Makes a step of `lr` against the sign of the gradient, and no step where the gradient is zero."""

    def __init__(self, params: ParamsT, *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _step_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            # u = lr sign(g)
            self._apply(parameter, _gradient(parameter).sign().mul_(group["lr"]), group)


def _settings(group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of AdamW's rule other than tensors."""
    return {"step": state["step"]} | {key: group[key] for key in ("lr", "beta1", "beta2", "eps", "nesterov")}


def expects_nesterov(group: dict[str, Any]) -> bool:
    """Returns whether a param group of AdamW expects the next update to differ from the last."""
    return group["predictor"] == "nesterov" and not group["nesterov"]


def split(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Splits items, in order, into lists whose sizes add up to at most `most`, with at least one item each."""
    part: list[Item] = []
    total = 0
    for item in items:
        if part and total + size(item) > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part


def share_kernels(parameters: list[Tensor]) -> bool:
    """Returns whether separate kernel launches would cost more than the copies that avoid them."""
    return parameters[0].is_cuda and all(parameter.numel() < LARGE_ELEMENTS for parameter in parameters)


def _pieces(stack: Tensor, parameters: list[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    """Returns every parameter with its part of the stack, viewed in the shape of the parameter."""
    rows, cols = stack.shape[-2:]
    parts = stack.split([parameter.numel() // (rows * cols) for parameter in parameters])
    return ((parameter, part.view(parameter.shape)) for parameter, part in zip(parameters, parts, strict=True))


def _move(
    parameter: Tensor,
    update: Tensor,
    copy: Tensor | None,  # for the predicted parameter
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
    """Splits the tensors into pieces, because temporaries as large as an embedding would be the memory peak of an
    update.

    On a CPU the tensors are not split, because there the last bit of a sum depends on its position in the tensor.
    """
    if tensors[0].is_cpu or not all(tensor.is_contiguous() for tensor in tensors):
        return [tuple(tensors)]
    return zip(*(tensor.view(-1).split(STACK_ELEMENTS) for tensor in tensors), strict=True)


def _present(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _require_not_negative(group: dict[str, Any], *fields: str) -> None:
    for field in fields:
        if not group[field] >= 0:
            raise ValueError(f"{field} is {group[field]}: use 0 or more")


def _require_fraction(group: dict[str, Any], *fields: str) -> None:
    for field in fields:
        if not 0 <= group[field] < 1:
            raise ValueError(f"{field} is {group[field]}: use a value from 0 up to, but not including, 1")
