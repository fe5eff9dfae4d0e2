"""Draws the matrix: one panel per number of stages, one group of bars per number of microbatches m, one bar per
contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..study.figures import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, save, start
from .matrix import AS_TRAINED, OUR_CONTENDERS, TORCH_CONTENDERS
from .results import Row, Table

COLOURS = {
    **dict(zip(TORCH_CONTENDERS, ("#c7ccd1", "#aab2b9", "#8d979f", "#727d86", "#57626b", "#3d4850"), strict=True)),
    **dict(zip(OUR_CONTENDERS, (ORANGE, BLUE, SKY, GREEN, PURPLE), strict=True)),
    AS_TRAINED: "#f0e442",
}
"""Colours of the contenders: greys for torch, the colours of Okabe and Ito for slipstream."""


def draw(tables: Sequence[Table], path: Path) -> Path | None:
    """Draws the utilisation of all worlds with equal processes and the usual links. Returns None if matplotlib is
    missing or there is nothing to draw."""
    panels: dict[str, dict[int, Sequence[Row]]] = {}
    for table in tables:
        world = table.world
        is_usual = not world.unbalanced and world.shared_memory and not world.latency_seconds
        if is_usual and any(row.utilisation for row in table.rows):
            name = f"{world.workload} compute, P = {world.num_stages}"
            panels.setdefault(name, {})[world.num_microbatches] = table.rows
    if not panels or not start():
        return None
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(panels), 1, figsize=(10, 0.8 + 2.6 * len(panels)), squeeze=False, sharey=True, layout="constrained"
    )
    names = {row.name for groups in panels.values() for of_world in groups.values() for row in of_world}
    colours = {name: colour for name, colour in COLOURS.items() if name in names}
    width = 0.85 / len(colours)
    for axes, (name, groups) in zip(grid.flat, panels.items(), strict=True):
        for place, (contender, colour) in enumerate(colours.items()):
            for group, of_world in enumerate(groups.values()):
                row = next((row for row in of_world if row.name == contender), None)
                if row is None or row.utilisation is None:
                    continue
                x, spread = group + (place - (len(colours) - 1) / 2) * width, row.utilisation
                whiskers = [[spread.median - spread.lowest], [spread.highest - spread.median]]
                axes.bar(
                    x, spread.median, width, color=colour, label=contender, yerr=whiskers, ecolor="black", capsize=1.5
                )
                if row.ideal is not None:
                    axes.hlines(row.ideal, x - width / 2, x + width / 2, color=VERMILLION, linewidth=1.5)
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(groups)), [f"m = {m}" for m in groups])
        axes.set_ylabel("utilisation")
        axes.grid(axis="y", alpha=0.3)
    grid[0, 0].hlines([], 0, 0, color=VERMILLION, label="what the schedule allows")
    drawn = [axes.get_legend_handles_labels() for axes in grid.flat]
    legend = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return save(figure, path)
