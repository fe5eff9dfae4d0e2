"""Reads and writes token shards: NAME.bin holds raw little-endian ids and is memory-mapped; NAME.json describes them.

Nothing here is ever unpickled. A shard is numbers of a known width, and a shard that does not fit its description is
rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..config.files import read_plain_file
from .foreign_shards import INDEX_SUFFIX, ForeignShard, foreign_shard
from .text import Tokenizer
from .tokens import DataError

DTYPES: dict[str, np.dtype] = {"uint8": np.dtype("<u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SPLITS = ("train", "validation")
_CHUNK_TOKENS = 2**24


@dataclass(frozen=True)
class ShardInfo:
    """The content of a sidecar, the .json file that describes a shard."""

    dtype: str
    """Dtype of the ids, one of DTYPES."""
    vocab_size: int
    """Number of token ids. Every id is smaller."""
    num_tokens: int
    """Number of ids in the shard."""
    tokenizer: str
    """Name of the tokenizer that made the ids, see `text.Tokenizer`."""
    split: str = "train"
    """Part of the corpus: "train", or "validation" for ids that are held out."""
    end_of_text: int | None = None
    """Id that ends a document. None means that none does, or that it is unknown."""


def info_of(tokenizer: Tokenizer, num_tokens: int, split: str) -> ShardInfo:
    """Describes ids that a tokenizer made."""
    return ShardInfo(tokenizer.dtype, tokenizer.vocab_size, num_tokens, tokenizer.name, split, tokenizer.end_of_text)


def sidecar(shard: Path) -> Path:
    return shard.with_suffix(".json")


def tokenizer_beside(shard: Path) -> Path:
    """Returns the path at which `prepare` writes the tokenizer of all shards with the same prefix."""
    return shard.with_name(f"{shard.name.rsplit('.', 3)[0]}.tokenizer.json")


def write_sidecar(shard: Path, info: ShardInfo) -> None:
    sidecar(shard).write_text(json.dumps(asdict(info), indent=2) + "\n")


def read_shard(shard: Path, token_dtype: str | None) -> tuple[np.ndarray, ShardInfo]:
    """Maps a shard into memory and checks every id.

    A shard of another program is recognised by its header (see `foreign_shards`).

    token_dtype: dtype of the ids if neither a sidecar nor a header tells it.
    """
    info = read_sidecar(shard)
    if info is None and (found := foreign_shard(shard)) is not None:
        return _map_foreign(shard, found, token_dtype)
    if info is None and token_dtype is None:
        raise DataError(
            f"{str(shard)!r} has no {sidecar(shard).name} beside it to tell its type: set data.token_dtype."
        )
    if info is not None and token_dtype is not None and token_dtype != info.dtype:
        raise DataError(
            f"data.token_dtype is {token_dtype!r}, but {str(sidecar(shard))!r} says {info.dtype!r}: remove one of them."
        )
    name = info.dtype if info is not None else str(token_dtype)
    dtype, size = DTYPES[name], shard.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise DataError(
            f"{str(shard)!r} has {size} bytes, which is no number of whole {name} ids: "
            "it is truncated or of another type, so write it again."
        )
    if info is not None and size != info.num_tokens * dtype.itemsize:
        raise DataError(
            f"{str(shard)!r} holds {size // dtype.itemsize} ids where its sidecar says {info.num_tokens}: "
            "it is truncated or not its own, so write it again."
        )
    ids = np.memmap(shard, dtype=dtype, mode="r")
    if info is None:
        return ids, ShardInfo(name, _largest(ids) + 1, len(ids), "unknown")
    if info.vocab_size <= np.iinfo(dtype).max and (largest := _largest(ids)) >= info.vocab_size:
        raise DataError(
            f"{str(shard)!r} holds the id {largest} where its sidecar says vocab_size {info.vocab_size}: "
            "it is damaged or not its own, so write it again."
        )
    return ids, info


def _map_foreign(shard: Path, found: ForeignShard, token_dtype: str | None) -> tuple[np.ndarray, ShardInfo]:
    if token_dtype not in (None, found.dtype):
        raise DataError(
            f"data.token_dtype is {token_dtype!r}, but {str(shard)!r} has a header or an index that says "
            f"{found.dtype!r}: leave data.token_dtype out."
        )
    dtype = np.dtype(found.dtype).newbyteorder("<")
    ids = np.memmap(shard, dtype=dtype, mode="r", offset=found.offset, shape=(found.num_tokens,))
    if dtype.kind == "i" and (smallest := min(int(chunk.min()) for chunk in _chunks(ids))) < 0:
        raise DataError(f"{str(shard)!r} holds the id {smallest}: it is damaged, so write it again.")
    return ids, ShardInfo(found.dtype, _largest(ids) + 1, len(ids), "unknown")


def _largest(ids: np.ndarray) -> int:
    return max(int(chunk.max()) for chunk in _chunks(ids))


def _chunks(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the ids in chunks, so that a shard larger than memory does not fill it."""
    return (ids[start : start + _CHUNK_TOKENS] for start in range(0, len(ids), _CHUNK_TOKENS))


def read_sidecar(shard: Path) -> ShardInfo | None:
    """Returns the description of a shard. None means that it has none: beside a shard of Megatron, which has an index,
    a .json file is another."""
    path = sidecar(shard)
    if shard.with_suffix(INDEX_SUFFIX).exists() or not path.exists():
        return None
    try:
        info = ShardInfo(**json.loads(read_plain_file(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{str(path)!r} does not describe a token shard ({error}): prepare it again.") from None
    for field in ("vocab_size", "num_tokens"):
        value = getattr(info, field)
        if type(value) is not int or value < 1:
            raise DataError(f"{str(path)!r} has {field} {value!r}: it must be a whole number above 0.")
    if info.end_of_text is not None and (type(info.end_of_text) is not int or info.end_of_text < 0):
        raise DataError(f"{str(path)!r} has end_of_text {info.end_of_text!r}: it must be a token id or null.")
    if not isinstance(info.tokenizer, str):
        raise DataError(f"{str(path)!r} has tokenizer {info.tokenizer!r}: it must be a name.")
    for field, known in (("dtype", tuple(DTYPES)), ("split", SPLITS)):
        if (value := getattr(info, field)) not in known:
            raise DataError(f"{str(path)!r} has {field} {value!r}: it must be one of {', '.join(known)}.")
    return info
