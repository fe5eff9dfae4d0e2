"""Turns text into token shards once, so that training can map them into memory instead of tokenising text."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ..config.files import expand_home
from .parquet import check_parquet, read_parquet
from .shards import DTYPES, SPLITS, ShardInfo, sidecar, tokenizer_beside, write_sidecar
from .text import PARQUET_SUFFIX, SHARD_SUFFIX, TEXT_SUFFIXES, Piece, encode, expand, load_tokenizer, read_pieces
from .tokens import DataError, num_held_out


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Creates the folder for a block of code. If the block fails, removes the folders that were created."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


def prepare(
    sources: Sequence[str],
    tokenizer: str,
    output_prefix: str | Path,
    shard_tokens: int = 100_000_000,
    validation_fraction: float = 0.05,
    progress: Callable[[int, int], None] | None = None,
    *,
    text_field: str = "text",
    end_of_text: str | None = None,
    overwrite: bool = False,
    tell: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes PREFIX.train.00000.bin ... and PREFIX.validation.00000.bin ..., and returns them in that order.

    The tokenizer is written to PREFIX.tokenizer.json, unless tokens are bytes.

    The ids are the same as those that `load_corpus` makes from the text. The last `validation_fraction` of them are
    held out. Neither the text nor the ids are ever completely in memory. For a short time the disk holds the ids twice,
    because the start of the held-out part is known only at the end. Shards get their names when all are finished.

    progress: called with (done_bytes, total_bytes) while the text is read. tell: called with a sentence that describes
    the result.
    """
    if shard_tokens < 1:
        raise DataError(f"shard_tokens is {shard_tokens}: set it to 1 or more.")
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction is {validation_fraction}: set it to at least 0 and below 1.")
    paths = expand(sources, "sources", (*TEXT_SUFFIXES, PARQUET_SUFFIX, SHARD_SUFFIX))
    for path in paths:
        if path.suffix == SHARD_SUFFIX:
            raise DataError(f"sources names {str(path)!r}, which is a token shard already: give text.")
    prefix = expand_home(output_prefix)
    if prefix.name in ("", ".."):
        raise DataError(
            f"output_prefix is {str(output_prefix)!r}, which names no file: write the beginning of a name, such as "
            "data/web."
        )
    patterns = [f"{glob.escape(prefix.name)}.{split}.{'[0-9]' * 5}{SHARD_SUFFIX}" for split in SPLITS]
    stale = [old for pattern in patterns for old in sorted(prefix.parent.glob(pattern))]
    if stale and not overwrite:
        raise DataError(f"output_prefix would overwrite {str(stale[0])!r}: choose another, or allow overwriting.")
    chosen = load_tokenizer(tokenizer, end_of_text=end_of_text)
    for path in paths:
        if path.suffix == PARQUET_SUFFIX:
            check_parquet(path, text_field)
    report = progress or (lambda done_bytes, total_bytes: None)

    with _folder(prefix.parent), tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}.") as folder:
        stream = Path(folder) / "stream"
        total, before, num_documents = sum(path.stat().st_size for path in paths), 0, 0

        def counted(pieces: Iterator[Piece]) -> Iterator[Piece]:
            nonlocal num_documents
            for piece in pieces:
                num_documents += piece.ends_document
                yield piece

        with stream.open("wb") as file:
            for path in paths:
                read = read_parquet if path.suffix == PARQUET_SUFFIX else read_pieces
                for ids, position in encode(counted(read(path, text_field)), chosen):
                    ids.astype(DTYPES[chosen.dtype], copy=False).tofile(file)
                    report(before + position, total)
                before += path.stat().st_size
                report(before, total)
        if not stream.stat().st_size:
            raise DataError(f"sources names {len(paths)} files without any text: give some.")
        everything = np.memmap(stream, dtype=DTYPES[chosen.dtype], mode="r")
        boundary = len(everything) - num_held_out(len(everything), validation_fraction)

        names: list[str] = []
        for split, ids in zip(SPLITS, (everything[:boundary], everything[boundary:]), strict=True):
            for number, start in enumerate(range(0, len(ids), shard_tokens)):
                shard = Path(folder) / f"{prefix.name}.{split}.{number:05d}{SHARD_SUFFIX}"
                part = ids[start : start + shard_tokens]
                part.tofile(shard)
                info = ShardInfo(chosen.dtype, chosen.vocab_size, len(part), chosen.name, split, chosen.end_of_text)
                write_sidecar(shard, info)
                names.append(shard.name)

        kept = tokenizer_beside(prefix.parent / names[0])
        if chosen.source is None:
            kept.unlink(missing_ok=True)
        else:
            (Path(folder) / kept.name).write_bytes(chosen.source)
            os.replace(Path(folder) / kept.name, kept)
        for old in stale:  # of an earlier, longer set of shards nothing may remain
            old.unlink()
            sidecar(old).unlink(missing_ok=True)
        for name in names:  # the sidecar first: a shard never exists without it
            shard = prefix.parent / name
            os.replace(sidecar(Path(folder) / name), sidecar(shard))
            os.replace(Path(folder) / name, shard)
        if tell is not None:
            ends = "no token" if chosen.end_of_text is None else f"token {chosen.end_of_text}"
            tell(
                f"documents: {num_documents:,}, each with {ends} at its end; {len(everything):,} tokens, "
                f"{total / len(everything):.2f} bytes of the files to a token"
            )
    return [prefix.parent / name for name in names]
