"""Schedules as plain data: made, checked, simulated and drawn without torch."""

from .action import Action, Key, Op, requires
from .schedule import DEPTHS, FLUSHING, SCHEDULES, Schedule, ScheduleError

__all__ = ["DEPTHS", "FLUSHING", "SCHEDULES", "Action", "Key", "Op", "Schedule", "ScheduleError", "requires"]
