"""Predictors by name, for tests: those of the package, and those in experiments/."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.tools.study.predictors import Predictor, find_predictor

NOBODY = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
"""For predictors that do not look into the optimizer."""


OTHERS = [f"experiments.predictors.{name}" for name in ("adaptive", "fitted", "momentum", "damped")]


def path_of(name: str) -> str:
    """Those that lost have moved."""
    return next((path for path in OTHERS if path.endswith(f".{name}")), name)


def make_predictor(name: str, weight: float, pieces: list[list[nn.Parameter]]) -> Predictor:
    return find_predictor(path_of(name)).make(weight, pieces)


def predictor_of(name: str, weight: float = 0.5) -> Predictor:
    return make_predictor(name, weight, [])
