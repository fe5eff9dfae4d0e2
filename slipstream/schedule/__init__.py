"""Schedules as plain data. They are generated, checked, simulated and drawn without torch."""

from .action import Action, Key, Op, requires
from .schedule import EvaluationSteps, Schedule, ScheduleError
from .traits import DEPTHS, SCHEDULES, TRAITS, Traits, waits_for_sum

__all__ = [
    "DEPTHS",
    "SCHEDULES",
    "TRAITS",
    "Action",
    "EvaluationSteps",
    "Key",
    "Op",
    "Schedule",
    "ScheduleError",
    "Traits",
    "requires",
    "waits_for_sum",
]
