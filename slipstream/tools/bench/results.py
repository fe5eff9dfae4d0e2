"""Turns the measurements into rows, a Markdown table, and a JSON document with every round."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .contenders import TYING
from .matrix import title
from .theory import ideal_utilisation, nominal_seconds, predicted_seconds
from .turns import Outcome, Round, World

YARDSTICK = "torch 1F1B"
"""The contender to which the speed of all others is compared on GPUs."""


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest value over rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Row:
    """The results of one contender in one world."""

    name: str
    step_seconds: Spread | None
    """Time of a step. None means that the contender completed no round; `failure` has the reason."""
    per_second: float | None
    """Microbatches per second for emulated compute, otherwise tokens per second."""
    utilisation: Spread | None
    ideal: float | None
    busy: float | None
    """Share of a step in which a stage computes or updates in the foreground. Median over rounds; only for
    slipstream."""
    overhead_seconds: float | None
    overhead_cpu_seconds: float | None
    """Executor's own time per action, averaged over stages: wall time above, CPU time here. Only for slipstream."""
    predicted_seconds: float | None
    """Step time that the simulator predicts from the costs of the same round. Median over rounds; only for
    slipstream."""
    difference: float | None
    """Relative difference of the predicted from the measured step time of the same round. Median over rounds."""
    memory_bytes: int | None
    """Memory of the process that uses the most."""
    failure: str = ""


MAX_UTILISATION, MAX_DIFFERENCE = 1.02, 0.1
"""Limits above which a table prints a warning about a row (`doubts`)."""


def rows_of(world: World, outcomes: Sequence[Outcome], memory: Sequence[list[int] | None]) -> list[Row]:
    bare = next((outcome for outcome in outcomes if outcome.contender.engine == "bare"), None)
    return [_row(world, outcome, bare, bytes_) for outcome, bytes_ in zip(outcomes, memory, strict=True)]


def _row(world: World, outcome: Outcome, bare: Outcome | None, memory: list[int] | None) -> Row:
    contender, rounds = outcome.contender, outcome.rounds
    if world.workload != "emulated":  # the work is the time without a pipeline, in the same round
        works = [each.facts["mean_stage_seconds"] for each in bare.rounds] if bare else []
    else:
        works = [nominal_seconds(contender, world)] * len(rounds)
    utilisations = [work / each.seconds_per_step for work, each in zip(works, rounds, strict=False)]
    predictions = [predicted_seconds(contender, world, each) for each in rounds if each.costs]
    differences = [p / each.seconds_per_step - 1 for p, each in zip(predictions, rounds, strict=False)]
    overheads = [statistics.fmean(stage.overhead for stage in each.costs) for each in rounds if each.costs]
    on_the_cpu = [statistics.fmean(stage.overhead_cpu for stage in each.costs) for each in rounds if each.costs]
    shares = [_busy_share(contender.num_microbatches, each) for each in rounds if each.costs]
    units = contender.num_microbatches * world.units_per_microbatch
    return Row(
        name=contender.name,
        step_seconds=Spread.of(outcome.seconds_per_step),
        per_second=units / outcome.median_seconds if rounds else None,
        utilisation=Spread.of(utilisations),
        ideal=ideal_utilisation(contender, world, rounds[0].facts) if rounds else None,
        busy=statistics.median(shares) if shares else None,
        overhead_seconds=statistics.median(overheads) if overheads else None,
        overhead_cpu_seconds=statistics.median(on_the_cpu) if on_the_cpu else None,
        predicted_seconds=statistics.median(predictions) if predictions else None,
        difference=statistics.median(differences) if differences else None,
        memory_bytes=max(memory) if memory else None,
        failure=outcome.failure,
    )


def _busy_share(num_microbatches: int, measured: Round) -> float:
    work = [num_microbatches * (stage.forward + stage.backward) + stage.update for stage in measured.costs]
    return statistics.fmean(work) / measured.seconds_per_step


