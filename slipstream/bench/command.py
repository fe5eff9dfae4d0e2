"""`slipstream bench`: the matrix from end to end. The rules stand in benchmarks/RULES.md."""

from __future__ import annotations

import datetime
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..arguments import RunFailure, UsageError, parse
from ..metrics import Screen, finite
from ..pipeline import under_torchrun
from .figure import draw
from .matrix import REAL_STAGES, Extent, total_seconds, worlds
from .memory import peak_memory
from .progress import Bar, minutes
from .results import Row, document, markdown, rows_of, summary, table_of
from .world import Outcome, World, compete

MAX_STAGES = 32
"""Processes on one machine; beyond that it measures the machine."""


@dataclass(frozen=True)
class BenchArguments:
    """Measures slipstream's schedules beside those of torch.distributed.pipelining, in one interleaved run, and writes
    results.json, table.md and figure.png. About half an hour; nothing else should run on the machine meanwhile."""

    only: Literal["emulated", "real"] | None = None
    """emulated: stages that sleep, which show the schedule. real: a small decoder on two stages. Both if left out."""
    stages: tuple[int, ...] = ()
    """Numbers of emulated stages; 2 4 8 if left out."""
    rounds: int | None = None
    """How often every rival runs; 3 if left out."""
    quick: bool = False
    """Two stages, as many microbatches, one round and no memory: to see that it works, in half a minute."""
    output: Path | None = None
    """Folder to write; a new one below runs/ if left out."""


def bench(arguments: list[str]) -> None:
    given = parse(BenchArguments, arguments, "slipstream bench", inspect.getdoc(BenchArguments) or "")
    extent = _extent(given)
    if under_torchrun():
        raise UsageError("slipstream bench starts its own processes: start it without torchrun")
    started = datetime.datetime.now(datetime.UTC)
    folder = given.output or Path("runs") / f"bench-{started:%Y%m%d-%H%M%S}"
    _make_folder(folder)
    run_matrix(worlds(extent), folder, with_memory=not given.quick, started=started)


def _extent(given: BenchArguments) -> Extent:
    for num_stages in given.stages:
        if not 2 <= num_stages <= MAX_STAGES:
            raise UsageError(f"stages = {num_stages} cannot be compared: use 2 to {MAX_STAGES}")
    if given.only == "real" and given.stages not in ((), (REAL_STAGES,)):
        raise UsageError(
            f"stages = {' '.join(map(str, given.stages))} is for emulated compute, and real compute has {REAL_STAGES}: "
            "leave stages or only = 'real' out"
        )
    if given.rounds is not None and given.rounds < 1:
        raise UsageError(f"rounds = {given.rounds} measures nothing: use 1 or more")
    stages = given.stages or ((2,) if given.quick else (2, 4, 8))
    return Extent(
        emulated_stages=() if given.only == "real" else tuple(dict.fromkeys(stages)),
        with_real=given.only != "emulated",
        num_rounds=given.rounds or (1 if given.quick else 3),
        quick=given.quick,
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "results.json").exists():
            raise UsageError(f"output = {str(folder)!r} has results already: choose another folder")
        (folder / "table.md").write_text("", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"output = {str(folder)!r} cannot be written ({error.strerror}): choose another") from error


@dataclass
class Finished:
    """What is known so far, world by world."""

    worlds: list[World] = field(default_factory=list)
    outcomes: list[list[Outcome]] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list)


def run_matrix(matrix: list[World], folder: Path, with_memory: bool, started: datetime.datetime) -> Finished:
    """Everything that is finished is written after every world, so an interrupt loses one of them."""
    screen = Screen()
    guess = minutes(sum(map(total_seconds, matrix)))
    screen.print(f"{len(matrix)} table{'s' * (len(matrix) > 1)}, which may take {guess}; writing {folder}")
    finished = Finished()
    for index, world in enumerate(matrix):
        outcomes = compete(world, Bar(matrix, index))
        screen.show_cursor()  # a stage that failed had no time to
        wants_memory = with_memory and world.workload == "real"
        memory = _memory(world, outcomes, screen) if wants_memory else [None] * len(outcomes)
        finished.worlds.append(world)
        finished.outcomes.append(outcomes)
        finished.rows.append(rows_of(world, outcomes, memory))
        screen.print(table_of(world, finished.rows[-1]))
        written = _write(finished, folder, started)
    screen.print("\n".join([*summary(finished.worlds, finished.rows), f"{folder}: {', '.join(written)}"]))
    if not any(row.step_seconds for of_world in finished.rows for row in of_world):
        raise RunFailure(f"no rival ran: {folder / 'table.md'} says why")
    return finished


def _memory(world: World, outcomes: list[Outcome], screen: Screen) -> list[list[int] | None]:
    memory = []
    for number, outcome in enumerate(outcomes, 1):
        if screen.is_terminal:
            screen.print(f"memory of rival {number} of {len(outcomes)}", end="\r")
        memory.append(peak_memory(outcome.rival, world) if outcome.rounds else None)
    return memory


def _write(finished: Finished, folder: Path, started: datetime.datetime) -> list[str]:
    everything = document(finished.worlds, finished.outcomes, finished.rows, started)
    (folder / "results.json").write_text(json.dumps(finite(everything), indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(finished.worlds, finished.rows), encoding="utf-8")
    drawn = draw(finished.worlds, finished.rows, folder / "figure.png")
    return ["results.json", "table.md", *(["figure.png"] if drawn else [])]
