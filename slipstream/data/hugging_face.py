"""Streams the text of datasets of Hugging Face for `prepare`. Every row is a document, as every row of Parquet is.

A name after "hf:" is one of the Hub, or a local folder that the datasets library reads. Rows are read as they arrive:
the dataset is neither downloaded as a whole nor held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..config.files import expand_home
from .parquet import check_column
from .text import HUB_PREFIX, Piece
from .tokens import DataError

_BATCH_ROWS = 1024


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset, of which nothing has been read."""

    source: str
    """What the user wrote: "hf:" and the name."""
    rows: Any
    """The split itself, as datasets loads it."""
    num_rows: int | None
    """Number of rows, if the dataset tells it."""

    def read(self, text_field: str) -> Iterator[Piece]:
        """Yields the text of every row that has some. The position of a piece is the number of rows so far."""
        row = 0
        with _refused(self.source):
            for table in self.rows.with_format("arrow").iter(batch_size=_BATCH_ROWS):
                check_column(self.source, table.schema, text_field)
                for text in table.column(text_field).to_pylist():
                    row += 1
                    if text is None:
                        raise DataError(
                            f"{self.source!r} row {row} has no text in the column {text_field!r}: set text_field to "
                            "one that has."
                        )
                    if text:
                        yield Piece(text, True, row)


def open_hub(source: str, config: str | None) -> Callable[[str, str], HubSplit]:
    """Opens a dataset, and returns a function from the name of a split, and of the setting that names it, to the split.

    config: the name of a configuration (a subset) of the dataset. None means the only one that there is.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"sources names {source!r}, which needs the datasets library: pip install 'slipstream[datasets]'."
        ) from None
    name = source.removeprefix(HUB_PREFIX)
    if not name:
        raise DataError(f"sources names {source!r}, which names no dataset: write hf:NAME, or hf: and a folder.")
    path = expand_home(name)
    with _refused(source):
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():  # save_to_disk wrote it
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path) if path.exists() else name, config, streaming=True)
        splits: Mapping[str, Any] = found if isinstance(found, Mapping) else {str(found.split or "train"): found}

    def split(wanted: str, field: str) -> HubSplit:
        if wanted not in splits:
            raise DataError(
                f"{field} is {wanted!r}, which {source!r} does not have: set it to one of {', '.join(splits)}."
            )
        rows = splits[wanted]
        described = (rows.info.splits or {}).get(wanted)
        return HubSplit(source, rows, described.num_examples if described else None)

    return split


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
