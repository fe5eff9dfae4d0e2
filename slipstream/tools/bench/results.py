"""Turns the measurements into rows, a Markdown table, and a JSON document with every round."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .contenders import TYING, Round, World
from .matrix import title
from .spread import Spread
from .theory import ideal_utilisation, nominal_seconds, predicted_seconds
from .turns import Outcome

YARDSTICK = "torch 1F1B"
"""The contender to which the speed of all others is compared on GPUs."""


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


@dataclass(frozen=True)
class Table:
    """The results of one world."""

    world: World
    outcomes: Sequence[Outcome]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    """Lines below the table that apply to all rows."""


MAX_UTILISATION, MAX_DIFFERENCE = 1.02, 0.1
"""Limits above which a table prints a warning about a row (`doubts`)."""


def rows_of(world: World, outcomes: Sequence[Outcome], memory: Sequence[int | None]) -> list[Row]:
    """memory: bytes of each contender, if they were measured outside of the rounds."""
    bare = next((outcome for outcome in outcomes if outcome.contender.engine == "bare"), None)
    return [_row(world, outcome, bare, bytes_) for outcome, bytes_ in zip(outcomes, memory, strict=True)]


def _row(world: World, outcome: Outcome, bare: Outcome | None, memory: int | None) -> Row:
    contender, rounds = outcome.contender, outcome.rounds
    if world.workload != "emulated":  # the work is the time without a pipeline, in the same round
        works = [each.facts["mean_stage_seconds"] for each in bare.rounds] if bare else []
    else:
        works = [nominal_seconds(contender, world)] * len(rounds)
    costed = [each for each in rounds if each.costs]
    predictions = [predicted_seconds(contender, world, each) for each in costed]
    units = contender.num_microbatches * world.units_per_microbatch
    return Row(
        name=contender.name,
        step_seconds=Spread.of(outcome.seconds_per_step),
        per_second=units / statistics.median(outcome.seconds_per_step) if rounds else None,
        utilisation=Spread.of([work / each.seconds_per_step for work, each in zip(works, rounds, strict=False)]),
        ideal=ideal_utilisation(contender, world, rounds[0].facts) if rounds else None,
        busy=_median([_busy_share(contender.num_microbatches, each) for each in costed]),
        overhead_seconds=_median([statistics.fmean(stage.overhead for stage in each.costs) for each in costed]),
        overhead_cpu_seconds=_median([statistics.fmean(stage.overhead_cpu for stage in each.costs) for each in costed]),
        predicted_seconds=_median(predictions),
        difference=_median([p / each.seconds_per_step - 1 for p, each in zip(predictions, costed, strict=True)]),
        memory_bytes=max((each.memory_bytes for each in rounds if each.memory_bytes is not None), default=memory),
        failure=outcome.failure,
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _busy_share(num_microbatches: int, measured: Round) -> float:
    work = [num_microbatches * (stage.forward + stage.backward) + stage.update for stage in measured.costs]
    return statistics.fmean(work) / measured.seconds_per_step


def prediction_errors(tables: Sequence[Table]) -> dict[str, float]:
    """Returns, by workload, the median over the matrix of the absolute relative error of the simulator."""
    errors: dict[str, list[float]] = {}
    for table in tables:
        for row in table.rows:
            if row.difference is not None:
                errors.setdefault(table.world.workload, []).append(abs(row.difference))
    return {workload: statistics.median(values) for workload, values in errors.items()}


# ---- Markdown


def markdown(tables: Sequence[Table]) -> str:
    """Returns all tables and the summary."""
    return "\n".join([*map(text_of, tables), *summary(tables)]) + "\n"


def summary(tables: Sequence[Table]) -> list[str]:
    return [
        f"Predicted step time against measured, {workload} compute: off by {100 * error:.1f} % in the median."
        for workload, error in prediction_errors(tables).items()
    ]


def text_of(table: Table) -> str:
    yardstick = next((row.per_second for row in table.rows if row.name == YARDSTICK), None)
    rows = [_cells(table.world, row, yardstick) for row in table.rows]
    names, texts = [name for name, _ in rows[0]], [[text for _, text in cells] for cells in rows]
    lines = [f"### {title(table.world)}", "", _line(names), "|---|" + "---:|" * (len(names) - 1), *map(_line, texts)]
    below = [f"- {row.name}: {row.failure}" for row in table.rows if row.failure]
    below += [f"- {note}" for note in table.notes]
    below += [f"- {row.name}: {doubt}" for row in table.rows for doubt in doubts(row)]
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


def _cells(world: World, row: Row, yardstick: float | None) -> list[tuple[str, str]]:
    """Returns name and text of every cell of a row. yardstick: speed of the contender to compare with."""
    is_emulated, is_gpu = world.workload == "emulated", world.gpu is not None
    unit, form = ("microbatches", ".1f") if is_emulated else ("tokens", ",.0f")
    cells = [("contender", row.name), (f"{unit}/s", _number(row.per_second, form))]
    cells += _spread_cells("step, ms", row.step_seconds, ".1f", 1000)
    if is_gpu:
        ratio = row.per_second / yardstick if row.per_second and yardstick else None
        cells.append((f"over {YARDSTICK}", _number(ratio, ".2f")))
    cells += _spread_cells("utilisation", row.utilisation, ".3f")
    cells.append(("ideal", _number(row.ideal, ".3f")))
    if is_gpu:
        cells.append(("device busy", _number(row.busy, ".3f")))
    else:
        cells.append(("overhead per action, us", _number(row.overhead_seconds, ".0f", 1e6)))
        cells.append(("on the CPU", _number(row.overhead_cpu_seconds, ".0f", 1e6)))
    cells.append(("predicted step, ms", _number(row.predicted_seconds, ".1f", 1000)))
    cells.append(("off by", _number(row.difference, "+.1f", 100, " %")))
    if is_gpu:
        cells.append(("memory, GiB", _number(row.memory_bytes, ".1f", 2**-30)))
    elif not is_emulated:
        cells.append(("memory, MiB", _number(row.memory_bytes, ".0f", 2**-20)))
    return cells


def _spread_cells(name: str, spread: Spread | None, form: str, scale: float = 1) -> list[tuple[str, str]]:
    return [
        (name, "" if spread is None else _number(spread.median, form, scale)),
        ("lowest - highest", "" if spread is None else _range(spread, form, scale)),
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
    for name, label in (("sm_clock_mhz", "Clock, MHz"), ("power_watts", "Power, W")):
        if (spread := readings.get(name)) is not None:
            notes.append(f"{label}: {_range(spread, ',.0f')}, median {spread.median:,.0f}.")
    if world.gpu.tied:
        notes.append(
            f"Embedding and head share a weight in slipstream's {' and '.join(TYING)}; in all other rows they are "
            "apart, because torch.distributed.pipelining, pipedream and paci cannot share it."
        )
    return notes


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str, scale: float = 1, unit: str = "") -> str:
    return "" if value is None else f"{scale * value:{form}}{unit}"


def _range(spread: Spread, form: str, scale: float = 1) -> str:
    return f"{scale * spread.lowest:{form}} - {scale * spread.highest:{form}}"


# ---- JSON


def document(
    tables: Sequence[Table], started: datetime.datetime, gpu: Mapping[str, Any] | None = None
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
        "prediction_errors": prediction_errors(tables),
        "worlds": [
            {
                "title": title(table.world),
                **{name: value for name, value in asdict(table.world).items() if name != "contenders"},
                "contenders": [
                    {"row": asdict(row), **asdict(outcome)}
                    for row, outcome in zip(table.rows, table.outcomes, strict=True)
                ],
            }
            for table in tables
        ],
    }
