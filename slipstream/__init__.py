"""Slipstream: asynchronous pipeline-parallel pretraining. Train one step behind, without the drag."""

from .optim import AdamW, Group, Muon, muon_and_adamw
from .pipeline import EvaluationReport, Pipeline, StepReport, launch
from .reference import reference_run
from .schedule import Schedule

__all__ = [
    "AdamW",
    "EvaluationReport",
    "Group",
    "Muon",
    "Pipeline",
    "Schedule",
    "StepReport",
    "launch",
    "muon_and_adamw",
    "reference_run",
]
