"""`slipstream study`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from .parse import parse


@dataclass(frozen=True)
class StudyArguments:
    """Trains every cell of a grid and compares them: optimizers x {sync, async, async with error feedback}. Each cell
    is one process that delays its updates as a pipeline would. A finished cell is not run again. Without GRID.toml it
    runs the built-in grid: AdamW and Muon on a CPU, in minutes."""

    output: Path | None = None
    """The folder for cells, table and figures; by default runs/study-NAME, with the name of the grid."""
    only: tuple[str, ...] = ()
    """Run only these optimizers. The table still shows every finished cell."""
    jobs: int | None = None
    """Cells that run at a time; by default one per core, or one on a GPU."""


def main(arguments: list[str]) -> None:
    from ..tools.study.grid import BUILTIN, load_grid
    from ..tools.study.runner import run_study

    path = BUILTIN
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
    given = parse(StudyArguments, arguments, "slipstream study [GRID.toml]")
    if given.jobs is not None and given.jobs < 1:
        raise UsageError(f"jobs = {given.jobs} is too small: use 1 or more")
    grid = load_grid(path)
    run_study(grid, path, given.output or Path("runs") / f"study-{grid.name}", given.only, given.jobs)
