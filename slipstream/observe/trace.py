"""Writes what the stages did and when: trace.json for Perfetto and chrome://tracing, and the same as a drawing.

    trace = chrome_trace(schedule, spans_by_stage, started_at)
    Path("window.svg").write_text(svg(measured_timeline(trace, Window(start=1.5, seconds=0.2)), "a window"))

In the trace a stage is a process with two rows: one for its actions and waits, and one for updates in the background.
An arrow is a message. The drawing is that of a schedule, with measured times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.files import read_plain_file
from ..pipeline.clock import Activity, Span
from ..schedule import Action, Op, Schedule, ScheduleError
from ..schedule.simulate import Box, Timeline

STAGE_ROW, BACKGROUND_ROW = 0, 1
SHORTEST_WAIT = 10e-6
"""Shortest wait in seconds that the trace shows. A shorter span is the time it takes to find that there is nothing to
wait for."""

LONGEST_TRACE = 1e15
"""Upper bound of all times in a trace, in microseconds: about thirty years."""


class TraceError(ValueError):
    """Raised for a file that is no trace, and for a window that contains no action."""


@dataclass(frozen=True)
class Window:
    """A time interval, in seconds from the start of the trace."""

    start: float
    seconds: float

    def within(self, trace: dict[str, Any]) -> Window:
        """Returns the part of the window that lies within the trace."""
        first, last = _extent(trace)
        start = max(self.start, first)
        return Window(start, min(self.start + self.seconds, last) - start)


# ---- writing a trace


def chrome_trace(
    schedule: Schedule, spans_by_stage: Sequence[Sequence[Span]], started_at: Sequence[float]
) -> dict[str, Any]:
    """Returns a trace in the format of Chrome.

    started_at: for every stage the time at which its clock started, on a clock that all stages share.
    """
    events: list[dict[str, Any]] = []
    for stage, spans in enumerate(spans_by_stage):
        events += _names(stage)
        offset = started_at[stage] - min(started_at)
        events += [
            _event(span, offset) for span in spans if span.activity.is_compute or span.end - span.start > SHORTEST_WAIT
        ]
    events += _messages(events, schedule.num_stages)
    about = {"schedule": schedule.name, "stages": schedule.num_stages, "microbatches": schedule.num_microbatches}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(stage: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": stage, "args": {"sort_index": stage}}
    for row, name in ((STAGE_ROW, "actions"), (BACKGROUND_ROW, "background")):
        yield {"ph": "M", "name": "thread_name", "pid": stage, "tid": row, "args": {"name": name}}


def _event(span: Span, offset: float) -> dict[str, Any]:
    action = span.action
    is_action = span.activity.is_compute
    what = span.activity.name.lower().replace("_", " for ", 1) if span.activity is not Activity.DATA else "data"
    return {
        "ph": "X",
        "name": str(action) if is_action else what,
        "cat": span.activity.name.lower() if is_action else "wait",
        "pid": action.stage,
        "tid": BACKGROUND_ROW if span.in_background else STAGE_ROW,
        "ts": (offset + span.start) * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {
            "stage": action.stage,
            "microbatch": action.microbatch,
            "version": action.version,
            "action": str(action),
        },
    }


def _messages(events: Sequence[dict[str, Any]], num_stages: int) -> Iterator[dict[str, Any]]:
    """Yields an arrow from the action that sent a message to the action that received it, if the trace has both."""
    played = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] in ("forward", "backward"):
            played[event["cat"], event["pid"], event["args"]["microbatch"]] = event
    for (kind, stage, microbatch), sender in played.items():
        neighbour = stage + 1 if kind == "forward" else stage - 1
        taker = played.get((kind, neighbour, microbatch))
        if taker is None or not 0 <= neighbour < num_stages:
            continue
        common = {"name": "activations" if kind == "forward" else "gradient", "cat": "message"}
        common["id"] = f"{kind} {microbatch} from stage {stage}"
        last_moment = sender["ts"] + sender["dur"] * 0.999  # inside the sender's box, or the viewer draws no arrow
        yield {**common, "ph": "s", "pid": stage, "tid": STAGE_ROW, "ts": last_moment}
        yield {**common, "ph": "f", "bp": "e", "pid": neighbour, "tid": STAGE_ROW, "ts": taker["ts"]}


# ---- reading a trace


def read_trace(path: Path) -> dict[str, Any]:
    try:
        trace: dict[str, Any] = json.loads(read_plain_file(path))
        _check_trace(trace)
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}): name the folder of a finished run") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"{path} is no trace that slipstream train wrote: run it again") from error
    return trace


def _check_trace(trace: dict[str, Any]) -> None:
    """Raises a ValueError, KeyError or TypeError if something that the drawing needs is missing or invalid."""
    about, events = trace["otherData"], trace["traceEvents"]
    num_stages, num_microbatches = about["stages"], about["microbatches"]
    if type(num_stages) is not int or not 1 <= num_stages <= len({str(event["pid"]) for event in events}):
        raise ValueError(f"{num_stages} stages")
    if type(num_microbatches) is not int or type(about["schedule"]) is not str:
        raise TypeError("otherData")
    for event in events:
        if event["ph"] != "X":
            continue
        if not all(type(event[key]) in (int, float) and abs(event[key]) < LONGEST_TRACE for key in ("ts", "dur")):
            raise ValueError(f"{event['ts']} and {event['dur']} are no times")
        if event["cat"] != "wait" and not Action.parse(event["args"]["action"]).stage < num_stages:
            raise ValueError(f"{event['args']['action']} is of no stage")
        event["pid"], event["tid"]


def steady_window(trace: dict[str, Any]) -> Window:
    """Returns the window of the last two steps before the pipeline drains, as seen by the last stage."""
    last = trace["otherData"]["stages"] - 1
    starts = [event["ts"] / 1e6 for event in _boxes(trace) if event["cat"] == "forward" and event["pid"] == last]
    if not starts:
        raise TraceError("the trace holds no forward of the last stage: there is no window to draw")
    begin = starts[max(0, len(starts) - 1 - 2 * trace["otherData"]["microbatches"])]
    return Window(begin, max(starts[-1] - begin, 1e-3))


def measured_timeline(trace: dict[str, Any], window: Window) -> Timeline:
    """Returns the part of a trace inside a window, as a timeline in milliseconds from the start of the window.

    Actions that cross an edge of the window are cut there. An update in the background is drawn at the moment it was
    done.
    """
    about = trace["otherData"]
    try:
        schedule = Schedule(about["schedule"], about["stages"], about["microbatches"])
    except ScheduleError as error:
        raise TraceError(str(error)) from error
    boxes = []
    for event in _boxes(trace):
        start, end = (1000 * (time - window.start) for time in (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
        if event["tid"] == BACKGROUND_ROW:
            start = end
        if end > 0 and start < 1000 * window.seconds:
            boxes.append(Box(Action.parse(event["args"]["action"]), max(start, 0.0), min(end, 1000 * window.seconds)))
    if not any(box.action.op is not Op.UPDATE and box.end > box.start for box in boxes):
        first, last = _extent(trace)
        raise TraceError(
            f"nothing was played in the window of {window.seconds:g} s from {window.start:g} s: the trace holds "
            f"{first:.3f} s to {last:.3f} s"
        )
    return Timeline(schedule, tuple(sorted(boxes, key=lambda box: (box.start, box.action.stage))))


def _boxes(trace: dict[str, Any]) -> list[dict[str, Any]]:
    played = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "wait"]
    return sorted(played, key=lambda event: event["ts"])


def _extent(trace: dict[str, Any]) -> tuple[float, float]:
    boxes = _boxes(trace)
    return (
        min((event["ts"] / 1e6 for event in boxes), default=0.0),
        max(((event["ts"] + event["dur"]) / 1e6 for event in boxes), default=0.0),
    )
