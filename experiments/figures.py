"""Two figures of docs/results/delay.md that `slipstream study` does not draw: gaps over the steps of a run, and gaps
along an axis of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.tools.study.figures import (
    BLACK,
    GAP,
    OPTIMIZER_COLOURS,
    STYLES,
    WIDE_SPAN,
    colours_of,
    decade,
    joined,
    labels_of,
    mode_colours,
    plain,
    save,
    shades_of,
    span,
    start,
)
from slipstream.tools.study.record import Record
from slipstream.tools.study.results import Row, rows, short_names, varying

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P")
UNITS = {"train.steps": "updates", "pipeline.sync_start_steps": "updates", "train.microbatch_size": "sequences"}
SMALL_GAP = 0.01
"""Gap below which the axis of a course is linear, because a course ends near 0 on either side."""


@dataclass(frozen=True)
class Course:
    """The gap of a delayed run to its synchronous run, over the steps of both."""

    name: str
    cell: Record
    baseline: Record
    gaps: dict[int, float]
    """Gap by step."""


def courses(records: Iterable[Record]) -> list[Course]:
    """Returns the courses of the longest delayed runs whose synchronous run exists."""
    cells = {record.id: record for record in records}
    pairs = [(cell, cells[cell.baseline]) for cell in cells.values() if cell.baseline in cells]
    longest = max((cell.steps for cell, _ in pairs), default=0)
    pairs = [pair for pair in pairs if pair[0].steps == longest and pair[0] is not pair[1]]
    optimizers = short_names(cell.optimizer for cell, _ in pairs)
    several_seeds = len({cell.seed for cell, _ in pairs}) > 1
    found = []
    for cell, baseline in pairs:
        start = cell.setting.get("pipeline.sync_start_steps")
        words = [optimizers[cell.optimizer]] if len(optimizers) > 1 else []
        words += [cell.mode, *([f"{start:,} synchronous steps"] if start else [])]
        words += [f"seed {cell.seed}"] if several_seeds else []
        losses, synchronous = (
            {e.step: e.loss for e in run.evaluations if e.loss is not None} for run in (cell, baseline)
        )
        gaps = {step: loss - synchronous[step] for step, loss in losses.items() if step in synchronous}
        found.append(Course(", ".join(words), cell, baseline, gaps))
    return found


def draw_course(records: Sequence[Record], path: Path) -> Path | None:
    """Draws the gap to sync over steps, for the longest runs. Every mode has a colour, and its settings have shades of
    it."""
    found = courses(records)
    if not found or not start():
        return None
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    modes = {course.name: course.cell.mode for course in found}
    shades = shades_of(modes, mode_colours(records))
    for course in found:
        steps = [step for step in course.gaps if step > 0]  # without step 0, where all runs are equal
        panel.plot(
            steps, [course.gaps[step] for step in steps], color=shades[course.name], linewidth=1.2, label=course.name
        )
    panel.axhline(0, color=BLACK, linewidth=0.8)
    panel.set_xscale("log")
    panel.set_yscale("symlog", linthresh=SMALL_GAP, linscale=1.5)
    least = min((gap for course in found for gap in course.gaps.values()), default=0.0)
    panel.set_ylim(bottom=1.3 * min(least, -SMALL_GAP / 4))
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.yaxis.set_major_formatter(plain)
    panel.set_xlabel("step (updates), logarithmic")
    panel.set_ylabel(f"{GAP},\nlogarithmic beyond {SMALL_GAP:g}")
    panel.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return save(figure, path)


# ---- along an axis


def draw_axis(records: Sequence[Record], axis: str, path: Path) -> Path | None:
    """Draws the gap to sync over one axis with numeric values, such as optimizer.momentum. Every optimizer has a
    colour; every mode has a marker and a line style. Above the panel there is a cross for every row with a diverged
    cell."""
    table = [row for row in rows(records) if not row.is_synchronous and _number(row.axes.get(axis)) is not None]
    table = [row for row in table if row.gap is not None or row.diverged]
    if not table or not start():
        return None
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullLocator

    colours = colours_of((record.optimizer for record in records), OPTIMIZER_COLOURS)
    modes = [mode for mode in mode_colours(records) if any(row.mode == mode for row in table)]
    figure, panel = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    lines = _lines(table, axis)
    owners = {name: (line[0].optimizer, line[0].mode) for name, line in lines.items()}
    shades = shades_of(owners, {owner: colours[owner[0]] for owner in owners.values()})
    for name, line in lines.items():
        mode = modes.index(line[0].mode)
        points = [(_x(row, axis), row.gap.mean, row.gap.spread or 0.0) for row in line if row.gap is not None]
        panel.errorbar(
            *(zip(*sorted(points), strict=True) if points else ((), (), ())),
            color=shades[name],
            linestyle=STYLES[mode % len(STYLES)],
            marker=MARKERS[mode % len(MARKERS)],
            markersize=5,
            linewidth=1.5,
            capsize=2.5,
            label=name,
        )
    gaps = [row.gap for row in table if row.gap is not None]
    if span(gaps) >= WIDE_SPAN:
        if all(gap.mean >= decade(gaps) and gap.mean > (gap.spread or 0.0) for gap in gaps):
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            panel.yaxis.set_minor_locator(NullLocator())
        else:
            panel.set_yscale("symlog", linthresh=decade(gaps), linscale=0.5)
        panel.yaxis.set_major_formatter(plain)
    if panel.get_yscale() != "log":
        panel.axhline(0, color=BLACK, linewidth=0.8)
    xs = sorted({_x(row, axis) for row in table})
    if xs[0] > 0 and xs[-1] / xs[0] > 8:
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticks(xs, _tick_labels(xs, panel.get_xscale() == "log"))
    _mark_diverged(panel, [(_x(row, axis), row, colours[row.optimizer]) for row in table if row.diverged])
    panel.set_xlabel(f"{axis} ({UNITS[axis]})" if axis in UNITS else axis)
    panel.set_ylabel(GAP)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return save(figure, path)


def _tick_labels(xs: Sequence[float], is_log: bool) -> list[str]:
    """Returns the tick labels. A label that would overlap its right neighbour is empty."""
    places = np.log(xs) if is_log else np.array(xs)
    room = 0.07 * (places[-1] - places[0])
    labels, last = [], math.inf
    for x, place in reversed(list(zip(xs, places, strict=True))):
        labels.append(f"{x:g}" if last - place >= room else "")
        last = place if labels[-1] else last
    return labels[::-1]


def _mark_diverged(panel: Axes, marks: Sequence[tuple[float, Row, str]]) -> None:
    """Marks rows with diverged cells above the panel. marks: x, row and colour. Marks with the same x are stacked."""
    stacked: dict[float, int] = {}
    for x, row, colour in marks:
        stacked[x] = stacked.get(x, 0) + 1
        panel.annotate(
            f"× {row.mode} diverged {row.diverged} of {len(row.cells)}",
            (x, 1),
            xycoords=panel.get_xaxis_transform(),
            xytext=(-4, 12 * stacked[x] - 7),
            textcoords="offset points",
            color=colour,
            fontsize=8,
        )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _x(row: Row, axis: str) -> float:
    x = _number(row.axes.get(axis))
    assert x is not None
    return x


def _lines(table: Sequence[Row], axis: str) -> dict[str, list[Row]]:
    """Returns the lines by name. All rows of one optimizer and mode form one line. If two of them have the same x, the
    other axes that vary split them into several lines."""
    optimizers = short_names(row.optimizer for row in table)
    result: dict[str, list[Row]] = {}
    for key in dict.fromkeys((row.optimizer, row.mode) for row in table):
        line = [row for row in table if (row.optimizer, row.mode) == key]
        name = f"{optimizers[key[0]]}, {key[1]}"
        if len({_x(row, axis) for row in line}) == len(line):
            result[name] = line
            continue
        labels = labels_of(line, [other for other in varying(line) if other != axis])
        for row, full_name in zip(line, joined(", ", [name] * len(line), labels), strict=True):
            result.setdefault(full_name, []).append(row)
    return result
