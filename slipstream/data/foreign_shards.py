"""Recognises token shards that other programs wrote, so that they are read as they are.

- Megatron: PREFIX.bin holds ids, and PREFIX.idx beside it says where each sequence begins. The ids are read in the
  order of the file. Documents end with the token that Megatron was told to append, if any.
- llm.c and modded-nanogpt: a header of 256 int32 (magic number, version, number of tokens), then the ids.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config.files import open_plain_file
from .tokens import DataError

INDEX_SUFFIX = ".idx"
INDEX_MAGIC = b"MMIDIDX\0\0"
INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Dtypes by their code in an index. Codes 6 and 7 are floating-point numbers, which are no ids."""
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, number of sequences, length of documents

LLM_C_VERSIONS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Version and dtype by the magic number: shards for GPT-2 and for Llama 3."""
LLM_C_HEADER_BYTES = 256 * 4
_CHUNK_SEQUENCES = 2**22


@dataclass(frozen=True)
class ForeignShard:
    """Where the ids are in a shard."""

    dtype: str
    """Name of the dtype of the ids."""
    offset: int
    """Number of bytes before the first id."""
    num_tokens: int
    """Number of ids."""


def foreign_shard(shard: Path) -> ForeignShard | None:
    """Returns where the ids are in a shard of another program, or None if it has no header that is known."""
    index = shard.with_suffix(INDEX_SUFFIX)
    found = _read_index(index) if index.exists() else _read_llm_c(shard)
    if found is None:
        return None
    size, expected = shard.stat().st_size, found.offset + found.num_tokens * np.dtype(found.dtype).itemsize
    if not found.num_tokens:
        raise DataError(f"{str(shard)!r} holds no ids: leave it out, or write it again.")
    if size != expected:
        says = f"{index.name} says" if index.exists() else "its header says"
        raise DataError(
            f"{str(shard)!r} has {size} bytes where {says} {expected}, for {found.num_tokens} {found.dtype} ids: it is "
            "truncated or not its own, so write it again."
        )
    return found


def _read_llm_c(shard: Path) -> ForeignShard | None:
    with open_plain_file(shard) as file:
        header = file.read(12)
    if len(header) < 12:
        return None
    magic, version, num_tokens = struct.unpack("<iii", header)
    if magic not in LLM_C_VERSIONS:
        return None
    known, dtype = LLM_C_VERSIONS[magic]
    if version != known or num_tokens < 0:
        raise DataError(
            f"{str(shard)!r} has a header of llm.c with version {version} and {num_tokens} tokens, where version "
            f"{known} is known: write it again."
        )
    return ForeignShard(dtype, LLM_C_HEADER_BYTES, num_tokens)


def _read_index(index: Path) -> ForeignShard:
    with open_plain_file(index) as file:
        header = file.read(_INDEX_HEADER.size)
    if len(header) < _INDEX_HEADER.size or not header.startswith(INDEX_MAGIC):
        raise DataError(
            f"{str(index)!r} is no index of Megatron's: write it again, or move it away if it has nothing to do with "
            "the shard of that name."
        )
    _, version, code, num_sequences, num_documents = _INDEX_HEADER.unpack(header)
    if version != 1 or code not in INDEX_DTYPES:
        raise DataError(
            f"{str(index)!r} has version {version} and dtype code {code}, where version 1 with whole numbers is known: "
            "write it again with a current Megatron."
        )
    size, pointers = index.stat().st_size, len(header) + 4 * num_sequences
    least = pointers + 8 * num_sequences + 8 * num_documents
    if size not in (least, least + num_sequences):  # an index of several modalities has a byte more for each sequence
        raise DataError(
            f"{str(index)!r} has {size} bytes where {num_sequences} sequences and {num_documents} documents take "
            f"{least}: it is truncated or damaged, so write it again."
        )
    num_tokens, itemsize = 0, np.dtype(INDEX_DTYPES[code]).itemsize
    for start in range(0, num_sequences, _CHUNK_SEQUENCES):
        count = min(_CHUNK_SEQUENCES, num_sequences - start)
        lengths = np.fromfile(index, "<i4", count, offset=len(header) + 4 * start).astype(np.int64)
        ends = num_tokens + np.cumsum(lengths)
        begins = np.fromfile(index, "<i8", count, offset=pointers + 8 * start)
        if lengths.min() < 0 or not np.array_equal(begins, (ends - lengths) * itemsize):
            raise DataError(
                f"{str(index)!r} has sequences that do not follow one another without gaps: it is damaged, so write it "
                "again."
            )
        num_tokens = int(ends[-1])
    return ForeignShard(INDEX_DTYPES[code], 0, num_tokens)
