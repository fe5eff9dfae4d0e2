"""Where a stage's time goes: busy with actions, or waiting.

On the CPU the host's clock is right. On CUDA the host runs ahead of the device, so an action's time is taken between
two events on the stream, read once they have passed: nothing is synchronised.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import torch

from ..schedule import Action, Op

TRACE_LENGTH = 4096
Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Span:
    """An action as it was played, in seconds since the clock was made."""

    action: Action
    start: float
    end: float


class Clock:
    def __init__(self, device: torch.device, steady_from_step: int, num_microbatches: int) -> None:
        """The steady window opens with the first backward of `steady_from_step` or later, when the pipeline is filled,
        and closes with the latest forward, before it drains."""
        self._cuda = device.type == "cuda"
        self._origin = self.mark()
        self.started_at = time.time()
        """On the calendar's clock, which stages on one machine share."""
        self._steady_from = steady_from_step * num_microbatches
        self._running: deque[tuple[Action, torch.cuda.Event, torch.cuda.Event, bool]] = deque()
        self.spans: deque[Span] = deque(maxlen=TRACE_LENGTH)
        self.busy_by_op = dict.fromkeys(Op, 0.0)
        self._busy = 0.0
        self._steady: tuple[float, float] | None = None
        self._latest: tuple[float, float] | None = None

    def mark(self) -> Mark:
        """Now: an action has all it needs and begins, or it ends."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, action: Action, start: Mark, end: Mark, in_background: bool = False) -> None:
        """in_background: beside other actions, so that it took no time of the stage's own."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._running.append((action, start, end, in_background))
            self._collect(wait=False)
        elif isinstance(start, float) and isinstance(end, float) and isinstance(self._origin, float):
            self._add(Span(action, start - self._origin, end - self._origin), in_background)

    def _collect(self, wait: bool) -> None:
        assert isinstance(self._origin, torch.cuda.Event)
        while self._running and (wait or self._running[0][2].query()):
            action, start, end, in_background = self._running.popleft()
            if wait:
                end.synchronize()
            seconds = [self._origin.elapsed_time(event) / 1000 for event in (start, end)]
            self._add(Span(action, *seconds), in_background)

    def _add(self, span: Span, in_background: bool) -> None:
        action = span.action
        if self._steady is None and action.op is Op.BACKWARD and action.microbatch >= self._steady_from:
            self._steady = span.start, self._busy
        self.spans.append(span)
        self.busy_by_op[action.op] += span.end - span.start
        if not in_background:
            self._busy += span.end - span.start
        if self._steady is not None and action.op is Op.FORWARD:
            self._latest = span.end, self._busy

    def utilisation(self) -> float:
        """The share of the steady window spent on actions; nan before there is one."""
        if self._steady is None or self._latest is None or self._latest[0] <= self._steady[0]:
            return math.nan
        return (self._latest[1] - self._steady[1]) / (self._latest[0] - self._steady[0])

    def finish(self) -> None:
        """Waits for what is still running on the device, at the end of a run."""
        if self._cuda:
            self._collect(wait=True)
