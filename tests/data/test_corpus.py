"""The corpus: the built-in one, what is held out, and mistakes in the settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from data_files import everything, refused

from slipstream.config.schema import DataConfig
from slipstream.data import load_corpus
from slipstream.data.corpus import _builtin_files


def test_the_builtin_corpus_is_python_source_and_the_same_every_time() -> None:
    corpus, again = load_corpus(DataConfig()), load_corpus(DataConfig())
    assert corpus.vocab_size == 256 and corpus.tokenizer == "bytes"
    assert 1_000_000 < len(corpus.train) <= 16 * 2**20
    assert 0.01 < len(corpus.validation) / len(corpus.train) < 0.1
    assert b"def __init__(self" in everything(corpus.train).astype(np.uint8).tobytes()
    assert np.array_equal(everything(corpus.validation), everything(again.validation))


def test_the_builtin_corpus_leaves_out_tests_packages_and_what_the_build_made() -> None:
    names = [name for name, _ in _builtin_files()]
    assert names == sorted(names) and "json/decoder.py" in names
    unwanted = ("site-packages", "test/", "tests/", "__pycache__", "_sysconfigdata", "config-")
    assert not [name for name in names if any(part in name for part in unwanted) and "unittest/" not in name]


def test_the_builtin_corpus_stands_alone() -> None:
    refused(DataConfig(sources=("builtin", "x.txt")), r"data\.sources is .* 'builtin' stands alone")


def test_the_end_of_the_tokens_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 79 + "y" * 20)
    corpus = load_corpus(DataConfig(sources=(str(tmp_path / "a.txt"),), validation_fraction=0.2))
    assert bytes(everything(corpus.train).tolist()) == b"x" * 79 + b"y"
    assert bytes(everything(corpus.validation).tolist()) == b"y" * 19 + b"\0"


def test_named_validation_is_held_out_and_training_keeps_everything(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("held")
    config = DataConfig(sources=(str(tmp_path / "a.txt"),), validation_sources=(str(tmp_path / "b.txt"),))
    corpus = load_corpus(config)
    assert bytes(everything(corpus.train).tolist()) == b"train\0"
    assert bytes(everything(corpus.validation).tolist()) == b"held\0"


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    a, empty = str(tmp_path / "a.txt"), str(tmp_path / "empty.txt")
    refused(
        DataConfig(sources=("nowhere.txt",)),
        r"data\.sources names 'nowhere\.txt', which does not exist: give a",
    )
    refused(DataConfig(sources=("no/*.txt",)), r"data\.sources names 'no/\*\.txt', which does not exist")
    refused(
        DataConfig(sources=(str(tmp_path / "folder"),)),
        r"folder', which holds no \.txt, \.jsonl, \.jsonl\.gz, \.jsonl\.zst or \.bin file",
    )
    refused(DataConfig(sources=()), r"data\.sources is empty: give at least one")
    refused(DataConfig((a,), validation_fraction=1.0), r"data\.validation_fraction is 1\.0: set it to at least 0")
    refused(DataConfig((a,), (a,)), r"data\.validation_sources names .*a\.txt', which data\.sources trains on")
    refused(DataConfig((a,), ("gone.txt",)), r"data\.validation_sources names 'gone\.txt', which does not exist")
    refused(DataConfig((a,), (empty,)), r"data\.validation_sources is .*empty\.txt.*, which holds no text")
