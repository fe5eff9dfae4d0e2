"""Predictors of the next update. Error feedback runs a batch on z - lam d w, where w is the predicted next update.

The paper predicts the last update. A pipeline uses the predictor of its optimizers, which is the same except for AdamW.
A study can compare others: `predictor` of a cell is a name below, or the import path of a `Choice` of your own, such as
those of experiments/predictors.py. u is the update just made, v the one before. All tensors stay on the device.

    (none)     the predictor of a pipeline
    last       w = u
    two_term   w = u + k (u - v)        k > 0 continues a trend, k < 0 averages it away
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from ...config.imports import find
from ...errors import ConfigError
from ...optim import AdamW
from ...optim.optimizer import expects_nesterov

Predictor = Callable[[list[Tensor], Optimizer], list[Tensor]]
"""(the updates just made, as flat tensors; the optimizer that made them) -> the updates expected next, which the caller
may change. Every parameter group has a predictor of its own, which may keep state."""


def last_update(updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
    return updates


def own_prediction(updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
    """Returns the prediction of the optimizer itself, which has one and whose parameters are the flat tensors."""
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


@dataclass(frozen=True)
class Choice:
    """A predictor that a cell can name."""

    make: Callable[[float, list[list[nn.Parameter]]], Predictor]
    """(weight, the optimizer's parameters in their order in each flat tensor) -> the predictor of one group"""
    has_weight: bool = False
    """Whether predictor_weight counts."""
    reads_optimizer: bool = False
    """Whether it reads the state of Muon and AdamW, and works with no other optimizer."""


PREDICTORS = {
    "last": Choice(lambda weight, pieces: last_update),
    "two_term": Choice(lambda weight, pieces: TwoTerm(weight), has_weight=True),
}
"""By the name that a cell uses."""


def find_predictor(name: str) -> Choice:
    found = find("predictor", name, PREDICTORS)
    if not isinstance(found, Choice):
        raise ConfigError(f"predictor = {name!r} is no Choice of slipstream.tools.study.predictors: give one")
    return found


def pipeline_predictor(optimizer: Optimizer) -> Predictor:
    has_own = isinstance(optimizer, AdamW) and any(map(expects_nesterov, optimizer.param_groups))
    return own_prediction if has_own else last_update
