"""Which update comes next? Error feedback runs a batch on z - lam d w, w being what is expected of the next update.

The paper's answer is the last update, a pipeline's that of its optimizers: the same, but for AdamW. These are others,
to be judged beside them; they live in the study, and one moves to the optimizers when it has won. u: the update just
made, v: the one before. All stay on the device.

    (none)     what a pipeline expects
    last       w = u
    two_term   w = u + k (u - v)        k > 0 carries on a trend, k < 0 averages it away
    adaptive   w = c u                  c: least squares of each update on the one before, averaged over steps
    fitted     w = a u + b v            a, b: likewise, on the two before
    momentum   the update that the momentum alone would make, were the next gradient what it expects: the fresh
               gradient's noise, which is in u and will not come again, is not in it (Muon: after Newton-Schulz)
    damped     w = r - k n              n: as `momentum`; r: Nesterov's update, also of an optimizer without it. No good
               guess, but a wrong one hurts as the loss is curved along it, and along the most curved directions this
               one keeps a quadratic stable at twice the rate of `last` (beta 0.95, Nesterov: k 1.4)
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...optim import AdamW, Muon
from ...optim.optimizer import expects_nesterov
from ...optim.rules import orthogonal_update

MEMORY = 0.9
"""Of the running sums that coefficients are fitted to: ten steps or so."""


class Predictor(Protocol):
    """One for every parameter group: it may remember."""

    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        """From the updates just made, flat and in pieces, the ones expected next. What is returned is the caller's."""


class Last:
    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        return updates


class Own:
    """That of the optimizer, for one that has a guess of its own and takes every flat piece for a parameter."""

    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        assert isinstance(optimizer, AdamW)
        expected = (optimizer.expected(p, group) for group in optimizer.param_groups for p in group["params"])
        return [u if w is None else w for u, w in zip(updates, expected, strict=True)]


class TwoTerm:
    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._previous: list[Tensor] | None = None

    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        previous, self._previous = self._previous or updates, [u.clone() for u in updates]
        # w = v + (1 + k) (u - v)
        return [v.lerp(u, 1 + self._weight) for u, v in zip(updates, previous, strict=True)]


class Fitted:
    """Least squares of the newest update on the `num_terms` before it; the normal equations are averaged over steps."""

    def __init__(self, num_terms: int) -> None:
        self._num_terms = num_terms
        self._history: list[list[Tensor]] = []
        """Newest first."""
        self._gram: Tensor | None = None

    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        self._history = [[u.clone() for u in updates], *self._history][: self._num_terms + 1]
        if len(self._history) <= self._num_terms:
            return updates
        # products[i, j] = <u[t-i], u[t-j]>
        products = torch.stack([self._products(i) for i in range(self._num_terms + 1)])
        # Early updates grow with the warm-up; equal weights for all steps would hand the fit to the latest.
        # Nor must a newest update of zero divide by nothing.
        size = torch.maximum(products[0, 0], 0.01 * products.diagonal().amax())
        products = products / size.clamp(min=torch.finfo(products.dtype).tiny)
        self._gram = products if self._gram is None else self._gram.lerp(products, 1 - MEMORY)
        # A touch of ridge: two collinear updates must not make the system singular, nor one of zero. After that, it is
        # the last update that is expected.
        prior = 1e-12 * torch.eye(self._num_terms, dtype=products.dtype, device=products.device)
        normal = self._gram[1:, 1:] + 1e-6 * torch.diag(self._gram.diagonal()[1:]) + prior
        coefficients = torch.linalg.solve_ex(normal, self._gram[1:, :1] + prior[:, :1]).result.flatten().clamp(-2, 2)
        terms = zip(*self._history[: self._num_terms], strict=True)
        return [
            sum((c.to(u.dtype) * u for c, u in zip(coefficients, term, strict=True)), torch.zeros_like(term[0]))
            for term in terms
        ]

    def _products(self, i: int) -> Tensor:
        return torch.stack(
            [
                torch.stack([torch.dot(u, v) for u, v in zip(self._history[i], other, strict=True)]).double().sum()
                for other in self._history
            ]
        )


class Momentum:
    def __init__(self, pieces: list[list[nn.Parameter]]) -> None:
        """pieces: the optimizer's parameters, in the order in which they lie in each flat piece."""
        self._pieces = pieces

    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        return self.forecast(optimizer, nesterov=False)

    def forecast(self, optimizer: Optimizer, nesterov: bool) -> list[Tensor]:
        """The update that the momentum alone makes, or else Nesterov's, in which the last gradient counts twice."""
        forecast = _muon_forecast if isinstance(optimizer, Muon) else _adamw_forecast
        expected = forecast(optimizer, nesterov)
        return [torch.cat([expected[p].flatten() for p in piece]) for piece in self._pieces]


class Damped:
    def __init__(self, momentum: Momentum, weight: float) -> None:
        self._momentum, self._weight = momentum, weight

    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        expected = self._momentum.forecast(optimizer, nesterov=False)
        ahead = self._momentum.forecast(optimizer, nesterov=True)
        return [torch.sub(r, n, alpha=self._weight) for r, n in zip(ahead, expected, strict=True)]


def _muon_forecast(optimizer: Optimizer, nesterov: bool) -> dict[Tensor, Tensor]:
    expected: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            alike[parameter.shape].append(parameter)
        for parameters in alike.values():
            means = [optimizer.state[p]["momentum"] for p in parameters]
            directions = torch.stack(_directions(parameters, means, group["beta"], nesterov))
            stack = directions.reshape(-1, *directions.shape[-2:])
            updates = orthogonal_update(
                stack, lr=group["lr"], ns_steps=group["ns_steps"], ns_dtype=group["ns_dtype"], scale=group["scale"]
            )
            expected |= dict(zip(parameters, updates.reshape(directions.shape), strict=True))
    return expected


def _adamw_forecast(optimizer: Optimizer, nesterov: bool) -> dict[Tensor, Tensor]:
    assert isinstance(optimizer, AdamW)
    return {
        parameter: optimizer.forecast(parameter, group, nesterov)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _directions(parameters: list[Tensor], means: list[Tensor], beta: float, nesterov: bool) -> list[Tensor]:
    """m, or Nesterov's beta m + (1 - beta) g."""
    if not nesterov:
        return means
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [g.lerp(m, beta) for g, m in zip(gradients, means, strict=True)]


PREDICTORS = ("last", "two_term", "adaptive", "fitted", "momentum", "damped")
WEIGHTED = ("two_term", "damped")
"""Those with a weight, k."""
LOOK_INSIDE = ("momentum", "damped")
"""Those that read the state of Muon and AdamW."""


def pipeline_predictor(optimizer: Optimizer) -> Predictor:
    has_own = isinstance(optimizer, AdamW) and any(map(expects_nesterov, optimizer.param_groups))
    return Own() if has_own else Last()


def make_predictor(name: str, weight: float, pieces: list[list[nn.Parameter]]) -> Predictor:
    if name == "last":
        return Last()
    if name == "two_term":
        return TwoTerm(weight)
    if name == "adaptive":
        return Fitted(num_terms=1)
    if name == "fitted":
        return Fitted(num_terms=2)
    if name == "momentum":
        return Momentum(pieces)
    if name == "damped":
        return Damped(Momentum(pieces), weight)
    raise ValueError(f"predictor {name!r} is unknown: choose one of {', '.join(PREDICTORS)}")
