"""Reads the text of Parquet files for `prepare`. Every row is a document, as every line of a .jsonl file is.

A file is read one row group at a time and only in the column of the text, so that it may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .text import Piece
from .tokens import DataError, optional

_BATCH_ROWS = 1024


def check_parquet(path: Path, text_field: str) -> None:
    """Raises a DataError if a file cannot be read, or has no text in the column `text_field`."""
    with _opened(path, text_field):
        pass


def read_parquet(path: Path, text_field: str) -> Iterator[Piece]:
    """Yields the text of every row that has some. The position of a piece counts bytes in proportion to rows."""
    size = path.stat().st_size
    with _opened(path, text_field) as file:
        columns = (
            batch.column(0)
            for group in range(file.num_row_groups)
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[text_field])
        )
        for row, text in rows_with_text(columns, str(path), text_field):
            yield Piece(text, True, size * row // file.metadata.num_rows)


def rows_with_text(columns: Iterable[Any], source: str, text_field: str) -> Iterator[tuple[int, str]]:
    """Yields the number of every row that has some text, counted from 1, and the text."""
    for row, text in enumerate((text for column in columns for text in column.to_pylist()), start=1):
        if text is None:
            raise DataError(
                f"{source!r} row {row} has no text in the column {text_field!r}: set text_field to one that has."
            )
        if text:
            yield row, text


@contextmanager
def _opened(path: Path, text_field: str) -> Iterator[Any]:
    """Opens a file whose column `text_field` holds text. Whatever pyarrow raises becomes a DataError."""
    pyarrow = optional("pyarrow", "parquet", f"sources names {str(path)!r}, which")
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            check_column(str(path), file.schema_arrow, text_field)
            yield file
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{str(path)!r} is no Parquet file that can be read ({reason}): write it again.") from None


def check_column(source: str, schema: Any, text_field: str) -> None:
    """Raises a DataError unless a table with this schema has text in the column `text_field`."""
    from pyarrow import types

    if text_field not in schema.names:
        raise DataError(f"{source!r} has no column {text_field!r}: set text_field to one of {', '.join(schema.names)}.")
    kind = schema.types[schema.names.index(text_field)]
    values = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
        raise DataError(
            f"{source!r} has {kind} in the column {text_field!r}: set text_field to a column of text, of "
            f"{', '.join(schema.names)}."
        )
