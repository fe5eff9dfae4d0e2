"""From what was measured to what is said: rows, a Markdown table, and the file with every round."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .matrix import title
from .theory import ideal_utilisation, nominal_seconds, predicted_seconds
from .workloads import SEQUENCE_LENGTH
from .world import Outcome, World


@dataclass(frozen=True)
class Spread:
    """Over rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Row:
    """A rival in a world."""

    name: str
    step_seconds: Spread | None
    """None: it has no round, and `failure` says why."""
    per_second: float | None
    """Microbatches, or tokens where the compute is real."""
    utilisation: Spread | None
    ideal: float | None
    overhead_seconds: float | None
    overhead_cpu_seconds: float | None
    """slipstream: the executor's own time per action, averaged over stages."""
    predicted_seconds: float | None
    """slipstream: the simulator's step time, fed the costs of the same round; the median."""
    difference: float | None
    """How far that is off the measured step time of its round, relative to it; the median."""
    memory_bytes: int | None
    """Of the process that takes the most."""
    failure: str = ""


def rows_of(world: World, outcomes: Sequence[Outcome], memory: Sequence[list[int] | None]) -> list[Row]:
    bare = next((outcome for outcome in outcomes if outcome.rival.engine == "bare"), None)
    return [_row(world, outcome, bare, bytes_) for outcome, bytes_ in zip(outcomes, memory, strict=True)]


def _row(world: World, outcome: Outcome, bare: Outcome | None, memory: list[int] | None) -> Row:
    rival, rounds = outcome.rival, outcome.rounds
    is_real = world.workload == "real"
    if is_real:  # the work is what the processes need without a pipeline, in the same round
        works = [each.facts["mean_stage_seconds"] for each in bare.rounds] if bare else []
    else:
        works = [nominal_seconds(rival, world)] * len(rounds)
    utilisations = [work / each.seconds_per_step for work, each in zip(works, rounds, strict=False)]
    predictions = [predicted_seconds(rival, world, each) for each in rounds if each.costs]
    differences = [p / each.seconds_per_step - 1 for p, each in zip(predictions, rounds, strict=False)]
    overheads = [statistics.fmean(stage.overhead for stage in each.costs) for each in rounds if each.costs]
    on_the_cpu = [statistics.fmean(stage.overhead_cpu for stage in each.costs) for each in rounds if each.costs]
    units = rival.num_microbatches * (SEQUENCE_LENGTH if is_real else 1)
    return Row(
        name=rival.name,
        step_seconds=Spread.of(outcome.seconds_per_step),
        per_second=units / outcome.median_seconds if rounds else None,
        utilisation=Spread.of(utilisations),
        ideal=ideal_utilisation(rival, world, rounds[0].facts) if rounds else None,
        overhead_seconds=statistics.median(overheads) if overheads else None,
        overhead_cpu_seconds=statistics.median(on_the_cpu) if on_the_cpu else None,
        predicted_seconds=statistics.median(predictions) if predictions else None,
        difference=statistics.median(differences) if differences else None,
        memory_bytes=max(memory) if memory else None,
        failure=outcome.failure,
    )


def prediction_errors(worlds: Sequence[World], rows: Sequence[Sequence[Row]]) -> dict[str, float]:
    """By workload: the median over the matrix of how far the simulator is off, whatever the sign."""
    errors: dict[str, list[float]] = {}
    for world, row in ((world, row) for world, of_world in zip(worlds, rows, strict=True) for row in of_world):
        if row.difference is not None:
            errors.setdefault(world.workload, []).append(abs(row.difference))
    return {workload: statistics.median(values) for workload, values in errors.items()}


# ---- Markdown


def markdown(worlds: Sequence[World], rows: Sequence[Sequence[Row]]) -> str:
    tables = [table_of(world, of_world) for world, of_world in zip(worlds, rows, strict=True)]
    return "\n".join([*tables, *summary(worlds, rows)]) + "\n"


def summary(worlds: Sequence[World], rows: Sequence[Sequence[Row]]) -> list[str]:
    return [
        f"Predicted step time against measured, {workload} compute: off by {100 * error:.1f} % in the median."
        for workload, error in prediction_errors(worlds, rows).items()
    ]


def table_of(world: World, rows: Sequence[Row]) -> str:
    is_real = world.workload == "real"
    columns = [
        "rival",
        "tokens/s" if is_real else "microbatches/s",
        "step, ms",
        "lowest - highest",
        "utilisation",
        "lowest - highest",
        "ideal",
        "overhead per action, us",
        "on the CPU",
        "predicted step, ms",
        "off by",
        *(["memory, MiB"] if is_real else []),
    ]
    lines = [f"### {title(world)}", "", _line(columns), "|---|" + "---:|" * (len(columns) - 1)]
    for row in rows:
        cells = [
            row.name,
            _number(row.per_second, ",.0f" if is_real else ".1f"),
            _number(row.step_seconds.median if row.step_seconds else None, ".1f", scale=1000),
            _range(row.step_seconds, 1000, ".1f"),
            _number(row.utilisation.median if row.utilisation else None, ".3f"),
            _range(row.utilisation, 1, ".3f"),
            _number(row.ideal, ".3f"),
            _number(row.overhead_seconds, ".0f", scale=1e6),
            _number(row.overhead_cpu_seconds, ".0f", scale=1e6),
            _number(row.predicted_seconds, ".1f", scale=1000),
            _number(row.difference, "+.1f", " %", scale=100),
            *([_number(row.memory_bytes, ".0f", scale=2**-20)] if is_real else []),
        ]
        lines.append(_line(cells))
    failures = [f"- {row.name}: {row.failure}" for row in rows if row.failure]
    return "\n".join([*lines, *(["", *failures] if failures else []), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str, unit: str = "", scale: float = 1) -> str:
    return "" if value is None else f"{scale * value:{form}}{unit}"


def _range(spread: Spread | None, scale: float, form: str) -> str:
    return "" if spread is None else f"{scale * spread.lowest:{form}} - {scale * spread.highest:{form}}"


# ---- JSON


def document(
    worlds: Sequence[World],
    outcomes: Sequence[Sequence[Outcome]],
    rows: Sequence[Sequence[Row]],
    started: datetime.datetime,
) -> dict[str, Any]:
    """Everything: settings, every round of every rival, and the rows made from them."""
    return {
        "started": started.isoformat(timespec="seconds"),
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "prediction_errors": prediction_errors(worlds, rows),
        "worlds": [
            {
                "title": title(world),
                **{name: value for name, value in asdict(world).items() if name != "rivals"},
                "rivals": [
                    {"row": asdict(row), **asdict(outcome)} for row, outcome in zip(of_rows, of_outcomes, strict=True)
                ],
            }
            for world, of_rows, of_outcomes in zip(worlds, rows, outcomes, strict=True)
        ],
    }
