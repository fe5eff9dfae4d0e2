"""Chooses values for the fields that a configuration leaves open, by the machine and by the optimizer.

    config = settled(Config())          # train.device = "cpu" or "cuda", and all that follows from it

A run saves the settled configuration, so that nothing about it has to be guessed later.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any, Literal

import torch

from ..errors import ConfigError
from ..optim.recipes import RECIPES
from ..precision import Precision
from ..transport.environment import under_torchrun
from .imports import find
from .layout import num_processes
from .schema import Config, OptimizerSection

LEARNING_RATES = {"muon": 0.02, "adamw": 0.001} | {name: recipe.learning_rate for name, recipe in RECIPES.items()}
"""Default peak learning rate by optimizer name: the best of our own sweep (docs/results/delay.md, Learning rates). For
other models these values are only a starting point."""
ADAMW_LEARNING_RATE = 0.003
"""Default peak learning rate of AdamW for the parameters that another optimizer leaves to it."""


def settled(config: Config, device: Literal["cpu", "cuda"] | None = None) -> Config:
    """Returns the configuration with the device, dtypes and learning rates filled in where they were left open.

    device: device to choose if train.device = "auto". None means GPUs if there are enough, and CPUs otherwise.
    """
    if config.train.device == "auto":
        has_enough = torch.cuda.is_available() and torch.cuda.device_count() >= num_gpus_wanted(config)
        chosen: Literal["cpu", "cuda"] = device or ("cuda" if has_enough else "cpu")
        config = replace(config, train=replace(config.train, device=chosen))
    in_bf16 = config.train.device == "cuda" and config.train.dtype == "float32"
    train, optimizer = config.train, config.optimizer
    if train.compute_dtype is None and in_bf16:
        train = replace(train, compute_dtype="bfloat16")
    if optimizer.newton_schulz_dtype is None:
        optimizer = replace(optimizer, newton_schulz_dtype="bfloat16" if in_bf16 else "float32")
    rate, adamw_rate = peak_rates_of(optimizer)
    optimizer = replace(optimizer, learning_rate=rate)
    if leaves_rest_to_adamw(optimizer):
        optimizer = replace(optimizer, adamw_learning_rate=adamw_rate)
    return replace(config, train=train, optimizer=optimizer)


def precision_of(config: Config) -> Precision:
    train = config.train
    names = train.compute_dtype, train.gradient_dtype, train.reduction_dtype
    return Precision.of(getattr(torch, train.dtype), *(getattr(torch, name) if name else None for name in names))


def may_share_a_gpu(config: Config) -> bool:
    section = config.pipeline
    return section.transport == "thread" or section.share_gpu or section.backend == "gloo"


def num_gpus_wanted(config: Config) -> int:
    """Returns the number of GPUs that the processes on this machine need: one for each, or 1 if they share a GPU."""
    if may_share_a_gpu(config):
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if under_torchrun() else num_processes(config)


def leaves_rest_to_adamw(section: OptimizerSection) -> bool:
    """Returns whether the optimizer updates only matrices, so that AdamW updates all other parameters."""
    return section.name == "muon" or (section.name in RECIPES and RECIPES[section.name].matrices_only)


def peak_rates_of(section: OptimizerSection) -> tuple[float, float]:
    """Returns the peak learning rates of the optimizer, and of AdamW for the parameters that are left to it."""
    rate = section.learning_rate
    if rate is None:
        rate = LEARNING_RATES[section.name] if section.name in LEARNING_RATES else _rate_of_class(section.name)
    return rate, ADAMW_LEARNING_RATE if section.adamw_learning_rate is None else section.adamw_learning_rate


def _rate_of_class(path: str) -> float:
    rate = inspect.signature(optimizer_class(path)).parameters.get("lr")
    if rate is None or not isinstance(rate.default, (int, float)):
        raise ConfigError(f"optimizer.learning_rate is missing, and {path} has none to begin with: give one")
    return float(rate.default)


def optimizer_class(path: str) -> Any:
    known = ", ".join(LEARNING_RATES)
    cls = find("optimizer.name", path, {}, f"use {known} or an import path such as torch.optim.SGD")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.name = {path!r} is no torch optimizer: use one, such as torch.optim.SGD")
    return cls
