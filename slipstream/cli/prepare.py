"""`slipstream prepare`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ..errors import UsageError
from .parse import cannot_write, parse


@dataclass(frozen=True)
class PrepareArguments:
    """Turns text into token shards once. Training then maps the shards into memory and does not tokenise.

    Train on them with --data.sources PREFIX.train.*.bin --data.validation-sources PREFIX.validation.*.bin.
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE ...")]
    """Text, JSONL (also .jsonl.gz and .jsonl.zst) or Parquet files, folders or globs; or hf:NAME, a dataset of the
    Hugging Face Hub or a folder of one, which is streamed. Parquet and .zst need slipstream[parquet], hf:NAME needs
    slipstream[datasets]."""
    output: str
    """Path and beginning of the shards' names: data/web gives data/web.train.00000.bin and so on."""
    tokenizer: str = "bytes"
    """"bytes", or a tokenizer.json or its folder, or hf:NAME, that of a model of the Hugging Face Hub."""
    end_of_text: str | None = None
    """The token of the tokenizer that ends a document; by default it is found by its usual names. "none": documents
    have no end token."""
    shard_tokens: int = 100_000_000
    """Tokens in a shard, except the last one."""
    validation_fraction: float = 0.05
    """The part that is held out: the end of the tokens."""
    text_field: str = "text"
    """The field of a JSONL object, or the column of a Parquet file or dataset, that holds the text."""
    config: str | None = None
    """The configuration (subset) of a dataset, such as sample-10BT."""
    split: str = "train"
    """The split of a dataset to read."""
    validation_split: str | None = None
    """The split of a dataset to hold out as a whole, instead of --validation-fraction."""
    max_tokens: float | None = None
    """Number of tokens after which reading stops, such as 1e9. If --validation-split is given, each split has so many
    at most."""
    overwrite: bool = False
    """Replace earlier shards of the same name."""


def main(arguments: list[str]) -> None:
    from ..data import prepare

    given = parse(PrepareArguments, arguments, "slipstream prepare")
    console = Console(stderr=True)
    from_hub = any(source.startswith("hf:") for source in given.sources)
    progress = Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn() if from_hub else DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("preparing", total=None)
    try:
        with progress:
            shards = prepare(
                output=given.output,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
                tell=lambda line: print(line, file=sys.stderr),
                # All other options have the names of prepare's arguments.
                **{name: value for name, value in vars(given).items() if name != "output"},
            )
    except OSError as error:
        raise UsageError(cannot_write(error, "output")) from error
    for shard in shards:
        print(shard)
