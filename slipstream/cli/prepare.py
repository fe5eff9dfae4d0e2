"""`slipstream prepare`."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from ..errors import UsageError
from .parse import cannot_write, parse


@dataclass(frozen=True)
class PrepareArguments:
    """Turns text into token shards once. Training then maps the shards into memory and does not tokenise.

    Train on them with --data.sources PREFIX.train.*.bin --data.validation-sources PREFIX.validation.*.bin.
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE ...")]
    """Text, JSONL or Parquet files, folders or globs. Parquet needs slipstream[parquet]."""
    output: str
    """Path and beginning of the shards' names: data/web gives data/web.train.00000.bin and so on."""
    tokenizer: str = "bytes"
    """"bytes", or a tokenizer.json or its folder."""
    end_of_text: str | None = None
    """The token of the tokenizer that ends a document; by default it is found by its usual names. "none": documents
    have no end token."""
    shard_tokens: int = 100_000_000
    """Tokens in a shard, except the last one."""
    validation_fraction: float = 0.05
    """The part that is held out: the end of the tokens."""
    text_field: str = "text"
    """The field of a JSONL object, or the column of a Parquet file, that holds the text."""
    overwrite: bool = False
    """Replace earlier shards of the same name."""


def main(arguments: list[str]) -> None:
    from ..data import DataError, prepare

    given = parse(PrepareArguments, arguments, "slipstream prepare", inspect.getdoc(PrepareArguments) or "")
    console = Console(stderr=True)
    progress = Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
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
                end_of_text=given.end_of_text,
                overwrite=given.overwrite,
                tell=lambda line: print(line, file=sys.stderr),
            )
    except DataError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(cannot_write(error, "output")) from error
    for shard in shards:
        print(shard)
