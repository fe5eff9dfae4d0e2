"""Loads the sources of a `DataConfig` as token ids: those to train on, and those held out for validation."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config.files import read_plain_file
from ..config.schema import BUILTIN, DataConfig
from .mixture import Source, turns
from .shards import SPLITS, ShardInfo, info_of, read_shard, read_sidecar, tokenizer_beside
from .text import (
    ENDS_OF_TEXT,
    SHARD_SUFFIX,
    Piece,
    Tokenizer,
    encode,
    expand,
    load_tokenizer,
    name_of,
    read_pieces,
    token_ids,
)
from .tokens import DataError, Tokens, num_held_out

_BUILTIN_BYTES = 16 * 2**20
_NOT_BUILTIN = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("encodings", "pydoc_data"),  # generated files: character tables, and one long help text
}


@dataclass(frozen=True, eq=False)
class Corpus:
    train: Tokens
    """Tokens to train on."""
    validation: Tokens
    """Tokens for validation, never trained on. Empty if nothing was held out."""
    vocab_size: int
    """Number of token ids. Every id is smaller."""
    tokenizer: str
    """Name of the tokenizer that made the ids: "bytes", a file's name and hash, or "unknown"."""
    tokenizer_json: bytes | None = None
    """Content of the tokenizer's file. None means that there is no such file, or that its path is unknown."""
    sources: tuple[Source, ...] = ()
    """Sources to mix by weight, in the order of `train`. Empty: all tokens are one source."""
    held_out_sources: tuple[Source, ...] = ()
    """Sources that `validation` consists of, in its order. Empty: those of `sources`, or a single one."""
    end_of_text: int | None = None
    """Id that ends a document. None means that none does, or that it is unknown."""


class _Part(NamedTuple):
    """The ids of a shard, or of text."""

    ids: np.ndarray
    info: ShardInfo
    tokenizer_json: bytes | None


def load_corpus(config: DataConfig) -> Corpus:
    """Reads or memory-maps all sources of `config`, and checks them.

    Text is held in memory as ids. If it is too large for that, prepare shards from it.
    """
    check_sources(config)
    builtin = BUILTIN in config.sources
    together = [(source,) for source in config.sources] if config.weights else [config.sources]
    groups = [[] if builtin else expand(sources, "data.sources") for sources in together]
    named_groups = [expand((source,), "data.validation_sources") for source in config.validation_sources]
    _check_groups(groups, "data.sources", "under two weights: leave it in one source")
    _check_groups(named_groups, "data.validation_sources", "twice: name it once")
    _check_files(list(chain(*groups)), list(chain(*named_groups)), builtin)
    divided = [_read_builtin(config) if builtin else _read_files(files, config) for files in groups]
    named_divided = [_read_files(files, config) for files in named_groups]
    every = list(chain(*divided, *named_divided))

    if len(tokenizers := sorted({part.info.tokenizer for part in every})) > 1:
        raise DataError(f"data.sources mixes ids made by {' and '.join(tokenizers)}: keep to one tokenizer.")
    vocab_size = max(part.info.vocab_size for part in every)

    named = Tokens(tuple(part.ids for part in chain(*named_divided)))
    if config.validation_sources and not len(named):
        raise DataError(
            f"data.validation_sources is {list(config.validation_sources)}, which holds no text: give some."
        )
    splits = []
    for sources, parts in zip(together, divided, strict=True):
        train, held_out = (Tokens(tuple(part.ids for part in parts if part.info.split == split)) for split in SPLITS)
        if not len(named) and not len(held_out):
            train, held_out = train.split(len(train) - num_held_out(len(train), config.validation_fraction))
        if not len(train):
            raise DataError(f"data.sources is {list(sources)}, which holds no text to train on: give some.")
        splits.append((train, held_out))
    tokenizer_json = next((part.tokenizer_json for part in every if part.tokenizer_json is not None), None)
    return Corpus(
        Tokens(tuple(ids for train, _ in splits for ids in train.parts)),
        named if len(named) else Tokens(tuple(ids for _, held_out in splits for ids in held_out.parts)),
        vocab_size,
        tokenizers[0],
        tokenizer_json,
        tuple(  # empty without weights
            Source(name, weight, len(train), 0 if len(named) else len(held_out))
            for name, weight, (train, held_out) in zip(config.sources, config.weights, splits, strict=False)
        ),
        tuple(
            Source(name, 1.0, 0, sum(len(part.ids) for part in parts))
            for name, parts in zip(config.validation_sources, named_divided, strict=True)
        ),
        _end_of_text(every, config, tokenizer_json, vocab_size),
    )


def check_sources(config: DataConfig) -> None:
    """Checks what can be known about sources without their files. Raises a DataError."""
    if not 0 <= config.validation_fraction < 1:
        raise DataError(f"data.validation_fraction is {config.validation_fraction}: set it to at least 0 and below 1.")
    if BUILTIN in config.sources and len(config.sources) > 1:
        raise DataError(f"data.sources is {list(config.sources)}, but {BUILTIN!r} stands alone: name one or the other.")
    if not config.weights:
        return
    if len(config.weights) != len(config.sources):
        raise DataError(
            f"data.weights has {len(config.weights)} weights for the {len(config.sources)} entries of data.sources: "
            "give one for each, and quote globs on the command line, where the shell would expand them."
        )
    turns(config.weights)  # raises an error if they cannot be used


