"""Draws the results of a study: loss curves, gaps to sync, and cosines of consecutive updates.

Colour shows the mode where modes of one optimizer are compared, and the optimizer where optimizers share a panel.
Colours are assigned in the order of the records, so that all figures of a study agree. matplotlib is optional: without
it, or without data, the functions return None.
"""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .record import Record
from .results import MODES, RATE, Estimate, Row, curve, rows, short_names, value_text, varying

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Colours of Okabe and Ito, which colour-blind readers can distinguish. Their yellow is too light for a line on white.
BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072b2", "#d55e00", "#009e73"
PURPLE, ORANGE, SKY, GREY, BROWN = "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#7a5230"
MODE_COLOURS = (BLACK, VERMILLION, BLUE, GREEN, PURPLE, ORANGE, SKY, BROWN, GREY)
"""Colours of sync, async and ef, then of other modes in the order in which they appear."""
OPTIMIZER_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, BROWN, GREY)
Style = Literal["-", "--", ":", "-."]
STYLES: tuple[Style, ...] = ("-", "--", ":", "-.")
WIDE_SPAN = 20.0
"""Ratio of the largest to the smallest gap from which the axis is logarithmic."""
GAP = "gap to sync (nats per token)"
TITLE_LETTERS = 32
"""Maximum number of characters in a line of a panel's title."""


