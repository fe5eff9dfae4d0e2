"""Slipstream: asynchronous pipeline-parallel pretraining. Train one step behind, without the drag."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import load_weights
    from .observe.metrics import Metrics
    from .optim import AdamW, Group, Muon, muon_and_adamw
    from .pipeline import Checkpoints, Evaluation, EvaluationPart, EvaluationReport, Pipeline, StepReport
    from .precision import Precision
    from .reference import reference_run
    from .schedule import Schedule
    from .transport.launch import launch

__all__ = [
    "AdamW",
    "Checkpoints",
    "Evaluation",
    "EvaluationPart",
    "EvaluationReport",
    "Group",
    "Metrics",
    "Muon",
    "Pipeline",
    "Precision",
    "Schedule",
    "StepReport",
    "launch",
    "load_weights",
    "muon_and_adamw",
    "reference_run",
]

_HOMES = {
    "checkpoint": ("load_weights",),
    "observe.metrics": ("Metrics",),
    "optim": ("AdamW", "Group", "Muon", "muon_and_adamw"),
    "pipeline": ("Checkpoints", "Evaluation", "EvaluationPart", "EvaluationReport", "Pipeline", "StepReport"),
    "precision": ("Precision",),
    "reference": ("reference_run",),
    "schedule": ("Schedule",),
    "transport.launch": ("launch",),
}


def __getattr__(name: str) -> Any:
    """Each name from its home on first use, so that schedules can be made and drawn where there is no torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
