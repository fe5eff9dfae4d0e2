"""Where a stage's time goes: computing, waiting, or neither.

A stage is always at exactly one activity, and `enter` says when the next one begins, so the seconds of all activities
add up to the wall time. On the CPU the host's clock is right. On CUDA the host runs ahead of the device, so the time is
taken between events on the stream, read once they have passed: nothing is synchronised, and a wait is what the device
waited, not the host.
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
"""Spans: some four thousand actions, and what was waited for and read before each."""
Mark = float | torch.cuda.Event


class Activity(IntEnum):
    """The order is that of TimeSplit's fields."""

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
    """Seconds of a stage by what it was at."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    """In the foreground: what is done beside other actions takes none of the stage's own time."""
    evaluation: float = 0.0
    wait_activations: float = 0.0
    wait_gradients: float = 0.0
    wait_sums: float = 0.0
    """For the sums over stages that an update needs, and for an update that is made in the background."""
    data: float = 0.0
    """To read a microbatch."""
    other: float = 0.0
    """The executor itself, sending included."""

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def utilisation(self) -> float:
        """The share spent computing; nan if there is no time to share."""
        compute = self.forward + self.backward + self.update + self.evaluation
        return compute / self.total if self.total > 0 else math.nan

    def shares(self) -> TimeSplit:
        return TimeSplit(*(seconds / self.total if self.total > 0 else math.nan for seconds in self))


class Span(NamedTuple):
    """What a stage was at, in seconds since the clock was made. A tuple, because every action leaves a few of them."""

    action: Action
    """That was played, or waited for."""
    activity: Activity
    start: float
    end: float
    in_background: bool = False
    """Beside other spans of the stage."""


class Watcher(Protocol):
    """Is told what the stage is at, as the host sees it."""

    def at(self, activity: Activity, action: Action | None) -> None: ...

    def beside(self, is_updating: bool) -> None:
        """An update in the background begins or ends."""


class _Reading(NamedTuple):
    num_actions: int
    seconds: tuple[float, ...]
    executor_cpu: float

    def since(self, earlier: _Reading) -> TimeSplit:
        return TimeSplit(*(now - then for now, then in zip(self.seconds, earlier.seconds, strict=True)))


class Clock:
    def __init__(self, device: torch.device, steady_from_step: int, num_microbatches: int) -> None:
        """The steady window opens with the first backward of `steady_from_step` or later, when the pipeline is filled,
        and closes with the latest forward, before it drains."""
        self._cuda = device.type == "cuda"
        self._steady_from = steady_from_step * num_microbatches
        self.spans: deque[Span] = deque(maxlen=TRACE_LENGTH)
        """Of what had an action, in the order it ended."""
        self.num_background_updates, self.background_seconds = 0, 0.0
        """Updates that ran beside other actions."""
        self._num_actions = 0
        self._seconds = [0.0] * len(Activity)
        self._activity, self._since = Activity.OTHER, 0.0
        self._action: Action | None = None
        self._executor_cpu, self._cpu_since = 0.0, time.thread_time()
        self._steady: _Reading | None = None
        self._latest: _Reading | None = None
        self._reported = self._read()
        self._passing: deque[tuple[torch.cuda.Event, Activity, Action | None]] = deque()
        self._in_background: deque[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.watcher: Watcher | None = None
        self._origin = self.mark()
        self.started_at = time.time()
        """On the calendar's clock, which stages on one machine share."""

    def mark(self) -> Mark:
        """Now, as the device sees it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(self, activity: Activity, action: Action | None = None) -> None:
        """From now on the stage is at `activity`, for that action."""
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
        """Where an update beside other actions begins or ends."""
        if self.watcher is not None:
            self.watcher.beside(is_updating)
        return self.mark()

    def add_background(self, action: Action, start: Mark, end: Mark) -> None:
        """An update that was made beside other actions."""
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
            if self._steady is not None and self._activity is Activity.FORWARD:
                self._latest = self._read()
        if self._steady is None and activity is Activity.BACKWARD and action and action.microbatch >= self._steady_from:
            self._steady = self._read()
        self._activity, self._action, self._since = activity, action, now

    def _read(self) -> _Reading:
        return _Reading(self._num_actions, tuple(self._seconds), self._executor_cpu)

    @property
    def latest(self) -> list[Span]:
        """The spans, and as the last one what the stage is at now; on CUDA, as far as it is known yet."""
        spans = list(self.spans)
        if self._action is not None:
            now = self.mark()
            passed = now - self._origin if isinstance(now, float) and isinstance(self._origin, float) else self._since
            spans.append(Span(self._action, self._activity, self._since, passed))
        return spans

    def split(self) -> TimeSplit:
        """Of the steady window; all zero before there is one."""
        if self._steady is None or self._latest is None:
            return TimeSplit()
        return self._latest.since(self._steady)

    @property
    def num_actions(self) -> int:
        """Played in the steady window; updates in the background are not among them."""
        return self._latest.num_actions - self._steady.num_actions if self._latest and self._steady else 0

    @property
    def executor_seconds_per_action(self) -> tuple[float, float]:
        """Of the steady window, by the wall's clock and by the thread's own, which stands still while the core is
        another's, such as an update's in the background. nan before there is a window, and the latter on CUDA."""
        if not self.num_actions or self._steady is None or self._latest is None:
            return math.nan, math.nan
        cpu = math.nan if self._cuda else self._latest.executor_cpu - self._steady.executor_cpu
        return self.split().other / self.num_actions, cpu / self.num_actions

    def split_since_last(self) -> TimeSplit:
        """Since this was asked before; on CUDA, as far as it is known yet."""
        last, self._reported = self._reported, self._read()
        return self._reported.since(last)

    def finish(self) -> None:
        """Waits for what is still running on the device, at the end of a run."""
        self.enter(Activity.OTHER)
        if self._cuda:
            self._collect(wait=True)
