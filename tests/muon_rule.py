"""Muon's update of one matrix or stack, put together from the functions that the optimizer calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.optim.kernels import advance_momentum
from slipstream.optim.rules import momentum_weight, orthogonal_update


def muon_direction(
    gradient: Tensor, momentum: Tensor, *, beta: float, nesterov: bool, lookahead: float = 1.0
) -> Tensor:
    direction = torch.empty_like(gradient)
    weight = momentum_weight(beta, nesterov, lookahead)
    advance_momentum(gradient, momentum, direction, beta=beta, weight=weight)
    return direction


def muon_update(
    gradient: Tensor, momentum: Tensor, *, beta: float, nesterov: bool, lookahead: float = 1.0, **settings: Any
) -> Tensor:
    direction = muon_direction(gradient, momentum, beta=beta, nesterov=nesterov, lookahead=lookahead)
    return orthogonal_update(direction, **settings)
