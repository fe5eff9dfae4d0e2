"""`slipstream study`: runs all cells of a grid and draws the results.

A finished cell is never run again. So a study that is stopped and started again, or whose grid is extended, continues
with the missing cells.
"""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...errors import ConfigError, RunFailure
from ...observe.console import Screen
from ...observe.metrics import loss_said
from ...train.build import build_components
from ...transport.environment import under_torchrun
from .cell import Cell
from .figures import draw_cosines, draw_gaps, draw_losses
from .grid import Grid
from .record import Record
from .results import markdown_table, rows, sweep_table
from .run import record_path, run_cell
from .workers import default_jobs, tell, worker_pool


def run_study(grid: Grid, grid_path: Path, folder: Path, only: Sequence[str], jobs: int | None) -> list[Record]:
    """Runs the cells that have no record yet. Then writes cells.jsonl, table.md and the figures of all cells. only:
    names of optimizers to run. Empty means all."""
    if under_torchrun():
        raise ConfigError(
            "slipstream study is one process, or several by --jobs: start it without torchrun, or unset RANK"
        )
    torch.set_num_threads(1)  # this process computes nothing, and fork is safe if there was never a second thread
    cells = list({cell.id: cell for cell in grid.cells}.values())
    optimizers = {cell.config.optimizer.name: None for cell in cells}
    for name in only:
        if name not in optimizers:
            raise ConfigError(f"only = {name!r} is no optimizer of this grid: choose from {', '.join(optimizers)}")
    for cell in cells:
        try:
            build_components(cell.config)
        except ConfigError as error:
            raise ConfigError(f"cell {cell.name}: {error}") from error
        if not cell.config.evaluation.batches:
            raise ConfigError("evaluation.batches = 0 leaves nothing to compare: use 1 or more")
    _make_folder(folder, grid_path)
    _records(grid, folder)  # raises now if one of them cannot be read
    screen = Screen()
    wanted = [cell for cell in cells if not only or cell.config.optimizer.name in only]
    todo = [cell for cell in wanted if not record_path(folder, cell).exists()]
    num_jobs = min(jobs or default_jobs(_use_cuda(cells)), max(1, len(todo)))
    screen.print(
        f"study {grid.name}: {len(wanted)} cells, {len(wanted) - len(todo)} of them done before, "
        f"{num_jobs} at a time; writing {folder}"
    )
    known = {cell.id for cell in cells}
    if alone := [cell for cell in cells if cell.synchronous().id not in known]:
        screen.print(
            f"{len(alone)} cells will have no gap, first {_words(alone[0])}: the grid has no synchronous cell to "
            "measure them against; add mode = 'sync' beside theirs"
        )
    failures = _run_cells(grid.name, todo, folder, num_jobs, screen) if todo else []
    records = _records(grid, folder)
    if records:
        screen.print(write_results(records, folder))
    if failures:
        raise RunFailure(f"{len(failures)} of {len(cells)} cells failed, the first was {failures[0]}")
    return records


def _records(grid: Grid, folder: Path) -> list[Record]:
    """Returns the records of all finished cells. A cell with several places in the grid has a record for each place."""
    records = []
    for cell in grid.cells:
        path = record_path(folder, cell)
        if path.exists():
            try:
                record = Record.from_json(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{path} is no record of a cell ({error}): remove it, and it is run again") from error
            records.append(replace(record, study=grid.name, mode=cell.mode, setting=cell.setting))
    return records


def _use_cuda(cells: Sequence[Cell]) -> bool:
    return any(cell.config.train.device == "cuda" for cell in cells)


def _make_folder(folder: Path, grid_path: Path) -> None:
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        target = folder / "grid.toml"
        if not (target.exists() and target.samefile(grid_path)):
            shutil.copyfile(grid_path, target)
    except OSError as error:
        raise ConfigError(f"output = {str(folder)!r} cannot be written ({error.strerror}): choose another") from error


def _run_cells(study: str, cells: Sequence[Cell], folder: Path, num_jobs: int, screen: Screen) -> list[str]:
    """Runs the cells in worker processes. Returns a sentence for each cell that failed; the other cells still run."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen,
        disable=not screen.is_terminal,
    )
    total = progress.add_task("steps of all cells", total=sum(cell.config.train.steps for cell in cells))
    done: dict[str, int] = {}
    failures: list[str] = []

    with worker_pool(num_jobs, _use_cuda(cells)) as (pool, messages), progress:
        running: dict[Future[Record | str], Cell]
        running = {pool.submit(_work, study, cell, folder): cell for cell in cells}
        while running:
            finished, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            while not messages.empty():
                name, steps, word = messages.get()
                done[name] = steps
                progress.update(total, completed=sum(done.values()), description=f"{name} {word}")
            for future in finished:
                cell = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    raise RunFailure(
                        f"a worker died while {cell.name} was waiting or running, perhaps for want of memory: "
                        "start the study again with fewer --jobs; cells that are done are kept"
                    ) from None
                if isinstance(result, str):
                    failures.append(result)
                else:
                    result = _sentence(cell, result, len(cells) - len(running), len(cells))
                screen.print(result)
    return failures


def _words(cell: Cell) -> str:
    """Returns a text that distinguishes the cell from others of its grid."""
    setting = "".join(f" {name}={value}" for name, value in cell.setting.items())
    return f"{cell.config.optimizer.name} {cell.mode} seed {cell.config.train.seed}{setting}"


def _sentence(cell: Cell, record: Record, number: int, of: int) -> str:
    loss = "diverged"
    if record.final_loss is not None:
        loss = f"held-out loss {loss_said(record.final_loss, record.bits_per_byte)}"
    return (
        f"[{number}/{of}] {_words(cell)}: {loss}, "
        f"{record.seconds:.0f} s, {record.tokens_per_second:,.0f} tokens/s, optimizer {record.optimizer_share:.0%}"
    )


def _work(study: str, cell: Cell, folder: Path) -> Record | str:
    """Runs a cell in a worker. Returns a sentence if it fails, because not every exception can be pickled."""
    path = record_path(folder, cell).with_name("failure.txt")
    try:
        path.unlink(missing_ok=True)
        return run_cell(study, cell, folder, lambda steps, word: tell((cell.name, steps, word)))
    except Exception as error:
        words = " ".join(f"{cell.name} failed with {type(error).__name__}: {error}".split())
        try:
            path.write_text(traceback.format_exc(), encoding="utf-8")
        except OSError:
            return words
        return f"{words} (traceback in {path})"


def write_results(records: Sequence[Record], folder: Path) -> str:
    """Writes cells.jsonl, table.md and the figures. Returns the table and the names of the written files."""
    (folder / "cells.jsonl").write_text("".join(f"{record.to_json()}\n" for record in records), encoding="utf-8")
    tables = [markdown_table(rows(records))]
    if len({(r.optimizer, r.learning_rate) for r in records if r.mode == "sync"}) > len({r.optimizer for r in records}):
        tables.append(sweep_table(records))
    text = "\n".join(tables)
    (folder / "table.md").write_text(text, encoding="utf-8")
    figures = {"loss.png": draw_losses, "gap.png": draw_gaps, "cosine.png": draw_cosines}
    written = ["cells.jsonl", "table.md", *(name for name, draw in figures.items() if draw(records, folder / name))]
    return f"{text}\n{folder}: {', '.join(written)}"
