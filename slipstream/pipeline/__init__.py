"""Executes what schedule/ says: stages, their weight versions, and the one file that communicates."""

from .comm import ThreadWorld, Transport
from .executor import EvaluationReport, NonFiniteError, PipelineError, StepReport
from .launch import StageFailure, launch, under_torchrun
from .partition import PartitionError, partition
from .pipeline import Pipeline

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
