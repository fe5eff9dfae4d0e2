"""Shards are read as they were written, and damaged ones are refused."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_files import everything, refused, shard

from slipstream.config.schema import DataConfig
from slipstream.data import known_vocab_size, load_corpus


def test_shards_are_mapped_and_bring_their_own_validation(tmp_path: Path) -> None:
    shard(tmp_path / "a.bin", range(10), "uint16")
    shard(tmp_path / "b.bin", range(10, 30), "uint32")
    shard(tmp_path / "c.bin", range(30, 35), "uint8", split="validation")
    corpus = load_corpus(DataConfig(sources=(str(tmp_path),)))
    assert everything(corpus.train).tolist() == list(range(30))
    assert everything(corpus.validation).tolist() == list(range(30, 35))
    assert corpus.vocab_size == 1000
    assert all(isinstance(part, np.memmap) for part in corpus.train.parts)


def test_the_vocabulary_is_that_of_all_sources_before_they_are_read(tmp_path: Path) -> None:
    """A plan takes it: the first shard alone may tell too little, or nothing."""
    for name, size in (("a", 300), ("b", 700), ("c", 900)):
        shard(tmp_path / f"{name}.bin", range(10), changes={"vocab_size": size})
    names = [str(tmp_path / f"{name}.bin") for name in "abc"]
    mixed = DataConfig((names[0], names[1]), weights=(0.7, 0.3))
    assert known_vocab_size(mixed) == load_corpus(mixed).vocab_size == 700
    held_out = replace(mixed, validation_sources=(names[2],))
    assert known_vocab_size(held_out) == load_corpus(held_out).vocab_size == 900
    np.arange(20, dtype="<u4").tofile(tmp_path / "raw.bin")
    assert known_vocab_size(DataConfig((str(tmp_path / "raw.bin"), names[0]))) == 300


def test_a_foreign_shard_is_read_with_the_type_it_is_said_to_have(tmp_path: Path) -> None:
    np.arange(20, dtype="<u4").tofile(tmp_path / "a.bin")
    source = (str(tmp_path / "a.bin"),)
    corpus = load_corpus(DataConfig(source, token_dtype="uint32", validation_fraction=0))
    assert everything(corpus.train).tolist() == list(range(20))
    assert corpus.vocab_size == 20 and corpus.tokenizer == "unknown"
    refused(DataConfig(source), r"a\.bin' has no a\.json beside it to tell its type: set data\.token_dtype")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"has 0 bytes, which is no number of whole uint16 ids: it is truncated"),
        (
            b"\1\0\2",
            r"has 3 bytes, which is no number of whole uint16 ids: it is truncated or of another type",
        ),
        (b"\1\0", r"holds 1 ids where its sidecar says 2: it is truncated"),
        (b"\1\0\1\0\1\0", r"holds 3 ids where its sidecar says 2"),
        (b"\1\0\xff\xff", r"holds the id 65535 where its sidecar says vocab_size 1000: it is damaged"),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = shard(tmp_path / "a.bin", [1, 2])
    Path(path).write_bytes(content)
    refused(DataConfig(sources=(path,)), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "object"}, r"has dtype 'object': it must be one of uint8, uint16, uint32"),
        ({"dtype": ["uint16"]}, r"has dtype \['uint16'\]: it must be one of"),
        ({"num_tokens": -2}, r"has num_tokens -2: it must be a whole number above 0"),
        ({"vocab_size": "big"}, r"has vocab_size 'big': it must be a whole number"),
        ({"vocab_size": True}, r"has vocab_size True"),
        ({"tokenizer": {}}, r"has tokenizer \{\}: it must be a name"),
        ({"split": "both"}, r"has split 'both': it must be one of train, validation"),
        ({"code": "x"}, r"does not describe a token shard \(.*'code'\): prepare it again"),
    ],
)
def test_a_hostile_sidecar_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    refused(DataConfig(sources=(shard(tmp_path / "a.bin", [1, 2], changes=changes),)), message)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 200_000, pickle.dumps({"dtype": "uint16"})])
def test_a_sidecar_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = shard(tmp_path / "a.bin", [1, 2])
    (tmp_path / "a.json").write_bytes(content)
    refused(DataConfig(sources=(path,)), r"a\.json' does not describe a token shard \(.*\): prepare it again")


def test_a_pickle_that_calls_itself_a_shard_is_never_opened_as_one(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    path = shard(tmp_path / "a.bin", [1, 2])
    content = pickle.dumps(Trap())
    (tmp_path / "a.bin").write_bytes(content + b"." * (len(content) % 2))
    refused(DataConfig(sources=(path,)), r"holds \d+ ids where its sidecar says 2")
    assert not (tmp_path / "sprung").exists()


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    a, b = (
        shard(tmp_path / "a.bin", [1, 2]),
        shard(tmp_path / "b.bin", [1, 2], changes={"tokenizer": "other"}),
    )
    (tmp_path / "c.txt").write_text("text")
    c = str(tmp_path / "c.txt")
    refused(DataConfig(sources=(a, b)), r"data\.sources mixes ids made by other and t: keep to one tokenizer")
    refused(DataConfig(sources=(a, c)), r"mix text with token shards: prepare the text first")
    refused(DataConfig(validation_sources=(a,)), r"mix text with token shards")
    refused(
        DataConfig(sources=(a,), token_dtype="uint32"),
        r"data\.token_dtype is 'uint32', but .*a\.json' says 'uint16'",
    )


@pytest.mark.timeout(60)
def test_a_sidecar_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "web.bin").write_bytes(bytes(100))
    os.mkfifo(tmp_path / "web.json")
    with pytest.raises(OSError, match="it is no plain file"):
        load_corpus(DataConfig(sources=(str(tmp_path / "web.bin"),)))
