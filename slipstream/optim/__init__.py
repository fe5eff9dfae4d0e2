"""Optimizers, parameter groups, error feedback and learning rates. This code works on tensors and does not depend on
pipelines."""

from .correction import Alignment, predict, update_products
from .groups import (
    Group,
    Hyperparameters,
    assign,
    balance_experts,
    everything,
    is_matrix,
    is_router_bias,
    muon_and_adamw,
)
from .learning_rate import SCHEDULES, constant, cosine, learning_rate_schedule, linear, one_minus_sqrt, wsd
from .optimizer import AdamW, Muon, SignDescent
from .recipes import RECIPES, Recipe
from .rules import SCALES, adamw_update, muon_update, newton_schulz, sign_update

__all__ = [
    "RECIPES",
    "SCALES",
    "SCHEDULES",
    "AdamW",
    "Alignment",
    "Group",
    "Hyperparameters",
    "Muon",
    "Recipe",
    "SignDescent",
    "adamw_update",
    "assign",
    "balance_experts",
    "constant",
    "cosine",
    "everything",
    "is_matrix",
    "is_router_bias",
    "learning_rate_schedule",
    "linear",
    "muon_and_adamw",
    "muon_update",
    "newton_schulz",
    "one_minus_sqrt",
    "predict",
    "sign_update",
    "update_products",
    "wsd",
]
