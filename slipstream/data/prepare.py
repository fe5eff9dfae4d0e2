"""Turns text into token shards once, so that training can map them into memory instead of tokenising text."""

from __future__ import annotations

import glob
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ..config.files import expand_home
from .hugging_face import hub_text, open_hub
from .parquet import check_parquet, read_parquet
from .shards import DTYPES, SPLITS, info_of, sidecar, tokenizer_beside, write_sidecar
from .text import (
    HUB_PREFIX,
    PARQUET_SUFFIX,
    SHARD_SUFFIX,
    TEXT_SUFFIXES,
    Piece,
    Text,
    Tokenizer,
    encode,
    expand,
    load_tokenizer,
    read_pieces,
)
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
    output: str | Path,
    shard_tokens: int = 100_000_000,
    validation_fraction: float = 0.05,
    progress: Callable[[int, int | None], None] | None = None,
    *,
    text_field: str = "text",
    config: str | None = None,
    split: str = "train",
    validation_split: str | None = None,
    max_tokens: float | None = None,
    end_of_text: str | None = None,
    overwrite: bool = False,
    tell: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes PREFIX.train.00000.bin ... and PREFIX.validation.00000.bin ..., and returns them in that order.

    The tokenizer is written to PREFIX.tokenizer.json, unless tokens are bytes.

    The ids are the same as those that `load_corpus` makes from the text. The last `validation_fraction` of them are
    held out. Neither the text nor the ids are ever completely in memory. For a short time the disk holds the ids twice,
    because the start of the held-out part is known only at the end. Shards get their names when all are finished.

    A source is a file, a folder or a glob; or all of them are datasets of Hugging Face, "hf:" and a name, which are
    streamed. config, split: what to read of a dataset. validation_split: a split to hold out as a whole instead of
    `validation_fraction`. max_tokens: number of ids after which reading stops, for each of the two splits.

    progress: called with (done, total) while the text is read. They are bytes of files, or rows of a dataset. total is
    an estimate if `max_tokens` is set, and None if it is unknown. tell: called with a sentence that describes the
    result.
    """
    if shard_tokens < 1:
        raise DataError(f"shard_tokens is {shard_tokens}: set it to 1 or more.")
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction is {validation_fraction}: set it to at least 0 and below 1.")
    if max_tokens is not None and not 1 <= max_tokens < math.inf:
        raise DataError(f"max_tokens is {max_tokens}: set it to 1 or more.")
    from_hub = bool(sources) and all(source.startswith(HUB_PREFIX) for source in sources)
    of_datasets = {"config": config, "split": None if split == "train" else split, "validation_split": validation_split}
    for name, value in of_datasets.items():
        if value is not None and not from_hub:
            raise DataError(f"{name} is {value!r}, but sources names files: leave it out.")
    if validation_split == split:
        raise DataError(f"validation_split is {split!r}, which is also the split to train on: name another.")
    paths = [] if from_hub else expand(sources, "sources", (*TEXT_SUFFIXES, PARQUET_SUFFIX, SHARD_SUFFIX))
    for path in paths:
        if path.suffix == SHARD_SUFFIX:
            raise DataError(f"sources names {str(path)!r}, which is a token shard already: give text.")
    prefix = expand_home(output)
    if prefix.name in ("", ".."):
        raise DataError(
            f"output is {str(output)!r}, which names no file: write the beginning of a name, such as data/web."
        )
    patterns = [f"{glob.escape(prefix.name)}.{split}.{'[0-9]' * 5}{SHARD_SUFFIX}" for split in SPLITS]
    stale = [old for pattern in patterns for old in sorted(prefix.parent.glob(pattern))]
    if stale and not overwrite:
        raise DataError(f"output would overwrite {str(stale[0])!r}: choose another, or set overwrite.")
    chosen = load_tokenizer(tokenizer, end_of_text=end_of_text)
    texts: list[Text] = []
    held_out: list[Text] = []
    if from_hub:
        opened = [(source, open_hub(source, config)) for source in sources]
        texts = [hub_text(*each, split, "split", text_field) for each in opened]
        if validation_split is not None:
            held_out = [hub_text(*each, validation_split, "validation_split", text_field) for each in opened]
    else:
        for path in paths:
            if path.suffix == PARQUET_SUFFIX:
                check_parquet(path, text_field)
            read = read_parquet if path.suffix == PARQUET_SUFFIX else read_pieces
            texts.append(Text(read(path, text_field), path.stat().st_size))

    with _folder(prefix.parent), tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}.") as folder:
        stream = Path(folder) / "stream"
        num_documents = 0

        def counted(pieces: Iterator[Piece]) -> Iterator[Piece]:
            nonlocal num_documents
            for piece in pieces:
                num_documents += piece.ends_document
                yield piece

        written = [0, 0]
        with stream.open("wb") as file:
            for index, part in enumerate((texts, held_out)):
                watched = [Text(counted(text.pieces), text.size) for text in part]
                for ids in _tokens(watched, chosen, max_tokens, progress):
                    ids.astype(DTYPES[chosen.dtype], copy=False).tofile(file)
                    written[index] += len(ids)
        for number, part in zip(written, (texts, held_out), strict=True):
            if part and not number:
                named = f"{len(part)} {'datasets' if from_hub else 'files'}"
                raise DataError(f"sources names {named} without any text: give some.")
        everything = np.memmap(stream, dtype=DTYPES[chosen.dtype], mode="r")
        boundary = written[0] if held_out else len(everything) - num_held_out(len(everything), validation_fraction)

        names: list[str] = []
        for name, ids in zip(SPLITS, (everything[:boundary], everything[boundary:]), strict=True):
            for number, start in enumerate(range(0, len(ids), shard_tokens)):
                shard = Path(folder) / f"{prefix.name}.{name}.{number:05d}{SHARD_SUFFIX}"
                content = ids[start : start + shard_tokens]
                content.tofile(shard)
                write_sidecar(shard, info_of(chosen, len(content), name))
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
            size = sum(path.stat().st_size for path in paths)
            if max_tokens is not None and int(max_tokens) in written:
                tell(f"{len(everything):,} tokens; reading stopped at max_tokens")
            else:
                rate = f", {size / len(everything):.2f} bytes of the files to a token" if paths else ""
                tell(f"documents: {num_documents:,}, each with {ends} at its end; {len(everything):,} tokens{rate}")
    return [prefix.parent / name for name in names]


def _tokens(
    texts: Sequence[Text],
    tokenizer: Tokenizer,
    max_tokens: float | None,
    progress: Callable[[int, int | None], None] | None,
) -> Iterator[np.ndarray]:
    """Yields the ids of texts one after the other, `max_tokens` of them at most, and reports the progress."""
    limit = math.inf if max_tokens is None else int(max_tokens)
    sizes = [text.size for text in texts if text.size is not None]
    total = sum(sizes) if len(sizes) == len(texts) else None
    before, num_tokens = 0, 0
    for text in texts:
        position = 0
        for ids, position in encode(text.pieces, tokenizer):
            ids = ids[: int(min(len(ids), limit - num_tokens))]
            yield ids
            num_tokens += len(ids)
            done = before + position
            if progress is not None:
                expected = total if limit == math.inf else int(done * limit / num_tokens)
                progress(done, expected if total is None or expected is None else min(expected, total))
            if num_tokens == limit:
                return
        before += position if text.size is None else text.size
        if progress is not None:
            progress(before, total)
