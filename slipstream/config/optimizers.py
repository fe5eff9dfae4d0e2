"""Builds parameter groups, peak rates and the learning-rate schedule from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..optim import RECIPES, AdamW, Group, balance_experts, is_matrix, learning_rate_schedule, muon_and_adamw
from .defaults import optimizer_class, peak_rates_of, settled
from .rules import has_experts
from .schema import Config, OptimizerSection

MAX_WARMUP_STEPS = 1000
"""Largest number of warmup steps in a run that does not set it. The default is a fraction of the run, which would be
too long in a long run."""


def parameter_groups(config: Config) -> list[Group]:
    return [group for group, _ in _groups_and_rates(config)]


def peak_rates(config: Config) -> dict[str, float]:
    """Returns the peak learning rate of every group, by its name."""
    return {group.name: rate for group, rate in _groups_and_rates(config)}


def _groups_and_rates(config: Config) -> list[tuple[Group, float]]:
    section = settled(config).optimizer
    rate, adamw_rate = peak_rates_of(section)
    # The default is that of DeepSeek-V3 (arXiv:2412.19437, section 4.2).
    balance_rate = 0.001 if section.balance_rate is None else section.balance_rate
    balance = [(balance_experts(balance_rate), balance_rate)] if has_experts(config) else []
    shared: dict[str, Any] = {
        "weight_decay": section.weight_decay,
        "error_feedback": section.error_feedback,
        "clip_norm": section.clip_norm or None,
    }
    if section.name == "muon":
        matrices, rest = muon_and_adamw(
            muon_lr=rate,
            muon_beta=section.momentum,
            muon_nesterov=section.nesterov,
            muon_lookahead=1.0 if section.lookahead is None else section.lookahead,
            muon_ns_steps=section.newton_schulz_steps,
            muon_ns_dtype=getattr(torch, section.newton_schulz_dtype or "float32"),
            adamw_lr=adamw_rate,
            adamw_beta1=section.beta1,
            adamw_beta2=section.beta2,
            adamw_nesterov=section.adamw_nesterov,
            adamw_predictor=adamw_predictor(section),
            **shared,
        )
        return [*balance, (matrices, rate), (rest, adamw_rate)]
    adamw = partial(
        AdamW,
        beta1=section.beta1,
        beta2=section.beta2,
        nesterov=section.adamw_nesterov,
        predictor=adamw_predictor(section),
    )
    if section.name == "adamw":
        return [*balance, (Group("all", partial(adamw, lr=rate), elementwise=True, **shared), rate)]
    if section.name in RECIPES:
        recipe, make, rest_rate = RECIPES[section.name], _recipe_optimizer(section), rate
        matrices = Group("matrices", make, is_matrix, elementwise=recipe.elementwise, **shared)
        if recipe.matrices_only:
            make, rest_rate = partial(adamw, lr=adamw_rate), adamw_rate
        rest = Group("rest", make, elementwise=recipe.elementwise or recipe.matrices_only, **shared)
        return [*balance, (matrices, rate), (rest, rest_rate)]
    cls = optimizer_class(section.name)
    arguments: dict[str, float] = {"lr": rate, **section.arguments}
    if "weight_decay" in inspect.signature(cls).parameters:
        arguments["weight_decay"] = 0.0  # the Group decays instead: error feedback would extrapolate this decay
    return [*balance, (Group("all", partial(cls, **arguments), **shared), rate)]


def adamw_predictor(section: OptimizerSection) -> str:
    return section.adamw_predictor or ("nesterov" if section.name == "adamw" else "last")


def _recipe_optimizer(section: OptimizerSection) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    recipe = RECIPES[section.name]
    try:
        return recipe.optimizer(peak_rates_of(section)[0], section.arguments)
    except (ImportError, AttributeError) as error:  # the package is missing, or too old to have the class
        raise ConfigError(
            f"optimizer.name = {section.name!r} needs pytorch-optimizer 4.1 or newer ({error}): "
            "pip install --upgrade pytorch-optimizer"
        ) from error


def learning_rate(config: Config) -> Callable[[int], float]:
    """Returns the function from the number of an update to the factor that multiplies every peak learning rate."""
    section, steps = config.optimizer, config.optimizer.horizon_steps or config.train.steps
    warmup, decay = section.warmup_steps, section.decay_steps
    if warmup is None:
        warmup = min(steps // 10, MAX_WARMUP_STEPS, steps - (decay or 0))
    if decay is None:
        decay = min(steps // 5, steps - warmup)
    return learning_rate_schedule(
        section.schedule,
        warmup_steps=warmup,
        total_steps=steps,
        decay_steps=decay,
        final_fraction=section.final_fraction,
    )