def prediction_errors(worlds: Sequence[World], rows: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Returns, by workload, the median over the matrix of the absolute relative error of the simulator."""
    errors: dict[str, list[float]] = {}
    for world, row in ((world, row) for world, of_world in zip(worlds, rows, strict=True) for row in of_world):
        if row.difference is not None:
            errors.setdefault(world.workload, []).append(abs(row.difference))
    return {workload: statistics.median(values) for workload, values in errors.items()}


# ---- Markdown

Column = tuple[str, Callable[[Row], str]]
"""Name of a column, and a function that returns its text for a row."""


def markdown(
    worlds: Sequence[World], rows: Sequence[Sequence[Row]], notes: Sequence[Sequence[str]] | None = None
) -> str:
    """Returns all tables and the summary. notes: the lines below each table."""
    tables = [table_of(*each) for each in zip(worlds, rows, notes or [()] * len(worlds), strict=True)]
    return "\n".join([*tables, *summary(worlds, rows)]) + "\n"


def summary(worlds: Sequence[World], rows: Sequence[Sequence[Row]]) -> list[str]:
    return [
        f"Predicted step time against measured, {workload} compute: off by {100 * error:.1f} % in the median."
        for workload, error in prediction_errors(worlds, rows).items()
    ]


def table_of(world: World, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    columns = _columns(world, rows)
    lines = [f"### {title(world)}", "", _line([name for name, _ in columns]), "|---|" + "---:|" * (len(columns) - 1)]
    lines += [_line([cell(row) for _, cell in columns]) for row in rows]
    below = [f"- {row.name}: {row.failure}" for row in rows if row.failure] + [f"- {note}" for note in notes]
    below += [f"- {row.name}: {doubt}" for row in rows for doubt in doubts(row)]
    return "\n".join([*lines, *(["", *below] if below else []), ""])


def doubts(row: Row) -> list[str]:
    """Returns warnings about a row that a reader should know."""
    found = []
    if row.utilisation is not None and row.utilisation.median > MAX_UTILISATION:
        found.append(
            f"a utilisation of {row.utilisation.median:.2f} cannot be. The machine was slower while the bare loop ran, "
            "which it is divided by: run this again when the machine is quiet"
        )
    spread = row.step_seconds
    if spread is not None and spread.highest > (1 + MAX_DIFFERENCE) * spread.lowest:
        found.append(
            f"its rounds differ by {100 * (spread.highest / spread.lowest - 1):.0f} %, so the machine was not quiet: "
            "do not build on this row"
        )
    return found


def _columns(world: World, rows: Sequence[Row]) -> list[Column]:
    is_emulated, is_gpu = world.workload == "emulated", world.gpu is not None
    yardstick = next((row.per_second for row in rows if row.name == YARDSTICK), None)
    unit, form, scale = ("GiB", ".1f", 2**-30) if is_gpu else ("MiB", ".0f", 2**-20)
    speed: list[Column] = [
        ("contender", lambda row: row.name),
        (
            "microbatches/s" if is_emulated else "tokens/s",
            lambda row: _number(row.per_second, ".1f" if is_emulated else ",.0f"),
        ),
        ("step, ms", lambda row: _number(row.step_seconds.median if row.step_seconds else None, ".1f", scale=1000)),
        ("lowest - highest", lambda row: _range(row.step_seconds, 1000, ".1f")),
    ]
    ratio: list[Column] = [
        (
            f"over {YARDSTICK}",
            lambda row: _number(row.per_second / yardstick if row.per_second and yardstick else None, ".2f"),
        )
    ]
    utilisation: list[Column] = [
        ("utilisation", lambda row: _number(row.utilisation.median if row.utilisation else None, ".3f")),
        ("lowest - highest", lambda row: _range(row.utilisation, 1, ".3f")),
        ("ideal", lambda row: _number(row.ideal, ".3f")),
    ]
    busy: list[Column] = [("device busy", lambda row: _number(row.busy, ".3f"))]
    overhead: list[Column] = [
        ("overhead per action, us", lambda row: _number(row.overhead_seconds, ".0f", scale=1e6)),
        ("on the CPU", lambda row: _number(row.overhead_cpu_seconds, ".0f", scale=1e6)),
    ]
    prediction: list[Column] = [
        ("predicted step, ms", lambda row: _number(row.predicted_seconds, ".1f", scale=1000)),
        ("off by", lambda row: _number(row.difference, "+.1f", " %", scale=100)),
    ]
    memory: list[Column] = [(f"memory, {unit}", lambda row: _number(row.memory_bytes, form, scale=scale))]
    return [
        *speed,
        *(ratio if is_gpu else []),
        *utilisation,
        *(busy if is_gpu else overhead),
        *prediction,
        *([] if is_emulated else memory),
    ]


def notes_of(world: World, outcomes: Sequence[Outcome], readings: Mapping[str, Spread]) -> list[str]:
    """Returns, on GPUs, notes that apply to all rows of a world."""
    if world.gpu is None:
        return []
    notes = []
    if pings := [each.message_seconds for outcome in outcomes for each in outcome.rounds if each.message_seconds]:
        seconds, size = statistics.median(pings), world.gpu.message_bytes
        notes.append(
            f"Link: a message of {size / 1e6:.1f} MB takes {1000 * seconds:.2f} ms to the next process, "
            f"{size / seconds / 1e9:.1f} GB/s."
        )
    for name, label, form in (("sm_clock_mhz", "Clock, MHz", ",.0f"), ("power_watts", "Power, W", ",.0f")):
        if (spread := readings.get(name)) is not None:
            notes.append(f"{label}: {_range(spread, 1, form)}, median {spread.median:{form}}.")
    if world.gpu.tied:
        notes.append(
            f"Embedding and head share a weight in slipstream's {' and '.join(TYING)}; in all other rows they are "
            "apart, because torch.distributed.pipelining, pipedream and paci cannot share it."
        )
    return notes


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
    gpu: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns all results: settings, every round of every contender, and the rows computed from them. gpu: the
    description of the GPU."""
    return {
        "started": started.isoformat(timespec="seconds"),
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        **({} if gpu is None else {"gpu": dict(gpu)}),
        "prediction_errors": prediction_errors(worlds, rows),
        "worlds": [
            {
                "title": title(world),
                **{name: value for name, value in asdict(world).items() if name != "contenders"},
                "contenders": [
                    {"row": asdict(row), **asdict(outcome)} for row, outcome in zip(of_rows, of_outcomes, strict=True)
                ],
            }
            for world, of_rows, of_outcomes in zip(worlds, rows, outcomes, strict=True)
        ],
    }
