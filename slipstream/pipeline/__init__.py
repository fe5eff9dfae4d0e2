"""Executes what schedule/ says: stages, their weight versions, and how they reach each other."""

from .comm import Mesh, Transport
from .crew import Crew
from .executor import EvaluationReport, NonFiniteError, PipelineError, StepReport
from .launch import StageFailure, launch, launch_crew, under_torchrun
from .partition import PartitionError, partition
from .pipeline import Pipeline
from .reduction import Requests
from .state import StageState, StateError
from .threads import ThreadWorld

__all__ = [
    "Crew",
    "EvaluationReport",
    "Mesh",
    "NonFiniteError",
    "PartitionError",
    "Pipeline",
    "PipelineError",
    "Requests",
    "StageFailure",
    "StageState",
    "StateError",
    "StepReport",
    "ThreadWorld",
    "Transport",
    "launch",
    "launch_crew",
    "partition",
    "under_torchrun",
]
