"""The engine: executes one stage's part of a schedule, with its weight versions and updates."""

from .checkpoints import Checkpoints
from .partition import PartitionError, partition
from .pipeline import Pipeline
from .reduction import Requests
from .sampling import Samples
from .task import Evaluation, EvaluationPart, EvaluationReport, StepReport

__all__ = [
    "Checkpoints",
    "Evaluation",
    "EvaluationPart",
    "EvaluationReport",
    "PartitionError",
    "Pipeline",
    "Requests",
    "Samples",
    "StepReport",
    "partition",
]