def start() -> bool:
    """Returns whether matplotlib is installed. If so, selects its backend without a screen."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    return True


def save(figure: Figure, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _panels(names: Sequence[str], most_columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Creates a grid of panels with titles and shared axes. size: width and height of a panel in inches."""
    from matplotlib import pyplot

    num_columns = min(len(names), most_columns)
    num_rows = -(-len(names) // num_columns)
    width, height = max(size[0] * num_columns, 7.0), size[1] * num_rows + 0.6
    figure, grid = pyplot.subplots(
        num_rows, num_columns, sharex=True, sharey=True, squeeze=False, figsize=(width, height), layout="constrained"
    )
    panels = list(grid.flat)
    for index, panel in enumerate(panels):
        if index >= len(names):
            panel.remove()
            continue
        panel.set_title(names[index], fontsize=10)
        panel.grid(alpha=0.3)
        # If the last row is not full, a panel above an empty place is the lowest of its column and needs labels.
        panel.tick_params(labelbottom=index + num_columns >= len(names))
    return figure, panels[: len(names)]


def colours_of(names: Iterable[str], palette: Sequence[str]) -> dict[str, str]:
    return {name: palette[index % len(palette)] for index, name in enumerate(dict.fromkeys(names))}


def shades_of(owners: Mapping[str, Any], colours: Mapping[Any, str]) -> dict[str, str]:
    """Returns a colour for every name. Names with the same owner get shades of the owner's colour, and the first of
    them gets the full colour. The result has the order of `colours`."""
    from matplotlib.colors import to_hex, to_rgb

    result = {}
    for owner, colour in colours.items():
        names = [name for name, its_owner in owners.items() if its_owner == owner]
        for index, name in enumerate(names):
            white = 0.65 * index / len(names)
            red, green, blue = (channel + (1 - channel) * white for channel in to_rgb(colour))
            result[name] = to_hex((red, green, blue))
    return result


def mode_colours(records: Iterable[Record]) -> dict[str, str]:
    return colours_of([*MODES, *(record.mode for record in records)], MODE_COLOURS)


def labels_of(table: Sequence[Row], axes: Sequence[str]) -> list[str]:
    """Returns for every row a text that distinguishes it from other rows of its optimizer and mode."""
    names = short_names(axes) | {RATE: "lr"}
    texts = [[(names[axis], value_text(row.axes.get(axis))) for axis in axes] for row in table]
    return [", ".join(f"{name} {value}" for name, value in text if value) for text in texts]


def _styles(labels: Iterable[str]) -> dict[str, Style]:
    """Returns a line style by label. The empty label gets the solid line."""
    return {label: STYLES[index % len(STYLES)] for index, label in enumerate(sorted(dict.fromkeys(labels), key=bool))}


def _entry(label: str, **style: Any) -> Line2D:
    """Returns a line for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)


def _style_entries(styles: Mapping[str, Style]) -> list[Line2D]:
    shown = styles.items() if len(styles) > 1 else ()
    return [_entry(label, color=GREY, linestyle=style) for label, style in shown if label]


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Draws a legend above the panels, with as many columns as fit."""
    widths = [0.7 + 0.08 * len(handle.get_label()) for handle in handles]  # approximately, in inches
    most = figure.get_figwidth()
    fitting = (n for n in range(len(handles), 1, -1) if sum(map(max, np.array_split(widths, n))) <= most)
    num_columns = next(fitting, 1)
    figure.legend(handles=list(handles), loc="outside upper center", ncols=num_columns, frameon=False, fontsize=9)
    num_lines = -(-len(handles) // num_columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * max(num_lines - 2, 0))  # two lines fit without this


# ---- loss against tokens


def draw_losses(records: Sequence[Record], path: Path) -> Path | None:
    """Draws held-out loss over tokens, with a panel per optimizer and a colour per mode. A line is the mean over seeds,
    and a band shows the lowest and highest. A run that diverged is a thin line that ends in a cross. If an optimizer
    has more settings than there are line styles, every synchronous run gets its own panel with the runs that are
    compared with it."""
    table = [row for row in rows(records) if any(map(curve, row.cells))]
    if not table or not start():
        return None
    names, owners, labels = _owners(table)
    styles = _styles(labels)
    colours = mode_colours(records)
    num_title_lines = max(name.count("\n") for name in names)
    figure, panels = _panels(names, 4, (2.7, 2.5 + 0.2 * num_title_lines))
    cells = [cell for row in table for cell in row.cells]
    scale, unit = _token_unit(max(cell.tokens for cell in cells))
    low, high = _loss_range(cells)
    above = [0] * len(panels)
    for row, index, label in zip(table, owners, labels, strict=True):
        colour, panel = colours[row.mode], panels[index]
        tokens, mean, least, greatest = _over_seeds([curve(cell) for cell in row.cells if cell.final_loss is not None])
        panel.plot(tokens / scale, mean, color=colour, linestyle=styles[label], linewidth=1.5)
        panel.fill_between(tokens / scale, least, greatest, color=colour, alpha=0.2, linewidth=0)
        if len(mean) and mean[-1] > high:
            _name_end(panel, f"↑ ends at {mean[-1]:.2f}", colour, above[index])
            above[index] += 1
        for cell in row.cells:
            if cell.final_loss is None and (points := curve(cell)):
                panel.plot([t / scale for t, _ in points], [y for _, y in points], color=colour, linewidth=0.7)
                end, loss = points[-1]
                panel.plot(end / scale, min(max(loss, low), high), "x", color=colour, markersize=7, clip_on=False)
    panels[0].set_ylim(low, high)
    panels[0].set_xlim(left=0)
    figure.supxlabel(f"tokens{unit}", fontsize=10)
    figure.supylabel("held-out loss (nats per token)", fontsize=10)
    modes = [mode for mode in colours if any(row.mode == mode for row in table)]
    entries = [*(_entry(mode, color=colours[mode]) for mode in modes), *_style_entries(styles)]
    if any(row.diverged for row in table):
        entries.append(_entry("diverged", color=GREY, linewidth=0.7, marker="x"))
    _legend(figure, entries)
    return save(figure, path)


def _owners(table: Sequence[Row]) -> tuple[list[str], list[int], list[str]]:
    """Returns the titles of the panels and, for every row, the index of its panel and the label that distinguishes it
    there."""
    optimizers = short_names(row.optimizer for row in table)
    labels = labels_of(table, varying(table))
    if len(_styles(labels)) <= len(STYLES):
        return list(optimizers.values()), [list(optimizers).index(row.optimizer) for row in table], labels
    first_of: dict[tuple[str, ...], Row] = {}  # used if the synchronous row is missing
    heads = [
        sync or first_of.setdefault(tuple(cell.baseline for cell in row.cells), row)
        for row, sync in zip(table, _synchronous_rows(table), strict=True)
    ]
    panels = list(dict.fromkeys(heads))
    shared = varying([head for head in panels if head.is_synchronous] or panels)
    titles = [textwrap.fill(label, TITLE_LETTERS) for label in labels_of(panels, shared)]
    return (
        joined("\n", [optimizers[head.optimizer] for head in panels], titles),
        [panels.index(head) for head in heads],
        labels_of(table, [axis for axis in varying(table) if axis not in shared]),
    )


def _synchronous_rows(table: Sequence[Row]) -> list[Row | None]:
    """Returns for every row its synchronous row, or None if that is not in the table."""
    sync_of = {cell.id: row for row in table if row.is_synchronous for cell in row.cells}
    return [next((sync_of[c.baseline] for c in row.cells if c.baseline in sync_of), None) for row in table]


def _name_end(panel: Axes, text: str, colour: str, line: int) -> None:
    """Writes the final loss in the upper right corner, for a curve that stays above the range of the panel."""
    panel.annotate(
        text,
        (1, 1),
        xycoords="axes fraction",
        xytext=(-4, -4 - 11 * line),
        textcoords="offset points",
        ha="right",
        va="top",
        color=colour,
        fontsize=8,
    )


def _over_seeds(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns x, mean, lowest and highest at all points where every seed has a value."""
    by_seed = [dict(points) for points in curves]
    shared = [x for x in by_seed[0] if all(x in seed for seed in by_seed)] if by_seed else []
    values = np.array([[seed[x] for x in shared] for seed in by_seed or [{}]])
    return np.array(shared), values.mean(0), values.min(0), values.max(0)


def _loss_range(records: Sequence[Record]) -> tuple[float, float]:
    """Returns the range of the loss axis. It begins below the best loss. It ends at the median loss after a fifth of
    the tokens, because the first evaluations would flatten all curves. The range also includes runs that end at most
    twice as high above the best loss as that, but not higher ones, which would compress the others."""
    finished = [(r.tokens, curve(r)) for r in records if r.final_loss is not None and curve(r)]
    if not finished:
        losses = [loss for record in records for _, loss in curve(record)]
        return min(losses) - 0.1, max(losses) + 0.1
    least = min(loss for _, points in finished for _, loss in points)
    early = [np.interp(tokens / 5, *np.transpose(points)) for tokens, points in finished]
    usual = float(np.median(early)) - least
    ends = [points[-1][1] - least for _, points in finished]
    height = max(usual, 1.25 * max(end for end in ends if end <= max(2 * usual, min(ends)))) or 0.2
    return least - 0.05 * height, least + 1.05 * height


def _token_unit(most: int) -> tuple[float, str]:
    for scale, name in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if most >= 2 * scale:
            return scale, f" ({name})"
    return 1.0, ""


# ---- gaps


def draw_gaps(records: Sequence[Record], path: Path) -> Path | None:
    """Draws the gap to sync of every mode as bars, in one group per synchronous row. The group with the smallest gap of
    async comes first."""
    table = rows(records)
    groups: dict[Row, list[Row]] = {}
    for row, sync in zip(table, _synchronous_rows(table), strict=True):
        if sync is not None and not row.is_synchronous:
            groups.setdefault(sync, []).append(row)
    bars = [row for group in groups.values() for row in group]
    if not bars or not start():
        return None
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    # The axes in which sync rows differ name the group of bars. The other axes that vary name the bar.
    syncs = list(groups)
    shared = varying(syncs)
    optimizers = short_names(row.optimizer for row in syncs)
    names = joined("\n", [optimizers[row.optimizer] for row in syncs], labels_of(syncs, shared))
    beyond = labels_of(bars, [axis for axis in varying(bars) if axis not in shared])
    bar_names = joined(", ", [row.mode for row in bars], beyond)
    kinds = dict(zip(bars, bar_names, strict=True))
    colours = shades_of({name: row.mode for row, name in kinds.items()}, mode_colours(records))
    num_lines = len(bars) + 0.7 * len(groups)
    figure, panel = pyplot.subplots(figsize=(8, max(2.0, 1.0 + 0.23 * num_lines)), layout="constrained")
    kept = [row.gap for row in bars if row.gap is not None]
    is_wide = span(kept) >= WIDE_SPAN
    if is_wide:
        panel.set_xscale("symlog", linthresh=decade(kept), linscale=0.5)
        panel.xaxis.set_major_formatter(plain)
    y, ticks = 0.0, []
    order = sorted(zip(groups.values(), names, strict=True), key=lambda group: _plain_gap(group[0]))
    for group, _ in order:
        ticks.append(y + (len(group) - 1) / 2)
        for row in sorted(group, key=lambda row: list(colours).index(kinds[row])):
            _bar(panel, row, y, colours[kinds[row]])
            y += 1
        y += 0.7
    panel.set_yticks(ticks, [name for _, name in order])
    panel.set_ylim(y - 0.9, -0.8)
    panel.tick_params(axis="y", length=0)
    panel.axvline(0, color=BLACK, linewidth=0.8)
    whiskers = "\nwhiskers: spread over seeds" if any(gap.spread for gap in kept) else ""
    panel.set_xlabel(f"{GAP}{', logarithmic' if is_wide else ''}{whiskers}")
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    _legend(figure, [Patch(color=colour, label=kind) for kind, colour in colours.items()])
    return save(figure, path)


def joined(between: str, names: Sequence[str], labels: Sequence[str]) -> list[str]:
    return [f"{name}{between}{label}" if label else name for name, label in zip(names, labels, strict=True)]


def _plain_gap(group: Sequence[Row]) -> tuple[bool, float]:
    """Returns the sort key of a group: its async gap. Groups without it, because async is missing or diverged, come
    last."""
    gaps = [row.gap.mean for row in group if row.mode == "async" and row.gap is not None]
    others = [row.gap.mean for row in group if row.gap is not None]
    return (False, min(gaps)) if gaps else (True, max(others, default=math.inf))


def _bar(panel: Axes, row: Row, y: float, colour: str) -> None:
    """Draws a bar. Its number is to the right of bar and whisker, also if the gap is negative."""
    words, right = [], 0.0
    if row.gap is not None:
        mean, spread = row.gap.mean, row.gap.spread or 0.0
        panel.barh(y, mean, height=0.9, color=colour)
        if spread:
            panel.errorbar(mean, y, xerr=spread, color=BLACK, linewidth=1, capsize=2.5)
        words.append(f"{mean:+.4f}")
        right = max(0.0, mean + spread)
    if row.diverged:
        words.append(f"× diverged {row.diverged} of {len(row.cells)}")
    elif row.gap is None:
        words.append("sync diverged")
    panel.annotate(
        " ".join(words), (right, y), xytext=(4, 0), textcoords="offset points", va="center_baseline", fontsize=8
    )


def span(gaps: Iterable[Estimate]) -> float:
    """Returns the ratio of the largest to the smallest absolute gap."""
    sizes = [abs(gap.mean) for gap in gaps if gap.mean]
    return max(sizes) / min(sizes) if sizes else 1.0


def decade(gaps: Sequence[Estimate]) -> float:
    """Returns the size below which the axis is linear, so that it can show 0 and negative gaps. Smaller gaps are
    negligible."""
    sizes = [abs(gap.mean) for gap in gaps if gap.mean]
    return 10.0 ** math.floor(math.log10(max(min(sizes), max(sizes) / 100)))


def plain(value: float, place: float) -> str:
    return f"{value:g}"


# ---- cosines


def draw_cosines(records: Sequence[Record], path: Path) -> Path | None:
    """Draws the cosine of consecutive updates in mode async, with a panel per parameter group and a colour per
    optimizer. A line is the smoothed mean over the seeds that finished, or over all seeds if none finished."""
    table = [row for row in rows(records) if row.mode == "async" and any(cell.cosines for cell in row.cells)]
    if not table or not start():
        return None
    optimizers = list(dict.fromkeys(row.optimizer for row in table))
    colours = colours_of((record.optimizer for record in records), OPTIMIZER_COLOURS)
    names = short_names(optimizers)
    labels = labels_of(table, varying(table))
    styles = _styles(labels)
    groups = list(dict.fromkeys(group for row in table for cell in row.cells for group in cell.cosines))
    figure, panels = _panels([f"parameter group: {group}" for group in groups], 3, (4.0, 3.2))
    least = 0.4
    for row, label in zip(table, labels, strict=True):
        for panel, group in zip(panels, groups, strict=True):
            whole = [cell for cell in row.cells if cell.final_loss is not None] or row.cells
            steps, mean, _, _ = _over_seeds([cell.cosines[group] for cell in whole if cell.cosines.get(group)])
            if len(steps):
                mean = _smooth(mean)
                least = min(least, float(mean.min()))
                panel.plot(steps, mean, color=colours[row.optimizer], linestyle=styles[label], linewidth=1.5)
    for panel in panels:
        panel.axhline(0.5, color=BLACK, linestyle="--", linewidth=1)
    panels[0].set_ylim(least - 0.02, 1.02)
    panels[0].set_xlim(left=0)
    figure.supxlabel("step (updates)", fontsize=10)
    figure.supylabel("cosine of consecutive updates", fontsize=10)
    entries = [_entry(names[optimizer], color=colours[optimizer]) for optimizer in optimizers]
    entries += _style_entries(styles)
    entries.append(_entry("below this, error feedback hurts", color=BLACK, linestyle="--", linewidth=1))
    _legend(figure, entries)
    return save(figure, path)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Returns a moving average over a fortieth of the run. Near the ends the window is shorter."""
    window = np.ones(2 * (len(values) // 80) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
