"""Streams the text of datasets of Hugging Face for `prepare`. Every row is a document, as every row of Parquet is.

A name after "hf:" is one of the Hub, or a local folder that the datasets library reads. Rows are read as they arrive:
the dataset is neither downloaded as a whole nor held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..config.files import expand_home
from .parquet import check_column, rows_with_text
from .text import HUB_PREFIX, Piece, Text
from .tokens import DataError, optional

_BATCH_ROWS = 1024


def open_hub(source: str, config: str | None) -> Mapping[str, Any]:
    """Opens a dataset, and returns its splits by name. Nothing of them has been read.

    config: the name of a configuration (a subset) of the dataset. None means the only one that there is.
    """
    datasets = optional("datasets", "datasets", f"sources names {source!r}, which")
    name = source.removeprefix(HUB_PREFIX)
    if not name:
        raise DataError(f"sources names {source!r}, which names no dataset: write hf:NAME, or hf: and a folder.")
    path = expand_home(name)
    with _refused(source):
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():  # save_to_disk wrote it
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path) if path.exists() else name, config, streaming=True)
        return found if isinstance(found, Mapping) else {str(found.split or "train"): found}


def hub_text(source: str, splits: Mapping[str, Any], name: str, field: str, text_field: str) -> Text:
    """Returns the text of a split, of which nothing has been read. field: the setting that names the split."""
    if name not in splits:
        raise DataError(f"{field} is {name!r}, which {source!r} does not have: set it to one of {', '.join(splits)}.")
    described = (splits[name].info.splits or {}).get(name)
    return Text(_read(source, splits[name], text_field), described.num_examples if described else None)


def _read(source: str, rows: Any, text_field: str) -> Iterator[Piece]:
    """Yields the text of every row of a split that has some. The position of a piece is the number of rows so far."""

    def columns() -> Iterator[Any]:
        for table in rows.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            check_column(source, table.schema, text_field)
            yield table.column(text_field)

    with _refused(source):
        for row, text in rows_with_text(columns(), source, text_field):
            yield Piece(text, True, row)


@contextmanager
def _refused(source: str) -> Iterator[None]:
    """Turns whatever the library raises into a DataError: of the Hub, the network, the files or pyarrow."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"sources names {source!r}, which the datasets library cannot read ({reason}): check the name, config and "
            "the network."
        ) from None
