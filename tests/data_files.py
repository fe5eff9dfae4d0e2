"""Tokens, shards and text files for the tests of data, and how loading them is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from slipstream.config.schema import DataConfig
from slipstream.data import DataError, Tokens, load_corpus


def counting(num_tokens: int) -> Tokens:
    """Token i is i, so that a window tells where it came from; in three parts, one of them empty."""
    ids = np.arange(num_tokens, dtype=np.uint16)
    return Tokens((ids[: num_tokens // 3], ids[:0], ids[num_tokens // 3 :]))


def everything(tokens: Tokens) -> np.ndarray:
    return tokens.read(0, len(tokens))


def refused(config: DataConfig, message: str) -> None:
    """Loading fails with one sentence that matches."""
    with pytest.raises(DataError, match=message) as caught:
        load_corpus(config)
    sentence = str(caught.value)
    assert sentence.endswith(".") and ": " in sentence and "\n" not in sentence


def shard(
    path: Path,
    ids: Sequence[int],
    dtype: str = "uint16",
    split: str = "train",
    changes: dict[str, object] | None = None,
) -> str:
    """Write a shard and its sidecar, the latter with changes."""
    np.asarray(ids).astype(np.dtype(dtype).newbyteorder("<")).tofile(path)
    info = {"dtype": dtype, "vocab_size": 1000, "num_tokens": len(ids), "tokenizer": "t", "split": split}
    path.with_suffix(".json").write_text(json.dumps(info | (changes or {})))
    return str(path)


def text_files(folder: Path) -> tuple[str, ...]:
    (folder / "a.txt").write_text("the cat\n" * 500 + "<|endoftext|>\nsat")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": f"the cat {i}"}) + "\n" for i in range(100)))
    return str(folder / "a.txt"), str(folder / "b.jsonl")
