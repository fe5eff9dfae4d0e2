"""Executes what schedule/ says: stages, their weight versions, and how they reach each other."""

from .comm import Transport
from .executor import EvaluationReport, NonFiniteError, PipelineError, StepReport
from .launch import StageFailure, launch, under_torchrun
from .partition import PartitionError, partition
from .pipeline import Pipeline
from .threads import ThreadWorld

__all__ = [
    "EvaluationReport",
    "NonFiniteError",
    "PartitionError",
    "Pipeline",
    "PipelineError",
    "StageFailure",
    "StepReport",
    "ThreadWorld",
    "Transport",
    "launch",
    "partition",
    "under_torchrun",
]
