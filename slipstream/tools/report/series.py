"""Reduces a column of numbers to the points of a chart: few enough to draw, but with all extremes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

MAX_POINTS = 2000
"""Maximum number of points of one line, including its means. This is more than the pixels of a screen, and a page with
20 such lines is still small."""


def stretches(num_points: int) -> list[NDArray[np.intp]]:
    """Returns the indices of a long column in consecutive pieces. Three points and a mean of every piece, and the two
    ends, add up to MAX_POINTS."""
    return np.array_split(np.arange(num_points), (MAX_POINTS - 2) // 4)


def thin(values: Column) -> NDArray[np.intp]:
    """Returns the indices to draw: the minimum, the maximum and one gap (nan) of every piece, and the two ends of the
    column. So a spike or a nan of one step stays visible."""
    if len(values) <= MAX_POINTS:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in stretches(len(values)):
        known = np.isfinite(values[stretch])
        if not known.all():
            kept.add(int(stretch[np.argmin(known)]))
        if known.any():
            numbers = stretch[known]
            kept.add(int(numbers[np.argmin(values[numbers])]))
            kept.add(int(numbers[np.argmax(values[numbers])]))
    return np.array(sorted(kept))


def means(steps: Column, values: Column) -> dict[str, list[Any]]:
    """Returns the mean of every piece, at its middle. The means show the trend of a thinned line, while its extremes
    are mostly noise."""
    x, y = [], []
    for stretch in stretches(len(values)):
        known = values[stretch][np.isfinite(values[stretch])]
        x.append(int(steps[stretch[len(stretch) // 2]]))
        y.append(short(float(known.mean())) if len(known) else None)
    return {"x": x, "y": y}


def short(value: float) -> float | None:
    """Rounds to six digits, which is more than a chart can show. Returns None, which JSON can hold, for inf and nan."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def series(name: str, run: int, steps: Column, values: Column, variant: int = 0, marks: bool = False) -> dict[str, Any]:
    """Returns a line of a chart. variant: the index among the lines of the same run. marks: whether to draw a dot for
    every point."""
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
    """Returns evenly spaced indices, including the first and the last. They are for columns that grow steadily."""
    return np.unique(np.linspace(0, num_items - 1, min(num_items, max_items)).round().astype(np.intp))
