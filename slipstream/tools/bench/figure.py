"""Draws the matrix: one panel per number of stages, one group of bars per number of microbatches m, one bar per
contender."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from .matrix import AS_TRAINED, OUR_CONTENDERS, TORCH_CONTENDERS
from .results import Row, Table

COLOURS = {
    **dict(zip(TORCH_CONTENDERS, ("#c7ccd1", "#aab2b9", "#8d979f", "#727d86", "#57626b", "#3d4850"), strict=True)),
    **dict(zip(OUR_CONTENDERS, ("#e69f00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7"), strict=True)),
    AS_TRAINED: "#f0e442",
}
"""Colours of the contenders: greys for torch, the colours of Okabe and Ito for slipstream."""
IDEAL = "#d55e00"


def draw(tables: Sequence[Table], path: Path) -> Path | None:
    """Draws the utilisation of all worlds with equal processes and the usual links. Returns None if matplotlib is
    missing or there is nothing to draw."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    panels: dict[str, dict[int, Sequence[Row]]] = {}
    for table in tables:
        world = table.world
        is_usual = not world.unbalanced and world.shared_memory and not world.latency_seconds
        if is_usual and any(row.utilisation for row in table.rows):
            name = f"{world.workload} compute, P = {world.num_stages}"
            panels.setdefault(name, {})[world.num_microbatches] = table.rows
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(panels), 1, figsize=(10, 0.8 + 2.6 * len(panels)), squeeze=False, sharey=True, layout="constrained"
    )
    names = {row.name for groups in panels.values() for of_world in groups.values() for row in of_world}
    colours = {name: colour for name, colour in COLOURS.items() if name in names}
    width = 0.85 / len(colours)
    for axes, (name, groups) in zip(grid.flat, panels.items(), strict=True):
        for place, (contender, colour) in enumerate(colours.items()):
            label: str | None = contender
            for group, of_world in enumerate(groups.values()):
                row = next((row for row in of_world if row.name == contender), None)
                if row is None or row.utilisation is None:
                    continue
                x, spread = group + (place - (len(colours) - 1) / 2) * width, row.utilisation
                whiskers = [[spread.median - spread.lowest], [spread.highest - spread.median]]
                axes.bar(x, spread.median, width, color=colour, label=label, yerr=whiskers, ecolor="black", capsize=1.5)
                label = None  # only one entry in the legend
                if row.ideal is not None:
                    axes.hlines(row.ideal, x - width / 2, x + width / 2, color=IDEAL, linewidth=1.5)
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(groups)), [f"m = {m}" for m in groups])
        axes.set_ylabel("utilisation")
        axes.grid(axis="y", alpha=0.3)
    grid[0, 0].hlines([], 0, 0, color=IDEAL, label="what the schedule allows")
    drawn = [axes.get_legend_handles_labels() for axes in grid.flat]
    legend = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
