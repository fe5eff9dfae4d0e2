"""`slipstream report`: reads the folders of one or more runs and writes one HTML page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from ..config.files import check_output
from ..errors import UsageError
from ..observe.console import Screen
from ..tools.report.page import page
from ..tools.report.read import Run, check_is_run, read_run
from .parse import find_run, parse


@dataclass(frozen=True)
class ReportArguments:
    """Makes one HTML page of one run or of several runs: curves, where the time went, a timeline, memory and
    configuration. The page needs no network and no server. It also works for a run that has not ended."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Folders of runs, or names of runs below runs/."""
    output: Path | None = None
    """The page to write; by default report.html in the folder of the run, or in this folder for several runs."""


def main(arguments: list[str]) -> None:
    given = parse(ReportArguments, arguments, "slipstream report")
    if not given.runs:
        raise UsageError("RUN is missing: name the folder of a run, such as runs/default")
    folders = [find_run(path) for path in given.runs]
    for path, times in Counter(map(os.path.realpath, folders)).items():
        if times > 1:
            raise UsageError(f"run = {path!r} is given {times} times: name it once")
    for folder in folders:
        check_is_run(folder)
    output = given.output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    _check_output(output)
    screen = Screen()
    text = page(_read(folders, screen))
    try:
        check_output(output)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(output, error.strerror or "") from error
    screen.print(f"{output}: {len(text.encode()) / 1000:,.0f} kB, open it in a browser")


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise UsageError(f"output = {str(output)!r} is a folder: name a file, such as {output / 'report.html'}")
    if not output.parent.is_dir():
        raise _unwritable(output, f"{output.parent} is no folder")


def _unwritable(output: Path, why: str) -> UsageError:
    return UsageError(f"output = {str(output)!r} cannot be written ({why}): choose another")


def _read(folders: Sequence[Path], screen: Screen) -> list[Run]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    runs = []
    with progress:
        for folder, name in zip(folders, names(folders), strict=True):
            metrics = folder / "metrics.jsonl"
            task = progress.add_task(name, total=metrics.stat().st_size if metrics.is_file() else None)
            runs.append(read_run(folder, name, partial(progress.advance, task)))
    return runs


def names(folders: Sequence[Path]) -> list[str]:
    """Returns a name for every folder: its base name, or its path if another folder has the same base name."""
    own = [os.path.basename(os.path.realpath(folder)) for folder in folders]
    return [str(folder) if own.count(name) > 1 else name for folder, name in zip(folders, own, strict=True)]
