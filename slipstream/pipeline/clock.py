"""Measures how a stage spends its time: computing, waiting, or neither.

A stage always has exactly one activity, and `enter` marks the beginning of the next one. So the seconds of all
activities add up to the wall time. On the CPU the host's clock is right. On CUDA the host runs ahead of the device, so
the time is measured between events on the stream, which are read after they have passed. Nothing is synchronised, and a
wait is the time that the device waited, not the host.
"""

from __future__ import annotations

import math
import time
from collections import deque
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from ..schedule import Action

TRACE_LENGTH = 16384
"""Number of spans to keep: about four thousand actions, with the waits and reads before each."""
Mark = float | torch.cuda.Event


class Activity(IntEnum):
    """What a stage is doing. The order is that of the fields of TimeSplit."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    EVALUATION = 3
    WAIT_ACTIVATIONS = 4
    WAIT_GRADIENTS = 5
    WAIT_SUMS = 6
    DATA = 7
    OTHER = 8

    @property
    def is_compute(self) -> bool:
        return self <= Activity.EVALUATION


class TimeSplit(NamedTuple):
    """Seconds that a stage spent on each activity."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    """Seconds of updates in the foreground. Background updates run in parallel with other actions and do not count."""
    evaluation: float = 0.0
    wait_activations: float = 0.0
    wait_gradients: float = 0.0
    wait_sums: float = 0.0
    """Seconds of waiting for the sums over stages that an update needs, and for updates that run in the background."""
    data: float = 0.0
    """Seconds of reading microbatches."""
    other: float = 0.0
    """Seconds of the executor itself, including sends."""

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def utilisation(self) -> float:
        """The share of the time spent computing. nan if the total is zero."""
        compute = self.forward + self.backward + self.update + self.evaluation
        return compute / self.total if self.total > 0 else math.nan

    def shares(self) -> TimeSplit:
        return TimeSplit(*(seconds / self.total if self.total > 0 else math.nan for seconds in self))


class Span(NamedTuple):
    """One activity of a stage, in seconds since the clock was made. It is a tuple, because every action adds several
    spans."""

    action: Action
    """Action that was executed or waited for."""
    activity: Activity
    start: float
    end: float
    in_background: bool = False
    """Whether it ran in parallel with other spans of the stage."""


class Watcher(Protocol):
    """An observer that is notified of the activity of the stage, as the host sees it."""

    def at(self, activity: Activity, action: Action | None) -> None: ...

    def beside(self, is_updating: bool) -> None:
        """Is called when an update in the background begins or ends."""


class _Reading(NamedTuple):
    """The totals of a clock at one moment."""

    num_actions: int
    seconds: tuple[float, ...]
    executor_cpu: float

    def since(self, earlier: _Reading) -> TimeSplit:
        return TimeSplit(*(now - then for now, then in zip(self.seconds, earlier.seconds, strict=True)))


class Clock:
    """Measures the time that a stage spends on each activity."""

    def __init__(self, device: torch.device, steady_from_step: int, num_microbatches: int) -> None:
        """Makes a clock. Its steady window opens with the first backward of `steady_from_step` or a later step, when
        the pipeline is filled. It closes with the latest forward, before the pipeline drains."""
        self._cuda = device.type == "cuda"
        self._steady_from = steady_from_step * num_microbatches
        self.spans: deque[Span] = deque(maxlen=TRACE_LENGTH)
        """Spans of activities that belong to an action, in the order in which they ended."""
        self.num_background_updates, self.background_seconds = 0, 0.0
        """Number and total seconds of updates that ran in the background."""
        self._num_actions = 0
        self._seconds = [0.0] * len(Activity)
        self._activity, self._since = Activity.OTHER, 0.0
        self._action: Action | None = None
        self._executor_cpu, self._cpu_since = 0.0, time.thread_time()
        self._is_steady = False
        self._steady = self._latest = self._reported = self._read()
        self._passing: deque[tuple[torch.cuda.Event, Activity, Action | None]] = deque()
        self._in_background: deque[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.watcher: Watcher | None = None
        self._origin = self.mark()
        self.started_at = time.time()
        """Wall-clock time at which the clock was made, which is common to the stages on one machine."""

    def mark(self) -> Mark:
        """Returns the current time, as the device sees it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(self, activity: Activity, action: Action | None = None) -> None:
        """Starts an activity, for an action if one is given. The previous activity ends."""
        now = self.mark()
        if self.watcher is not None:
            self.watcher.at(activity, action)
        if isinstance(now, float):
            assert isinstance(self._origin, float)
            cpu = time.thread_time()
            if self._activity is Activity.OTHER:
                self._executor_cpu += cpu - self._cpu_since
            self._cpu_since = cpu
            self._turn(now - self._origin, activity, action)
        else:
            self._passing.append((now, activity, action))
            self._collect(wait=False)

    def mark_background(self, is_updating: bool) -> Mark:
        """Marks the beginning or end of an update in the background."""
        if self.watcher is not None:
            self.watcher.beside(is_updating)
        return self.mark()

    def add_background(self, action: Action, start: Mark, end: Mark) -> None:
        """Adds an update that was made in the background."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._in_background.append((action, start, end))
        elif isinstance(start, float) and isinstance(end, float) and isinstance(self._origin, float):
            self._add_background(action, start - self._origin, end - self._origin)

    def _add_background(self, action: Action, start: float, end: float) -> None:
        self.num_background_updates += 1
        self.background_seconds += end - start
        self.spans.append(Span(action, Activity.UPDATE, start, end, in_background=True))

    def _collect(self, wait: bool) -> None:
        assert isinstance(self._origin, torch.cuda.Event)
        while self._passing and (wait or self._passing[0][0].query()):
            event, activity, action = self._passing.popleft()
            if wait:
                event.synchronize()
            self._turn(self._origin.elapsed_time(event) / 1000, activity, action)
        while self._in_background and (wait or self._in_background[0][2].query()):
            action, start, end = self._in_background.popleft()
            seconds = [self._origin.elapsed_time(event) / 1000 for event in (start, end)]
            self._add_background(action, *seconds)

    def _turn(self, now: float, activity: Activity, action: Action | None) -> None:
        self._seconds[self._activity] += now - self._since
        if (left := self._action) is not None:
            self.spans.append(Span(left, self._activity, self._since, now))
            if self._activity.is_compute:
                self._num_actions += 1
            if self._is_steady and self._activity is Activity.FORWARD:
                self._latest = self._read()
        is_filled = activity is Activity.BACKWARD and action is not None and action.microbatch >= self._steady_from
        if is_filled and not self._is_steady:
            self._is_steady = True
            self._steady = self._latest = self._read()
        self._activity, self._action, self._since = activity, action, now

    def _read(self) -> _Reading:
        return _Reading(self._num_actions, tuple(self._seconds), self._executor_cpu)

    @property
    def latest(self) -> list[Span]:
        """The spans, followed by that of the current activity if it has an action. On CUDA, only what the host knows
        already."""
        spans = list(self.spans)
        if self._action is not None:
            now = self.mark()
            passed = now - self._origin if isinstance(now, float) and isinstance(self._origin, float) else self._since
            spans.append(Span(self._action, self._activity, self._since, passed))
        return spans

    def split(self) -> TimeSplit:
        """Returns the times of the steady window. All are zero before it opens."""
        return self._latest.since(self._steady)

    @property
    def num_actions(self) -> int:
        """Number of actions executed in the steady window, without updates in the background."""
        return self._latest.num_actions - self._steady.num_actions

    @property
    def executor_seconds_per_action(self) -> tuple[float, float]:
        """Seconds of the executor per action of the steady window, as wall time and as CPU time of the thread. The CPU
        time does not advance while another thread, such as a background update, has the core. Both are nan before there
        is a window. The CPU time is nan on CUDA."""
        if not self.num_actions:
            return math.nan, math.nan
        cpu = math.nan if self._cuda else self._latest.executor_cpu - self._steady.executor_cpu
        return self.split().other / self.num_actions, cpu / self.num_actions

    def split_since_last(self) -> TimeSplit:
        """Returns the times since the previous call. On CUDA, only what the host knows already."""
        last, self._reported = self._reported, self._read()
        return self._reported.since(last)

    def finish(self) -> None:
        """Waits for the work that is still running on the device, at the end of a run."""
        self.enter(Activity.OTHER)
        if self._cuda:
            self._collect(wait=True)
