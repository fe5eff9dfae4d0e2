"""Predictors of the next update that were compared and lost (docs/results/delay.md); studies name them by import path.

    predictor = "experiments.predictors.damped"          in a grid, for a study started in the project's folder

u is the update just made, v the one before.

    adaptive   w = c u                  c: least squares of each update on the one before, averaged over steps
    fitted     w = a u + b v            a, b: the same, on the two updates before
    momentum   the update from the momentum alone, as if the next gradient were equal to the momentum. It lacks the
               noise of the last gradient, which is in u and will not occur again (Muon: after Newton-Schulz)
    damped     w = r - k n              n: as in `momentum`; r: Nesterov's update, even if the optimizer
               does not use it. This is not a good prediction. But a wrong prediction hurts more, the more the loss is
               curved along it, and along the most curved directions this one keeps a quadratic stable at twice the
               learning rate of `last` (beta 0.95, Nesterov: k 1.4)
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.optim import AdamW, Muon
from slipstream.optim.rules import orthogonal_update
from slipstream.tools.study.predictors import Choice

MEMORY = 0.9
"""Decay factor of the running averages to which coefficients are fitted: a window of about ten steps."""


class Fitted:
    """Least squares of the newest update on the `num_terms` updates before it. The normal equations are averaged over
    steps."""

    def __init__(self, num_terms: int) -> None:
        self._num_terms = num_terms
        self._history: list[list[Tensor]] = []
        """Last updates, newest first."""
        self._gram: Tensor | None = None

    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        self._history = [[u.clone() for u in updates], *self._history][: self._num_terms + 1]
        if len(self._history) <= self._num_terms:
            return updates
        # products[i, j] = <u[t-i], u[t-j]>
        products = torch.stack([self._products(i) for i in range(self._num_terms + 1)])
        # Updates grow during the warm-up of the learning rate. Without this normalisation the latest steps would
        # dominate the fit. The maximum and the clamp avoid a division by zero if the newest update is zero.
        size = torch.maximum(products[0, 0], 0.01 * products.diagonal().amax())
        products = products / size.clamp(min=torch.finfo(products.dtype).tiny)
        self._gram = products if self._gram is None else self._gram.lerp(products, 1 - MEMORY)
        # A small ridge keeps the system regular if two updates are collinear or one is zero. If all are zero, the prior
        # makes the last update the prediction.
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
        """pieces: the parameters of the optimizer, in their order in each flat tensor."""
        self._pieces = pieces

    def __call__(self, updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        return self.forecast(optimizer, nesterov=False)

    def forecast(self, optimizer: Optimizer, nesterov: bool) -> list[Tensor]:
        """Returns the update from the momentum alone or, with nesterov, Nesterov's update, in which the last gradient
        counts twice."""
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
    """Returns m or, with nesterov, beta m + (1 - beta) g."""
    if not nesterov:
        return means
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [g.lerp(m, beta) for g, m in zip(gradients, means, strict=True)]


adaptive = Choice(lambda weight, pieces: Fitted(num_terms=1))
fitted = Choice(lambda weight, pieces: Fitted(num_terms=2))
momentum = Choice(lambda weight, pieces: Momentum(pieces), reads_optimizer=True)
damped = Choice(lambda weight, pieces: Damped(Momentum(pieces), weight), has_weight=True, reads_optimizer=True)
