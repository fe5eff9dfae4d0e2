"""Reads the folder of a run. A missing file becomes a note in the report. A file that cannot be read raises an error
that names it."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...config.files import open_plain_file, read_plain_file
from ...config.toml import read_toml
from ...errors import UsageError
from ...schedule import Action, Op
from .series import Column

FILES = ("config.toml", "metrics.jsonl", "summary.json")
"""Files of a run. A folder without any of them is not a run."""
MAX_SPANS = 12_000
"""Maximum number of spans of a trace, of which the latest are kept. A browser draws this many smoothly."""
LETTERS = {op.name.lower(): str(op) for op in Op} | {"evaluation": str(Op.EVALUATE), "wait": "W"}
"""Letter of an event on the timeline, by the event's category in the trace."""

Key = tuple[str, ...]
"""Path of a number in the JSON object of an update, such as ("learning_rates", "matrices")."""


@dataclass(frozen=True)
class Metrics:
    """Content of metrics.jsonl by column, with one number per update. nan means that the update has no value."""

    steps: Column
    """Number of updates made, counted from 1."""
    columns: dict[Key, Column]
    validation_steps: Column
    validation_losses: Column
    validation_parts: dict[str, Column]
    """Validation loss of every source at `validation_steps`, if a run evaluates each."""
    is_torn: bool
    """Whether the last line is incomplete because the run was still writing it."""

    def group(self, name: str) -> dict[str, Column]:
        """Returns the columns of one object by the names in it, or the columns of one list by index."""
        return {key[1]: column for key, column in self.columns.items() if len(key) == 2 and key[0] == name}

    def column(self, *key: str) -> Column:
        return self.columns.get(key, np.full(len(self.steps), math.nan))

    def known(self, *key: str) -> Column:
        """Returns the finite values of a column."""
        column = self.column(*key)
        return column[np.isfinite(column)]


@dataclass(frozen=True)
class TraceSpan:
    stage: int
    op: str
    microbatch: int
    version: int
    start: float
    """Start in microseconds. The duration has the same unit."""
    duration: float
    name: str
    in_background: bool
    """Whether the action ran in the background, at the same time as other actions."""


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    metrics: Metrics
    summary: dict[str, Any]
    """Content of summary.json. Empty if the run has not ended."""
    config: dict[str, Any]
    """Value of every setting, by its dotted path."""
    spans: tuple[TraceSpan, ...]
    notes: tuple[str, ...]
    """Sentences that say what is missing."""


def read_run(folder: Path, name: str, advance: Callable[[int], None] = lambda num_bytes: None) -> Run:
    """Reads the folder of a run. advance: called with the number of bytes of each line of metrics.jsonl that has been
    read."""
    check_is_run(folder)
    notes = []
    summary = _read_object(folder / "summary.json")
    if summary is None:
        notes.append(
            "There is no summary.json: the run has not ended, or was stopped. The figures here are those of the "
            "steps so far; memory and weight versions are known at the end."
        )
    metrics = read_metrics(folder / "metrics.jsonl", advance)
    if metrics.is_torn:
        notes.append("The last line of metrics.jsonl is half a line and was left out.")
    notes += _missing_metrics(metrics)
    config = _read_config(folder, summary or {})
    if not config:
        notes.append("There is no config.toml: the configuration is not known.")
    spans, note = _spans(_read_object(folder / "trace.json"))
    notes += [note] if note else []
    return Run(name, folder, metrics, summary or {}, config, spans, tuple(notes))


def check_is_run(folder: Path) -> None:
    try:
        if any((folder / name).exists() for name in FILES):
            return
        inner = sorted(path for path in folder.glob("*") if (path / "config.toml").exists()) if folder.is_dir() else []
    except OSError as error:
        raise _unreadable(folder, error) from error
    if inner:
        remedy = f"name a folder in it, such as {inner[0]}"
    elif folder.exists():
        remedy = f"it has none of {', '.join(FILES)}; name a folder that slipstream train has written"
    else:
        remedy = "it does not exist; name a folder that slipstream train has written, such as runs/default"
    raise UsageError(f"run = {str(folder)!r} is no run: {remedy}")


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be read ({error.strerror}): check the file and its permissions")


# ---- metrics.jsonl


class _Rows:
    """The updates or the evaluations of metrics.jsonl, by column."""

    def __init__(self) -> None:
        self.steps = array("d")
        self._columns: dict[Key, array[float]] = {}

    def add(self, step: int, row: dict[str, Any]) -> None:
        for key, value in _flat(row):
            column = self._columns.setdefault(key, array("d"))
            column.extend([math.nan] * (len(self.steps) - len(column)))  # the rows before that lack it
            column.append(value)
        self.steps.append(step)

    def columns(self) -> dict[Key, Column]:
        length = len(self.steps)
        return {key: np.array([*column, *[math.nan] * (length - len(column))]) for key, column in self._columns.items()}


