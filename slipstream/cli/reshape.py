"""`slipstream reshape`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..config.layout import Layout
from ..config.toml import load_toml
from ..errors import ConfigError, UsageError
from ..observe.console import Screen
from ..train.reshape import check_layout, write_command
from .parse import find_run, parse


@dataclass(frozen=True)
class ReshapeArguments:
    """Changes the layout of a running run. 4 is four stages, 2x2 is two stages in each of two replicas, 2/5,5 is two
    stages of five layers. The run changes within a few steps, from memory to memory, and says how long it paused. It
    needs as many processes as its largest layout: start it with --pipeline.processes N."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, such as runs/default, or its name below runs/."""
    layout: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LAYOUT")]
    """STAGES or STAGESxREPLICAS, optionally followed by /LAYERS,LAYERS,..."""


def main(arguments: list[str]) -> None:
    given = parse(ReshapeArguments, arguments, "slipstream reshape")
    folder = find_run(given.run)
    path = folder / "config.toml"
    if not os.path.isfile(path):
        raise UsageError(f"run = '{given.run}' has no config.toml and is no run: name the folder of one")
    try:
        layout = Layout.parse(given.layout)
        check_layout(load_toml(path), layout)
        if (folder / "summary.json").is_file():
            raise UsageError(f"run = '{given.run}' has ended, and has a summary.json: name one that runs")
        write_command(folder, layout)
    except ConfigError as error:
        raise UsageError(f"layout = {given.layout!r} is invalid: {error}") from error
    except OSError as error:
        raise UsageError(
            f"run = '{given.run}' cannot be written to ({error.strerror}): are you who runs it?"
        ) from error
    Screen().print(f"{folder} changes to {layout} within a few steps, if it is running")
