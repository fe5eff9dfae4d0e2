"""The command line: train | schedule | prepare.

    slipstream train [CONFIG.toml] [--section.field value ...]
    slipstream schedule NAME --stages P --microbatches M
    slipstream prepare SOURCE ... --output PREFIX

A user's mistake is one sentence and exit code 2; a stage that failed is one sentence and exit code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

USAGE = "usage: slipstream {train,schedule,prepare} ... (each explains itself with --help)"


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "schedule": _schedule, "prepare": _prepare}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if arguments[0] not in commands:
        print(f"command {arguments[0]!r} is unknown; {USAGE}", file=sys.stderr)
        return 2
    return commands[arguments[0]](list(arguments[1:]))


def _refuse(error: Exception | str) -> int:
    print(f"slipstream: {error}", file=sys.stderr)
    return 2


# ---- train


def _train(arguments: list[str]) -> int:
    from .config import Config, ConfigError, load_toml
    from .pipeline import NonFiniteError, PipelineError, StageFailure
    from .trainer import train

    try:
        default = Config()
        if arguments and not arguments[0].startswith("-"):
            default = load_toml(Path(arguments.pop(0)))
        config = tyro.cli(
            Config, prog="slipstream train [CONFIG.toml]", description=train.__doc__, args=arguments, default=default
        )
        train(config)
    except ConfigError as error:
        return _refuse(error)
    except StageFailure as failure:
        folder = Path(config.run.folder) / config.run.name
        where = ""
        if failure.details and folder.is_dir():
            (folder / "failure.txt").write_text(failure.details, encoding="utf-8")
            where = f" (traceback in {folder / 'failure.txt'})"
        print(f"slipstream: {failure}{where}", file=sys.stderr)
        return 1
    except (PipelineError, NonFiniteError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slipstream: interrupted", file=sys.stderr)
        return 130
    return 0


# ---- schedule


@dataclass(frozen=True)
class ScheduleArguments:
    name: Annotated[str, tyro.conf.Positional]
    """two_bw, one_f_one_b, gpipe, pipedream or paci."""
    stages: int = 4
    microbatches: int = 4
    """To a step."""
    steps: int = 3
    """Steps to print and draw."""
    depth: str = "minimum"
    """two_bw: "double" keeps twice the forwards in flight and hides the latency of links."""
    sync_start_steps: int = 0
    """Steps played as one_f_one_b first."""
    forward: float = 1.0
    """Cost of a forward, in any unit of time."""
    backward: float = 2.0
    latency: float = 0.0
    """Of a link between two stages, in the same unit."""
    output: tuple[Path, ...] = ()
    """Where to draw, .svg or .png; by default NAME_pP_mM.svg and .png in this folder."""


def _schedule(arguments: list[str]) -> int:
    from .schedule import Schedule, ScheduleError
    from .schedule.command import show
    from .schedule.simulate import Costs

    given = tyro.cli(ScheduleArguments, prog="slipstream schedule", description=show.__doc__, args=arguments)
    try:
        schedule = Schedule(
            given.name,
            given.stages,
            given.microbatches,
            given.steps,
            depth=given.depth,
            sync_start_steps=given.sync_start_steps,
            global_update=given.name not in ("pipedream", "paci"),
        )
        stem = f"{given.name}_p{given.stages}_m{given.microbatches}"
        outputs = list(given.output) or [Path(f"{stem}.svg"), Path(f"{stem}.png")]
        costs = Costs(forward=given.forward, backward=given.backward, latency=given.latency)
        print(show(schedule, costs, outputs, max_width=Console().width))
    except (ScheduleError, OSError) as error:
        return _refuse(error)
    return 0


# ---- prepare


@dataclass(frozen=True)
class PrepareArguments:
    sources: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Text or JSONL files, folders or globs."""
    output: str
    """Path and beginning of the shards' names: data/web gives data/web_train_00000.bin and so on."""
    tokenizer: str = "bytes"
    """"bytes", or a tokenizer.json."""
    shard_tokens: int = 100_000_000
    validation_fraction: float = 0.05
    text_field: str = "text"
    """The field of a JSONL object that holds its text."""
    overwrite: bool = False


def _prepare(arguments: list[str]) -> int:
    from .data import DataError, prepare

    given = tyro.cli(PrepareArguments, prog="slipstream prepare", description=prepare.__doc__, args=arguments)
    progress = Progress("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    task = progress.add_task("preparing", total=None)
    try:
        with progress:
            shards = prepare(
                given.sources,
                given.tokenizer,
                given.output,
                given.shard_tokens,
                given.validation_fraction,
                lambda done, total: progress.update(task, completed=done, total=total),
                text_field=given.text_field,
                overwrite=given.overwrite,
            )
    except DataError as error:
        return _refuse(error)
    for shard in shards:
        print(shard)
    return 0