def known_vocab_size(config: DataConfig) -> int:
    """Returns the number of token ids in a corpus without reading it: the most of its shards, and that of the tokenizer
    if it has text. 0 means that none is known."""
    if config.loader != "files":
        return 0
    builtin = BUILTIN in config.sources
    files = [] if builtin else expand(config.sources, "data.sources")
    if config.validation_sources:
        files += expand(config.validation_sources, "data.validation_sources")
    shards = [file for file in files if file.suffix == SHARD_SUFFIX]
    sizes = [info.vocab_size for shard in shards if (info := read_sidecar(shard)) is not None]
    if builtin or len(shards) < len(files):
        sizes.append(load_tokenizer(config.tokenizer, "data.", config.end_of_text).vocab_size)
    return max(sizes, default=0)


def _end_of_text(parts: list[_Part], config: DataConfig, tokenizer_json: bytes | None, vocab_size: int) -> int | None:
    """Returns the id that ends a document. Shards may not tell it: then the configuration or the tokenizer does."""
    known = {part.info.end_of_text for part in parts if part.info.end_of_text is not None}
    if len(known) > 1:
        raise DataError(f"data.sources ends documents with the tokens {sorted(known)}: prepare them alike.")
    if known or not config.separate_documents:
        return next(iter(known), None)
    ids = {} if tokenizer_json is None else token_ids(tokenizer_json)
    names = ENDS_OF_TEXT if config.end_of_text is None else (config.end_of_text,)
    if config.end_of_text is not None and config.end_of_text.isdecimal():
        ids.setdefault(config.end_of_text, int(config.end_of_text))
    found = next((ids[name] for name in names if name in ids), None)
    if found is None:
        raise DataError(
            "data.separate_documents is true, but nothing tells which token ends a document of "
            f"{list(config.sources)}: set data.end_of_text to its id, or prepare the text with an end token."
        )
    if found >= vocab_size:
        raise DataError(
            f"data.end_of_text is {config.end_of_text!r}, but all token ids are below {vocab_size}: give the id of the "
            "token that ends a document."
        )
    return found


def _check_groups(groups: list[list[Path]], field: str, fault: str) -> None:
    seen: set[Path] = set()
    for files in groups:
        own = {file.resolve() for file in files}
        if both := own & seen:
            raise DataError(f"{field} names {str(min(both))!r} {fault}.")
        seen |= own


def _check_files(files: list[Path], held_out_files: list[Path], builtin: bool) -> None:
    both = {file.resolve() for file in files} & {file.resolve() for file in held_out_files}
    if both:
        raise DataError(f"data.validation_sources names {str(min(both))!r}, which data.sources trains on: remove one.")
    kinds = {file.suffix == SHARD_SUFFIX for file in files + held_out_files} | ({False} if builtin else set())
    if len(kinds) > 1:
        raise DataError("data.sources and data.validation_sources mix text with token shards: prepare the text first.")


def _read_files(files: list[Path], config: DataConfig) -> list[_Part]:
    if not files:
        return []
    if files[0].suffix != SHARD_SUFFIX:
        tokenizer = load_tokenizer(config.tokenizer, "data.", config.end_of_text)
        pieces = (piece for file in files for piece in read_pieces(file, config.text_field))
        return [_encode(pieces, tokenizer)]
    shards = ((file, *read_shard(file, config.token_dtype)) for file in files)
    return [_Part(ids, info, _tokenizer_of(file, info.tokenizer)) for file, ids, info in shards]


def _tokenizer_of(shard: Path, name: str) -> bytes | None:
    """Returns the tokenizer file next to a shard, or None if there is none or if it did not make the shard."""
    with suppress(OSError):
        source = read_plain_file(tokenizer_beside(shard))
        return source if name_of(name.rsplit(" ", 1)[0], source) == name else None
    return None


def _encode(pieces: Iterable[Piece], tokenizer: Tokenizer, split: str = "train") -> _Part:
    ids = np.concatenate([np.empty(0, dtype=tokenizer.dtype), *(ids for ids, _ in encode(pieces, tokenizer))])
    return _Part(ids, info_of(tokenizer, len(ids), split), tokenizer.source)


def _read_builtin(config: DataConfig) -> list[_Part]:
    """Reads Python's standard library. Every file is a document. A hash of its name decides whether a file is held
    out."""
    tokenizer = load_tokenizer(config.tokenizer, "data.", config.end_of_text)
    pieces: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    total = 0
    for name, path in _builtin_files():
        source = path.read_bytes()
        total += len(source)
        if total > _BUILTIN_BYTES:
            break
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32
        split = "validation" if share < config.validation_fraction else "train"
        pieces[split].append(Piece(source.decode(errors="replace"), True, total))
    return [_encode(pieces[split], tokenizer, split) for split in SPLITS]


def _builtin_files() -> list[tuple[str, Path]]:
    """Returns name and path of every source file, sorted by name, without tests, packages and generated files."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_BUILTIN and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                files.append((path.relative_to(root).as_posix(), path))
    return sorted(files)
