"""From a column of numbers to what a chart draws: few enough points to draw, and none of the extremes lost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

MAX_POINTS = 2000
"""Of one line, its means included. More than a screen has pixels, and 20 lines of them are still a small page."""


def stretches(num_points: int, max_points: int = MAX_POINTS) -> list[NDArray[np.intp]]:
    """The indices of a long column, cut so that three points of each stretch and a mean come to max_points."""
    return np.array_split(np.arange(num_points), max(1, (max_points - 2) // 4))


def thin(values: Column, max_points: int = MAX_POINTS) -> NDArray[np.intp]:
    """The indices to draw: of every stretch its minimum, its maximum and one gap, of the whole its two ends. So a spike
    of one step stays visible, and so does a nan."""
    if len(values) <= max_points:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in stretches(len(values), max_points):
        known = np.isfinite(values[stretch])
        if not known.all():
            kept.add(int(stretch[np.argmin(known)]))
        if known.any():
            numbers = stretch[known]
            kept.add(int(numbers[np.argmin(values[numbers])]))
            kept.add(int(numbers[np.argmax(values[numbers])]))
    return np.array(sorted(kept))


def means(steps: Column, values: Column) -> dict[str, list[Any]]:
    """Of every stretch, at its middle: what a thinned line is about, where its extremes are only its noise."""
    x, y = [], []
    for stretch in stretches(len(values)):
        known = values[stretch][np.isfinite(values[stretch])]
        x.append(int(steps[stretch[len(stretch) // 2]]))
        y.append(short(float(known.mean())) if len(known) else None)
    return {"x": x, "y": y}


def short(value: float) -> float | None:
    """Six digits, which no chart can show more of; None, which JSON can hold, for what is not known."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def series(name: str, run: int, steps: Column, values: Column, variant: int = 0, marks: bool = False) -> dict[str, Any]:
    """A line of a chart. variant: which of the lines of the same run; marks: a dot for every point."""
    kept = thin(values)
    return {
        "name": name,
        "run": run,
        "variant": variant,
        "marks": marks,
        "means": means(steps, values) if len(kept) < len(values) else None,
        "x": [int(step) for step in steps[kept]],
        "y": [short(value) for value in values[kept]],
    }


def evenly(num_items: int, max_items: int) -> NDArray[np.intp]:
    """Indices with the first and the last among them, for columns that grow steadily."""
    return np.unique(np.linspace(0, num_items - 1, min(num_items, max_items)).round().astype(np.intp))
