"""`slipstream schedule NAME`: prints a schedule as a grid, checks it, and draws it.

    print(show(Schedule("two_bw", 4, 4, num_steps=3), Costs(), [Path("two_bw.svg")]))

All facts come from the checker and the simulator. This module only formats them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..config.files import check_output
from ..errors import UsageError
from ..schedule import Schedule, ScheduleError, waits_for_sum
from ..schedule.check import check
from ..schedule.render import png, svg, text_grid
from ..schedule.simulate import Costs, Timeline, min_steady_steps, simulate
from .parse import cannot_write, parse

LEAST_COST, MOST_COST = 1e-9, 1e9
SUFFIXES = (".svg", ".png")
MAX_MICROBATCHES = 50_000
"""Maximum number of microbatches to draw, over all stages and steps. It takes a minute or two, and is far more than a
picture can show."""


@dataclass(frozen=True)
class ScheduleArguments:
    """Prints a schedule as a grid, checks it, simulates it and draws it."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """One of two_bw, one_f_one_b, gpipe, pipedream and paci."""
    stages: int = 4
    """Stages of the pipeline."""
    microbatches: int = 4
    """Microbatches in a step."""
    steps: int = 3
    """Steps to print and draw."""
    depth: str = "minimum"
    """two_bw: "double" keeps twice as many forwards in flight and hides the latency of links."""
    sync_start_steps: int = 0
    """Steps that first run as one_f_one_b."""
    forward: float = 1.0
    """Cost of a forward, in any unit of time."""
    backward: float = 2.0
    """Cost of a backward, in the same unit."""
    latency: float = 0.0
    """Latency of a link between two stages, in the same unit."""
    output: tuple[Path, ...] = ()
    """Files to draw, .svg or .png; by default NAME_pP_mM.svg and .png in this folder."""


def main(arguments: list[str]) -> None:
    given = parse(ScheduleArguments, arguments, "slipstream schedule")
    for name in ("forward", "backward", "latency"):
        cost = getattr(given, name)
        if not 0 <= cost < math.inf:
            raise UsageError(f"{name} = {cost} is no time: use a finite number of 0 or more")
        if cost and not LEAST_COST <= cost <= MOST_COST:
            raise UsageError(f"{name} = {cost} cannot be drawn: use 0, or {LEAST_COST:g} to {MOST_COST:g}")
    size = given.stages, given.microbatches, given.steps
    if math.prod(size) > MAX_MICROBATCHES:
        raise UsageError(
            f"{given.stages} stages x {given.microbatches} microbatches x {given.steps} steps are too many to draw: "
            f"use fewer, {MAX_MICROBATCHES:,} at most in all"
        )
    if given.sync_start_steps > given.steps:
        raise UsageError(f"sync_start_steps = {given.sync_start_steps} is more than steps = {given.steps}: use fewer")
    try:
        schedule = Schedule(given.name, *size, depth=given.depth, sync_start_steps=given.sync_start_steps)
        schedule = replace(schedule, global_update=waits_for_sum(given.name))  # the name is valid here
        costs = Costs(forward=given.forward, backward=given.backward, latency=given.latency)
        drawings = list(given.output) or _drawings(given)
        for path in drawings:
            check_output(path)
        print(show(schedule, costs, drawings, max_width=_width()))
    except ScheduleError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(cannot_write(error, "output")) from error


def _width() -> int:
    """Returns the width of the terminal, or 250 if the output is a file."""
    console = Console()
    return console.width if console.is_terminal else 250


def _drawings(given: ScheduleArguments) -> list[Path]:
    stem = f"{given.name}_p{given.stages}_m{given.microbatches}"
    suffixes = [".svg", ".png"] if importlib.util.find_spec("matplotlib") else [".svg"]
    return [Path(f"{stem}{suffix}") for suffix in suffixes]


def show(schedule: Schedule, costs: Costs, outputs: Sequence[Path] = (), max_width: int = 120) -> str:
    """Returns the grid of a schedule with a fixed number of steps, and the results of checker and simulator. Also
    writes the drawings."""
    for path in outputs:
        if path.suffix not in SUFFIXES:
            raise ScheduleError(f"{path} cannot be drawn: end its name in one of {', '.join(SUFFIXES)}")
    report = check(schedule)
    timeline = simulate(schedule, costs)
    steady, needed = timeline, min_steady_steps(schedule)
    if (schedule.num_steps or 0) < needed:
        steady = simulate(replace(schedule, num_steps=needed), costs)
    title = f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches a step"
    lines = [
        text_grid(timeline, max_width),
        "",
        "F8/1: forward of microbatch 8 on weight version 1; B: backward; E: evaluation; *: update",
        "",
        title,
        f"  checked        {report.num_actions} actions of {schedule.num_steps} steps: no deadlock",
        f"  delay          {_by_stage([_range(delay) for delay in report.delays])}",
        f"  live versions  {_by_stage(report.live_versions)}",
        f"  in flight      {_by_stage(report.peak_in_flight)}",
        f"  bubble         {100 * steady.bubble:.1f} % of the steady state, step time {steady.step_time:g}",
    ]
    if report.max_drift:
        lines.append(f"  drift          a backward runs up to {report.max_drift} updates after its forward")
    for path in outputs:
        draw(timeline, title, path)
        lines.append(f"  drawn in       {path}")
    return "\n".join(lines)


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Draws a timeline in a file. The suffix of its name is one of SUFFIXES."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(svg(timeline, title), encoding="utf-8")
    else:
        png(timeline, title, path)


def _range(delay: tuple[int, int] | None) -> str:
    if delay is None:
        return "-"
    least, most = delay
    return str(least) if least == most else f"{least} to {most}"


def _by_stage(values: Sequence[object]) -> str:
    texts = [str(value) for value in values]
    if len(set(texts)) == 1:
        return f"{texts[0]} on every stage"
    shown = texts if len(texts) <= 16 else [*texts[:8], "...", *texts[-2:]]
    return f"{', '.join(shown)} from stage 0 to {len(texts) - 1}"
