"""Schedules as plain data: made, checked, simulated and drawn without torch."""

from .action import Action, Key, Op, requires
from .schedule import (
    DEPTHS,
    FLUSHING,
    SCHEDULES,
    STEPPING_ALONE,
    EvaluationSteps,
    Schedule,
    ScheduleError,
    waits_for_sum,
)

__all__ = [
    "DEPTHS",
    "FLUSHING",
    "SCHEDULES",
    "STEPPING_ALONE",
    "Action",
    "EvaluationSteps",
    "Key",
    "Op",
    "Schedule",
    "ScheduleError",
    "requires",
    "waits_for_sum",
]
