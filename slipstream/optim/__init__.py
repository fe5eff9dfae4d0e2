"""Optimizers, parameter groups, error feedback and learning rates. This code works on tensors and does not depend on
pipelines."""

from .correction import Alignment, predict, update_products
from .groups import Group, assign, balance_experts, is_matrix, muon_and_adamw
from .learning_rate import learning_rate_schedule
from .optimizer import AdamW, Muon, SignDescent
from .recipes import RECIPES, Recipe
from .rules import adamw_update, newton_schulz

__all__ = [
    "RECIPES",
    "AdamW",
    "Alignment",
    "Group",
    "Muon",
    "Recipe",
    "SignDescent",
    "adamw_update",
    "assign",
    "balance_experts",
    "is_matrix",
    "learning_rate_schedule",
    "muon_and_adamw",
    "newton_schulz",
    "predict",
    "update_products",
]