def read_metrics(path: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> Metrics:
    updates, evaluations = _Rows(), _Rows()
    is_torn = False
    for number, line in enumerate(_lines(path), 1):
        advance(len(line))
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                is_torn = True
                break
            raise _garbage(path, number, "it is not JSON") from error
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise _garbage(path, number, "it is no object with a step")
        (evaluations if "val_loss" in row else updates).add(step, row)
    columns = evaluations.columns()
    losses = columns.get(("val_loss",), np.full(len(evaluations.steps), math.nan))
    parts = {key[1]: column for key, column in columns.items() if key[0] == "val_losses" and len(key) == 2}
    return Metrics(np.array(updates.steps), updates.columns(), np.array(evaluations.steps), losses, parts, is_torn)


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file: none if it does not exist."""
    try:
        with open_plain_file(path) as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from error


def _garbage(path: Path, number: int, why: str) -> UsageError:
    return UsageError(f"{path} line {number} is no update and no evaluation, {why}: remove that line")


def _number(value: Any) -> float:
    """Returns nan for a value that is not a number, so that the chart has a gap there."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def _flat(value: Any, key: Key = ()) -> Iterator[tuple[Key, float]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, (*key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flat(item, (*key, str(index)))
    else:
        yield key, _number(value)


def _missing_metrics(metrics: Metrics) -> list[str]:
    if not len(metrics.steps):
        return ["There are no metrics yet: no update has been made, or metrics.jsonl is missing."]
    notes = []
    if not len(metrics.validation_steps):
        notes.append("There is no held-out loss: the run has not evaluated yet, or does not evaluate.")
    if not any(key[0] == "stage_seconds" for key in metrics.columns):
        notes.append("Where each stage's time went was not recorded for every step; older runs do not have it.")
    num_skipped = int(np.nansum(metrics.column("skipped")))
    if num_skipped:
        notes.append(f"{num_skipped} updates were skipped on account of an inf or a nan.")
    return notes


# ---- the other files


def _read_object(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file, or None if the file does not exist."""
    try:
        tree = json.loads(read_plain_file(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: wait if the run is just ending, or remove the file") from error
    if not isinstance(tree, dict):
        raise UsageError(f"{path} holds no object: remove the file, the report does without it")
    return tree


def _read_config(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Returns all settings. The configuration in the summary is complete. It is preferred to config.toml, which lacks
    fields that have no value."""
    tree = summary.get("config")
    if not isinstance(tree, dict):
        path = folder / "config.toml"
        tree = read_toml(path) if path.exists() else {}
    return dict(_settings(tree))


def _settings(tree: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", None if value == {} else value


def _spans(trace: dict[str, Any] | None) -> tuple[tuple[TraceSpan, ...], str]:
    """Returns the spans in order of time, and a note if some were left out."""
    if trace is None:
        return (), "There is no trace.json: the timeline is not known. It is written when a run ends."
    events = trace.get("traceEvents")
    boxes = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"] if isinstance(events, list) else []
    spans = sorted(filter(None, map(_span, boxes)), key=lambda span: span.start)
    notes = []
    if len(spans) < len(boxes):
        notes.append(f"{len(boxes) - len(spans):,} events of trace.json name no stage or time and were left out.")
    if len(spans) > MAX_SPANS:
        notes.append(f"The timeline shows the latest {MAX_SPANS:,} of {len(spans):,} events of trace.json.")
    if not spans:
        notes.append("trace.json holds no action: the timeline is not known.")
    return tuple(spans[-MAX_SPANS:]), " ".join(notes)


def _span(event: dict[str, Any]) -> TraceSpan | None:
    """Returns the span of an event, or None if the event is not a valid span. In older traces the stage is only in the
    name of the action."""
    arguments = event.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    name = str(event.get("name", ""))
    op = LETTERS.get(str(event.get("cat")), "")
    start, duration = _number(event.get("ts")), _number(event.get("dur"))
    try:
        stage = arguments["stage"] if "stage" in arguments else Action.parse(name).stage
        numbers = [int(stage), int(arguments.get("microbatch", -1)), int(arguments.get("version", -1))]
    except (ValueError, TypeError, OverflowError):
        return None
    if not op or numbers[0] < 0 or not math.isfinite(start + duration):
        return None
    row = event.get("tid")
    in_background = isinstance(row, int) and row % 2 == 1  # a stage has two rows; the odd one is for background work
    if op == "W" and "action" in arguments:
        name = f"{name} of {arguments['action']}"
    return TraceSpan(numbers[0], op, numbers[1], numbers[2], start, duration, name, in_background)
