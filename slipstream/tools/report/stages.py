"""The data of a report about every stage: how it spent its time, its timeline and its memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .figures import number, numbers, percent, shares_memory, size
from .read import Run
from .series import Column, evenly, short

SPLIT_POINTS = 200
"""Number of points per stage and kind of time. A zoomed range begins and ends at one of them, or between two."""
PARTS = ("forward", "backward", "evaluation", "update", "data", "wait_activations", "wait_gradients", "wait_sums")
"""Kinds of time of a stage, in the order in which they are stacked. Other recorded kinds follow."""


# ---- where the time went


def seconds_by_stage(run: Run) -> list[dict[str, Column]]:
    """Returns for every stage the seconds of every step, by kind of time."""
    stages: dict[int, dict[str, Column]] = {}
    for key, column in run.metrics.columns.items():
        if len(key) == 3 and key[0] == "stage_seconds" and key[1].isdecimal():
            stages.setdefault(int(key[1]), {})[key[2]] = np.nan_to_num(column)
    return [stages[stage] for stage in sorted(stages)]


def time_split(run: Run) -> dict[str, Any]:
    """Returns the shares of each kind of time in the steady window, from the summary, and cumulative sums over steps.
    From the sums the page computes the shares of any range of steps."""
    steps, stages = run.metrics.steps, seconds_by_stage(run)
    given = run.summary.get("time_split")
    window = [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []
    names = {name: None for part in (*window, *stages) for name in part}
    keys = [name for name in PARTS if name in names] + [name for name in names if name not in PARTS]
    kept = evenly(len(steps), SPLIT_POINTS)
    return {
        "keys": keys,
        "window": [[number(part, key) or 0 for key in keys] for part in window],
        "steps": [0, *(int(step) for step in steps[kept])] if stages else [],
        "sums": [[_sums(parts.get(key), kept) for key in keys] for parts in stages],
    }


def _sums(column: Column | None, kept: NDArray[np.intp]) -> list[float | None]:
    return [0] * (len(kept) + 1) if column is None else [0, *map(short, np.cumsum(column)[kept])]


# ---- tables, memory, timeline


def stage_table(run: Run) -> dict[str, Any]:
    """Returns a table with a row per stage. Columns without any value are left out."""
    summary = run.summary
    columns: dict[str, list[str]] = {
        "layers": _texts(numbers(summary, "layers_per_stage"), "{:g}".format),
        "utilisation": _texts(numbers(summary, "utilisation", "per_stage"), percent),
        "expected": _texts(numbers(summary, "expected_utilisation", "per_stage"), percent),
        "executor, µs an action": _texts(numbers(summary, "executor_microseconds_per_action"), "{:.0f}".format),
        "microbatches in flight": _texts(numbers(summary, "microbatches_in_flight"), "{:g}".format),
        "peak memory": _texts(numbers(summary, "peak_memory_bytes"), size),
    }
    known = {name: column for name, column in columns.items() if column}
    rows = [[str(stage), *cells] for stage, cells in enumerate(zip_longest(*known.values(), fillvalue="-"))]
    return {"columns": ["stage", *known], "rows": rows}


def _texts(values: list[float | None], text: Callable[[float], str]) -> list[str]:
    return ["-" if value is None else text(value) for value in values]


def memory(run: Run) -> dict[str, Any]:
    about = "Peak of each stage's process, with Python and torch in it."
    if run.config.get("train.device") == "cuda":
        about = "Peak of the allocator of each stage's device."
    elif shares_memory(run):
        about = "The stages are threads of one process: each bar is the peak of all of them together."
    peaks = numbers(run.summary, "peak_memory_bytes")
    texts = ["not known" if peak is None else size(peak) for peak in peaks]
    return {"bytes": peaks, "texts": texts, "about": about}


def timeline(run: Run) -> dict[str, Any]:
    """Returns the spans, in microseconds since the first one. Only a wait includes its name. The page builds the names
    of the others from their numbers."""
    origin = min((span.start for span in run.spans), default=0.0)
    spans = []
    for span in run.spans:
        times = [round(span.start - origin, 1), round(span.duration, 1), int(span.in_background)]
        own = [span.stage, span.op, span.microbatch, span.version, *times]
        spans.append([*own, span.name] if span.op == "W" else own)
    return {"spans": spans, "numStages": max((span.stage for span in run.spans), default=-1) + 1}
