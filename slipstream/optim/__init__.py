"""Optimizers, parameter groups, error feedback and learning rates: what knows tensors, not pipelines."""

from .correction import Alignment, predict, update_products
from .groups import Group, Hyperparameters, assign, everything, is_matrix, muon_and_adamw
from .learning_rate import SCHEDULES, constant, cosine, learning_rate_schedule, linear, wsd
from .optimizer import AdamW, Muon
from .recipes import RECIPES, Recipe
from .rules import SCALES, adamw_update, muon_update, newton_schulz

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
    "adamw_update",
    "assign",
    "constant",
    "cosine",
    "everything",
    "is_matrix",
    "learning_rate_schedule",
    "linear",
    "muon_and_adamw",
    "muon_update",
    "newton_schulz",
    "predict",
    "update_products",
    "wsd",
]
