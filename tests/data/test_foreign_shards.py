"""Shards of other programs: known by their headers, mapped and not copied, refused by name if damaged."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from slipstream.config.schema import DataConfig
from slipstream.data import DataError, foreign_shards, known_vocab_size, load_corpus
from slipstream.data.shards import read_shard


def megatron(prefix: Path, documents: list[list[int]], code: int = 8, dtype: str = "<u2", modes: bytes = b"") -> Path:
    """Writes what Megatron's preprocessing writes."""
    lengths = np.array([len(document) for document in documents])
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    np.concatenate(documents).astype(dtype).tofile(prefix.with_suffix(".bin"))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    ends = np.arange(len(documents) + 1)
    arrays = lengths.astype("<i4").tobytes(), pointers.astype("<i8").tobytes(), ends.astype("<i8").tobytes(), modes
    prefix.with_suffix(".idx").write_bytes(header + b"".join(arrays))
    return prefix.with_suffix(".bin")


def llm_c(path: Path, ids: list[int], magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    """Writes what llm.c's and modded-nanogpt's scripts write."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids).astype(dtype).tobytes())
    return path


def ids_of(*paths: Path, **settings: object) -> list[int]:
    corpus = load_corpus(DataConfig(tuple(map(str, paths)), validation_fraction=0, **settings))  # type: ignore[arg-type]
    assert all(isinstance(part, np.memmap) for part in corpus.train.parts)
    assert corpus.tokenizer == "unknown" and corpus.vocab_size == max(corpus.train.read(0, len(corpus.train))) + 1
    return corpus.train.read(0, len(corpus.train)).tolist()


def refused(path: Path, message: str, **settings: object) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_corpus(DataConfig((str(path),), **settings))  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert sentence.endswith(".") and ": " in sentence and "\n" not in sentence and path.stem in sentence


# ---- Megatron


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "<u1"), (2, "<i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")], ids=lambda value: value
)
def test_an_indexed_dataset_of_megatron_is_read_in_its_own_type(tmp_path: Path, code: int, dtype: str) -> None:
    assert ids_of(megatron(tmp_path / "web", [[5, 6, 0], [7, 0], [100, 0]], code, dtype)) == [5, 6, 0, 7, 0, 100, 0]


def test_an_index_is_checked_in_parts_and_may_tell_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_shards, "_CHUNK_SEQUENCES", 2)
    documents = [[1], [2, 3], [], [4], [5, 6, 7]]
    assert ids_of(megatron(tmp_path / "web", documents, modes=bytes(5))) == [1, 2, 3, 4, 5, 6, 7]


def test_a_folder_may_hold_the_text_and_description_that_megatron_was_given(tmp_path: Path) -> None:
    megatron(tmp_path / "web", [[1, 2], [3]])
    (tmp_path / "web.json").write_text('{"text": "not a sidecar of ours"}\n')
    assert ids_of(tmp_path) == [1, 2, 3]
    assert known_vocab_size(DataConfig((str(tmp_path / "web.bin"),))) == 0  # nothing is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: b"", r"web\.idx' is no index of Megatron's: write it again, or move it away"),
        (lambda index: index[:20], r"web\.idx' is no index of Megatron's"),
        (lambda index: b"TNTIDX\0\0" + index[8:], r"web\.idx' is no index of Megatron's"),
        (lambda index: index[:9] + b"\2" + index[10:], r"web\.idx' has version 2 and dtype code 8, where version 1"),
        (lambda index: index[:17] + b"\7" + index[18:], r"web\.idx' has version 1 and dtype code 7"),
        (lambda index: index[:-1], r"web\.idx' has \d+ bytes where 2 sequences and 3 documents take \d+: it is trunc"),
        (lambda index: index[:18] + b"\xff" * 8 + index[26:], r"web\.idx' has \d+ bytes where 18446744073709551615 se"),
        (lambda index: index[:34] + b"\1" + index[35:], r"web\.idx' has sequences that do not follow one another"),
        (lambda index: index[:34] + b"\xff" * 4 + index[38:], r"web\.idx' has sequences that do not follow"),
        (lambda index: index[:17] + b"\1" + index[18:], r"web\.idx' has sequences that do not follow"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, change, message: str) -> None:
    path = megatron(tmp_path / "web", [[5, 6, 0], [7, 0]])
    index = path.with_suffix(".idx")
    index.write_bytes(change(index.read_bytes()))
    refused(path, message)


def test_ids_that_do_not_fit_their_index_are_refused(tmp_path: Path) -> None:
    path = megatron(tmp_path / "web", [[5, 6, 0], [7, 0]])
    refused(path, r"data\.token_dtype is 'uint8', but .*web\.bin' has .* says 'uint16': leave", token_dtype="uint8")
    assert ids_of(path, token_dtype="uint16") == [5, 6, 0, 7, 0]
    path.write_bytes(path.read_bytes()[:-2])
    refused(path, r"web\.bin' has 8 bytes where web\.idx says 10, for 5 uint16 ids: it is truncated or not its own")
    refused(megatron(tmp_path / "low", [[1, -3]], 4, "<i4"), r"low\.bin' holds the id -3: it is damaged")
    refused(megatron(tmp_path / "none", [[], []]), r"none\.bin' holds no ids: leave it out")


@pytest.mark.timeout(60)
def test_an_index_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = megatron(tmp_path / "web", [[1, 2]])
    path.with_suffix(".idx").unlink()
    os.mkfifo(path.with_suffix(".idx"))
    with pytest.raises(OSError, match="it is no plain file"):
        load_corpus(DataConfig((str(path),)))


# ---- llm.c


def test_shards_of_llm_c_are_read_after_their_header(tmp_path: Path) -> None:
    gpt2 = llm_c(tmp_path / "fineweb_train_000001.bin", [50256, 1, 2])
    llama = llm_c(tmp_path / "llama.bin", [128000, 70000], 20240801, 7, "<u4")
    assert ids_of(gpt2) == ids_of(gpt2, token_dtype="uint16") == [50256, 1, 2]
    assert ids_of(gpt2, llama) == [50256, 1, 2, 128000, 70000]
    ids, info = read_shard(gpt2, None)
    assert isinstance(ids, np.memmap) and (info.dtype, info.num_tokens, info.vocab_size) == ("uint16", 3, 50257)


def test_a_damaged_shard_of_llm_c_is_refused(tmp_path: Path) -> None:
    path = llm_c(tmp_path / "a.bin", [1, 2, 3])
    refused(path, r"data\.token_dtype is 'uint32', but .*a\.bin' has a header", token_dtype="uint32")
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, r"a\.bin' has 1029 bytes where its header says 1030, for 3 uint16 ids: it is truncated")
    path.write_bytes(path.read_bytes()[:500])
    refused(path, r"a\.bin' has 500 bytes where its header says 1030")
    refused(
        llm_c(tmp_path / "b.bin", [1], version=3), r"b\.bin' has a header of llm\.c with version 3 and 1 tokens, whe"
    )
    refused(llm_c(tmp_path / "c.bin", []), r"c\.bin' holds no ids: leave it out")


def test_a_shard_without_a_header_is_still_read_by_token_dtype(tmp_path: Path) -> None:
    np.array([5, 6], dtype="<u2").tofile(tmp_path / "nano.bin")  # as nanoGPT writes it, and shorter than any header
    assert ids_of(tmp_path / "nano.bin", token_dtype="uint16") == [5, 6]
    refused(tmp_path / "nano.bin", r"nano\.bin' has no nano\.json beside it to tell its type: set data\.token_dtype")
