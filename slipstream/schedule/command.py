"""`slipstream schedule NAME`: prints a schedule as a grid, checks it, and draws it.

    print(show(Schedule("two_bw", 4, 4, num_steps=3), Costs(), [Path("two_bw.svg")]))

Everything it says comes from the checker and the simulator; here it is only put into words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .check import check
from .render import png, svg, text_grid
from .schedule import Schedule, ScheduleError
from .simulate import Costs, Timeline, min_steady_steps, simulate

SUFFIXES = (".svg", ".png")


def show(schedule: Schedule, costs: Costs, outputs: Sequence[Path] = (), max_width: int = 120) -> str:
    """The grid of a bounded schedule and what checker and simulator say of it; writes the drawings."""
    for path in outputs:
        if path.suffix not in SUFFIXES:
            raise ScheduleError(f"{path} cannot be drawn: end its name in one of {', '.join(SUFFIXES)}")
    report = check(schedule)
    timeline = simulate(schedule, costs)
    steady = _steady(timeline, costs)
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
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            path.write_text(svg(timeline, title), encoding="utf-8")
        else:
            png(timeline, title, path)
        lines.append(f"  drawn in       {path}")
    return "\n".join(lines)


def _steady(timeline: Timeline, costs: Costs) -> Timeline:
    """A timeline long enough to have a steady state."""
    schedule, needed = timeline.schedule, min_steady_steps(timeline.schedule)
    if schedule.num_steps is not None and schedule.num_steps >= needed:
        return timeline
    return simulate(replace(schedule, num_steps=needed), costs)


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
