"""Data: a batch is a function of its index, an epoch misses nothing, a mistake gets one clear sentence."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config.schema import (
    Config,
    DataConfig,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    RunSection,
    TrainSection,
)
from slipstream.config.toml import load_toml
from slipstream.data import Batches, DataError, Tokens, load_corpus, prepare, validation_batches
from slipstream.data import text as text_module
from slipstream.data.batches import shuffled
from slipstream.data.corpus import _builtin_files
from slipstream.model.decoder import IGNORE
from slipstream.train.trainer import train


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


# ---- training batches


def test_targets_are_the_inputs_shifted_by_one() -> None:
    inputs, targets = Batches(counting(101), sequence_length=10, microbatch_size=4, num_microbatches=2)(3, 1)
    assert inputs.shape == targets.shape == (4, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 0] % 10, torch.zeros(4, dtype=torch.int64))


def test_a_batch_depends_on_its_index_alone() -> None:
    batches = Batches(counting(1001), 10, 2, 3, seed=5)
    later_first = {index: batches(*index) for index in [(7, 2), (0, 0), (7, 1)]}
    again = Batches(counting(1001), 10, 2, 3, seed=5)
    for index, (inputs, _) in sorted(later_first.items()):
        assert torch.equal(again(*index)[0], inputs)
    assert batches.windows(7, 2) != batches.windows(7, 1) != batches.windows(0, 0)


def test_the_seed_changes_the_order() -> None:
    orders = {tuple(shuffled(range(100), 100, seed)) for seed in range(20)}
    assert len(orders) == 20


def test_the_order_is_pinned() -> None:
    """A resumed run must go on in the order it began with, whatever release it is resumed with."""
    assert shuffled(range(20), 10, seed=0).tolist() == [
        0,
        7,
        1,
        8,
        5,
        6,
        9,
        2,
        3,
        4,
        1,
        9,
        8,
        2,
        0,
        5,
        3,
        6,
        7,
        4,
    ]


@pytest.mark.parametrize("num_windows", [1, 2, 3, 4, 5, 16, 17, 100, 257, 1000])
def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(num_windows: int) -> None:
    first, second = (
        shuffled(range(epoch * num_windows, (epoch + 1) * num_windows), num_windows, 0).tolist() for epoch in (0, 1)
    )
    assert sorted(first) == sorted(second) == list(range(num_windows))
    if num_windows >= 16:
        assert first != second and first != sorted(first)


def test_neighbours_in_the_order_are_not_neighbours_in_the_corpus() -> None:
    order = shuffled(range(4000), 4000, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(4000), order)[0, 1]) < 0.05
    assert len(np.unique(np.diff(order))) > 2000  # an affine permutation would have two steps


def test_a_huge_corpus_needs_no_table() -> None:
    windows = shuffled(range(100), 10**12 + 39, 0).tolist()
    assert len(set(windows)) == 100 and max(windows) < 10**12 + 39


@pytest.mark.parametrize(("num_windows", "microbatch_size"), [(1, 3), (7, 3), (5000, 3), (5000, 2500), (1024, 1024)])
def test_a_microbatch_reads_the_windows_of_its_samples(num_windows: int, microbatch_size: int) -> None:
    batches = Batches(counting(2 * num_windows + 1), 2, microbatch_size, 2, seed=3)
    steps = range(200, 220)  # some of them across the edge of a block
    read = [window for step in steps for m in range(2) for window in batches.windows(step, m)]
    samples = range(200 * 2 * microbatch_size, 220 * 2 * microbatch_size)
    assert read == shuffled(samples, num_windows, 3).tolist()


def test_microbatches_of_an_epoch_are_disjoint_and_leave_nothing_out() -> None:
    batches = Batches(counting(16 * 3 * 10 + 1), 10, 2, 12)  # 48 windows: 2 steps of 12 microbatches x 2 rows
    seen = Counter(w for step in range(2) for m in range(12) for w in batches.windows(step, m))
    assert seen == Counter(range(48))


def test_a_step_reads_the_same_windows_however_it_is_divided() -> None:
    def step(microbatch_size: int, num_microbatches: int) -> set[int]:
        batches = Batches(counting(1001), 10, microbatch_size, num_microbatches)
        return {w for m in range(num_microbatches) for w in batches.windows(5, m)}

    assert step(2, 4) == step(8, 1) == step(1, 8)


def test_the_last_tokens_that_fill_no_window_are_never_read() -> None:
    assert Batches(counting(40), 10, 1, 1).num_windows == 3  # the 40th token has no window to be the target of
    assert Batches(counting(41), 10, 1, 1).num_windows == 4


def test_num_tokens_counts_the_whole_batch() -> None:
    batches = Batches(counting(1001), 10, 2, 12)
    assert batches.num_tokens(0) == 12 * sum((batches(0, 0)[1] != IGNORE).sum(1)).item()


@pytest.mark.parametrize("index", [(-1, 0), (0, -1), (0, 3)])
def test_an_index_outside_the_step_is_refused(index: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match="step"):
        Batches(counting(1001), 10, 2, 3)(*index)


# ---- validation batches


def test_validation_visits_every_window_once_in_order() -> None:
    batches = validation_batches(counting(75), sequence_length=10, microbatch_size=3, max_batches=8)
    assert len(batches) == 3  # 7 windows
    rows = [(i, t) for index in range(3) for i, t in zip(*batches(index), strict=True) if (t != IGNORE).all()]
    assert [int(inputs[0]) for inputs, _ in rows] == list(range(0, 70, 10))
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in rows)


def test_the_last_validation_batch_is_padded_with_targets_that_do_not_count() -> None:
    batches = validation_batches(counting(75), 10, 3, 8)
    inputs, targets = batches(2)
    assert inputs.shape == targets.shape == (3, 10)
    assert (targets[1:] == IGNORE).all() and (inputs[1:] == 0).all()
    assert [batches.num_tokens(index) for index in range(3)] == [30, 30, 10]
    with pytest.raises(IndexError, match="3 of 3"):
        batches(3)


def test_max_batches_caps_validation() -> None:
    assert len(validation_batches(counting(75), 10, 3, max_batches=2)) == 2
    assert len(validation_batches(counting(75), 10, 3, max_batches=9)) == 3


# ---- tokens over several arrays


@pytest.mark.parametrize("at", [0, 5, 10, 11, 30])
def test_tokens_split_and_read_across_parts(at: int) -> None:
    before, after = counting(30).split(at)
    assert everything(before).tolist() == list(range(at))
    assert everything(after).tolist() == list(range(at, 30))
    assert counting(30).read(8, 13).tolist() == [8, 9, 10, 11, 12]
    with pytest.raises(IndexError):
        counting(30).read(29, 31)


# ---- the built-in corpus


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


# ---- text


def test_documents_end_with_a_zero_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\n<|endoftext|>\r\n\n<|endoftext|>\n<|endoftext|>\ntwø".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n\n{"text": ""}\n{"text": "four", "more": 1}\n')
    corpus = load_corpus(DataConfig(sources=(str(tmp_path),), validation_fraction=0))
    assert bytes(everything(corpus.train).tolist()).decode() == "one\n\0\n\0twø\0three\0four\0"
    assert len(corpus.validation) == 0


def test_the_separator_counts_only_as_a_whole_line(tmp_path: Path) -> None:
    text = "say <|endoftext|>\n <|endoftext|>\n<|endoftext|> no\n"
    (tmp_path / "a.txt").write_text(text)
    corpus = load_corpus(DataConfig(sources=(str(tmp_path / "a.txt"),), validation_fraction=0))
    assert bytes(everything(corpus.train).tolist()).decode() == text + "\0"


def test_the_text_field_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "yes", "text": "no"}\n')
    config = DataConfig(sources=(str(tmp_path / "a.jsonl"),), text_field="content", validation_fraction=0)
    assert bytes(everything(load_corpus(config).train).tolist()) == b"yes\0"


@pytest.mark.parametrize("piece_bytes", [16, 17, 64])
def test_how_a_file_is_read_does_not_change_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    text = "ein Tausendfüßler ohne Zeilenende 🐛" * 3 + "\n<|endoftext|>\nkürzer\n\nzuletzt"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(text_module, "_PIECE_BYTES", piece_bytes)
    corpus = load_corpus(DataConfig(sources=(str(tmp_path / "a.txt"),), validation_fraction=0))
    expected = text.replace("<|endoftext|>\n", "\0") + "\0"
    assert bytes(everything(corpus.train).tolist()).decode() == expected


def test_sources_may_be_files_folders_and_globs_each_read_once(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "notes.md").write_text("not data")
    sources = (str(tmp_path / "c.txt"), str(tmp_path / "?.txt"), str(tmp_path))
    corpus = load_corpus(DataConfig(sources=sources, validation_fraction=0))
    assert bytes(everything(corpus.train).tolist()) == b"c\0a\0b\0"


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


# ---- tokenizers


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A word-level tokenizer.json that would cut and pad and add what nobody asked for."""
    words = {"<|endoftext|>": 0, "[UNK]": 1, "the": 2, "cat": 3, "sat": 300}
    made = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [
            {"id": 0, "content": "<|endoftext|>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(made))
    return str(path)


def test_a_tokenizer_file_reads_whole_documents_and_ends_them(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat the cat"}\n{"text": "sat"}\n')
    config = DataConfig(sources=(str(tmp_path / "a.jsonl"),), tokenizer=tokenizer, validation_fraction=0)
    corpus = load_corpus(config)
    assert everything(corpus.train).tolist() == [2, 3, 300, 2, 3, 0, 300, 0]
    assert corpus.vocab_size == 301 and corpus.tokenizer.startswith("tokenizer.json ")
    assert corpus.train.parts[0].dtype == np.uint16


def test_shards_and_runs_keep_the_tokenizer_that_made_them(tmp_path: Path, tokenizer: str) -> None:
    source = Path(tokenizer).read_bytes()
    (tmp_path / "a.txt").write_text("w1 w2 w3 " * 400)
    text = DataConfig(sources=(str(tmp_path / "a.txt"),), tokenizer=tokenizer, validation_fraction=0)
    assert load_corpus(text).tokenizer_json == source
    shards = prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out" / "a.b", validation_fraction=0)
    assert (tmp_path / "out" / "a.b.tokenizer.json").read_bytes() == source
    config = DataConfig(sources=(str(shards[0]),), validation_fraction=0)
    assert load_corpus(config).tokenizer_json == source
    run = Config(
        model=ModelSection(sequence_length=16),
        data=replace(config, validation_fraction=0.05),
        train=TrainSection(steps=1, device="cpu"),
        evaluation=EvaluationSection(batches=0),
        pipeline=PipelineSection(transport="thread"),
        run=RunSection(folder=str(tmp_path / "runs")),
    )
    train(run)
    folder = tmp_path / "runs" / "default"
    assert (folder / "tokenizer.json").read_bytes() == source
    assert load_toml(folder / "config.toml").model.vocab_size == 301
    assert json.loads((folder / "summary.json").read_text())["tokenizer"] == load_corpus(config).tokenizer
    (tmp_path / "out" / "a.b.tokenizer.json").write_bytes(source + b" ")  # another one
    assert load_corpus(config).tokenizer_json is None
    prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "out" / "a.b", overwrite=True)
    assert not (tmp_path / "out" / "a.b.tokenizer.json").exists()


@pytest.mark.parametrize("name", ["<|end_of_text|>", "</s>", "<eos>"])
def test_documents_end_with_the_token_whatever_a_tokenizer_calls_it(tmp_path: Path, tokenizer: str, name: str) -> None:
    renamed = tmp_path / "other" / "tokenizer.json"
    renamed.parent.mkdir()
    renamed.write_text(Path(tokenizer).read_text().replace("<|endoftext|>", name))
    (tmp_path / "a.txt").write_text("the cat\n<|endoftext|>\nsat")
    config = DataConfig(sources=(str(tmp_path / "a.txt"),), tokenizer=str(renamed.parent), validation_fraction=0)
    assert everything(load_corpus(config).train).tolist() == [2, 3, 0, 300, 0]
    said: list[str] = []
    [shard] = prepare([str(tmp_path / "a.txt")], str(renamed), tmp_path / "s", validation_fraction=0, tell=said.append)
    assert np.fromfile(shard, dtype=np.uint16).tolist() == [2, 3, 0, 300, 0]
    assert said == ["documents: 2, each with token 0 at its end; 5 tokens, 5.00 bytes of the files to a token"]


def test_the_end_of_text_that_a_folder_names_is_taken(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "tokenizer.json").write_text(Path(tokenizer).read_text().replace("<|endoftext|>", "<|fin|>"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|fin|>"}}')
    (tmp_path / "a.txt").write_text("the cat\n<|endoftext|>\nsat")
    config = DataConfig(sources=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path), validation_fraction=0)
    assert everything(load_corpus(config).train).tolist() == [2, 3, 0, 300, 0]
    (tmp_path / "tokenizer_config.json").write_text("[")
    refused(config, "tokenizer_config.json' cannot be read")


def test_an_end_of_text_that_is_not_found_is_refused_unless_none_is_wanted(tmp_path: Path, tokenizer: str) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text(Path(tokenizer).read_text().replace("<|endoftext|>", "<|fin|>"))
    (tmp_path / "a.txt").write_text("the cat\n<|endoftext|>\nsat")
    config = DataConfig(sources=(str(tmp_path / "a.txt"),), tokenizer=str(odd), validation_fraction=0)
    refused(config, r"data\.tokenizer is '.*odd\.json', which has no token .* name its own with data\.end_of_text, or")
    refused(replace(config, end_of_text="<|end|>"), r"data\.end_of_text is '<\|end\|>', which is no token of '.*odd")
    refused(
        replace(config, tokenizer="bytes", end_of_text="x"), r"data\.end_of_text is 'x', and bytes have no such token"
    )
    refused(replace(config, tokenizer=str(tmp_path)[:-1] + "_"), "which does not exist")
    assert everything(load_corpus(replace(config, end_of_text="<|fin|>")).train).tolist() == [2, 3, 0, 300, 0]
    assert everything(load_corpus(replace(config, end_of_text="none")).train).tolist() == [2, 3, 300]
    (tmp_path / "empty").mkdir()
    refused(
        replace(config, tokenizer=str(tmp_path / "empty")), "a folder without a tokenizer.json: give one that has it"
    )


def test_a_missing_tokenizers_library_is_named(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    config = DataConfig(sources=(str(tmp_path / "a.txt"),), tokenizer=tokenizer)
    refused(config, r"needs the tokenizers library: pip install 'slipstream\[text\]'")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "t.json").write_text("{}")
    source = (str(tmp_path / "a.txt"),)
    refused(
        DataConfig(source, tokenizer=str(tmp_path / "t.json")),
        r"data\.tokenizer is .*t\.json', which is no tokenizer",
    )
    refused(
        DataConfig(source, tokenizer="gpt2"),
        r"data\.tokenizer is 'gpt2', which does not exist: give \"bytes\" or",
    )


# ---- mistakes in settings and text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"data\.sources is .*, which holds no text to train on: give some"),
        ("a.txt", b"fine\n" * 40000 + b"\xff", r"a\.txt' is not UTF-8 at byte 200000: convert it"),
        ("a.txt", b"cut \xc3", r"a\.txt' is not UTF-8 at byte 4: convert it"),
        (
            "a.md",
            b"text",
            r"a\.md', whose suffix is not known: give a \.txt, \.jsonl, \.jsonl\.gz, \.jsonl\.zst or \.bin file",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": \n',
            r"a\.jsonl' line 3 is not JSON \(.*\): write one object on each line",
        ),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl' line 1 is not JSON \(.*\): "),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl' line 1 is not JSON \(.*\): "),
        (
            "a.jsonl",
            b'{"body": "a"}\n',
            r"line 1 has no text in the field 'text': write it there, or set text_field",
        ),
        ("a.jsonl", b'{"text": 5}\n', r"line 1 has no text in the field 'text'"),
        ("a.jsonl", b'["text"]\n', r"line 1 has no text in the field 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1 holds half a surrogate pair"),
    ],
)
def test_bad_text_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    refused(DataConfig(sources=(str(tmp_path / name),)), message)


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


# ---- shards


def test_shards_are_mapped_and_bring_their_own_validation(tmp_path: Path) -> None:
    shard(tmp_path / "a.bin", range(10), "uint16")
    shard(tmp_path / "b.bin", range(10, 30), "uint32")
    shard(tmp_path / "c.bin", range(30, 35), "uint8", split="validation")
    corpus = load_corpus(DataConfig(sources=(str(tmp_path),)))
    assert everything(corpus.train).tolist() == list(range(30))
    assert everything(corpus.validation).tolist() == list(range(30, 35))
    assert corpus.vocab_size == 1000
    assert all(isinstance(part, np.memmap) for part in corpus.train.parts)


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


# ---- preparing shards


def text_files(folder: Path) -> tuple[str, ...]:
    (folder / "a.txt").write_text("the cat\n" * 500 + "<|endoftext|>\nsat")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": f"the cat {i}"}) + "\n" for i in range(100)))
    return str(folder / "a.txt"), str(folder / "b.jsonl")


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_prepared_shards_hold_what_loading_the_text_gives(tmp_path: Path, tokenizer: str, kind: str) -> None:
    sources, chosen = text_files(tmp_path), "bytes" if kind == "bytes" else tokenizer
    calls: list[tuple[int, int]] = []
    shards = prepare(sources, chosen, tmp_path / "out" / "mix", 300, 0.2, lambda *call: calls.append(call))
    direct = load_corpus(DataConfig(sources=sources, tokenizer=chosen, validation_fraction=0.2))
    corpus = load_corpus(DataConfig(sources=(str(tmp_path / "out"),)))
    assert np.array_equal(everything(corpus.train), everything(direct.train))
    assert np.array_equal(everything(corpus.validation), everything(direct.validation))
    assert (corpus.vocab_size, corpus.tokenizer) == (direct.vocab_size, direct.tokenizer)
    # Shards are full but for the last of each part, and nothing else is left in the folder.
    assert shards == sorted(shards) and shards[0].name == "mix.train.00000.bin"
    assert all(len(part) == 300 for part in corpus.train.parts[:-1])
    kept = [] if kind == "bytes" else [tmp_path / "out" / "mix.tokenizer.json"]
    left = [*kept, *(path for shard in shards for path in (shard, shard.with_suffix(".json")))]
    assert sorted((tmp_path / "out").iterdir()) == sorted(left)
    # Progress never goes back and ends at the end.
    total = sum(Path(source).stat().st_size for source in sources)
    assert calls == sorted(calls) and calls[-1] == (total, total)


def test_prepare_refuses_to_overwrite_unless_told_and_then_leaves_no_old_shard(tmp_path: Path) -> None:
    sources, prefix = text_files(tmp_path), tmp_path / "out" / "mix"
    many = prepare(sources, "bytes", prefix, 300)
    bystander = tmp_path / "out" / "mix.train.mine.bin"
    bystander.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"output_prefix would overwrite '.*mix\.train\.00000\.bin': choose another"):
        prepare(sources, "bytes", prefix)
    few = prepare(sources, "bytes", prefix, overwrite=True)
    assert len(few) == 2 < len(many)
    assert sorted((tmp_path / "out").glob("*.bin")) == sorted([*few, bystander])


def test_a_prepare_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    sources, prefix = text_files(tmp_path), tmp_path / "out" / "mix"
    prepare(sources, "bytes", prefix)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"bad\.jsonl' line 1 is not JSON"):
        prepare((*sources, str(tmp_path / "bad.jsonl")), "bytes", prefix, overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_prepare_refuses_what_it_cannot_turn_into_shards(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    empty, ready = (str(tmp_path / "empty.txt"),), (shard(tmp_path / "a.bin", [1, 2]),)
    for sources, arguments, message in [
        (empty, {}, "sources names 1 files without any text: give some"),
        (ready, {}, r"sources names .*a\.bin', which is a token shard already: give text"),
        (("gone.txt",), {}, r"sources names 'gone\.txt', which does not exist"),
        (empty, {"shard_tokens": 0}, "shard_tokens is 0: set it to 1 or more"),
        (
            empty,
            {"validation_fraction": -0.1},
            r"validation_fraction is -0\.1: set it to at least 0 and below 1",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            prepare(sources, "bytes", tmp_path / "out" / "mix", **arguments)
    with pytest.raises(DataError, match="tokenizer is 'gpt2', which does not exist"):
        prepare(empty, "gpt2", tmp_path / "out" / "mix")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_are_read_as_plain_ones(tmp_path: Path, suffix: str) -> None:
    _, source = text_files(tmp_path)
    plain = Path(source).read_bytes() * 100
    packed = tmp_path / "packed" / f"b.jsonl{suffix}"
    packed.parent.mkdir()
    if suffix == ".gz":
        content = gzip.compress(plain)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        content = pyarrow.compress(plain, "zstd", asbytes=True)
    packed.write_bytes(content)
    (tmp_path / "c.jsonl").write_bytes(plain)
    expected = everything(load_corpus(DataConfig((str(tmp_path / "c.jsonl"),))).train)
    assert np.array_equal(everything(load_corpus(DataConfig((str(packed.parent),))).train), expected)
    calls: list[tuple[int, int | None]] = []
    prepare([str(packed)], "bytes", tmp_path / "out" / "b", 10**9, progress=lambda *call: calls.append(call))
    assert np.array_equal(everything(load_corpus(DataConfig((str(tmp_path / "out"),))).train), expected)
    assert calls[-1] == (len(content), len(content))
    for damaged in (content[:-20], content[: len(content) // 2], b"", b"no such thing at all"):
        packed.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot be decompressed|holds no text") as caught:
            load_corpus(DataConfig((str(packed),)))
        assert "\n" not in str(caught.value)


def test_zst_without_pyarrow_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(DataError, match=r"needs the pyarrow library: pip install 'slipstream\[parquet\]'"):
        load_corpus(DataConfig((str(tmp_path / "a.jsonl.zst"),)))


@pytest.mark.timeout(60)
def test_a_sidecar_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "web.bin").write_bytes(bytes(100))
    os.mkfifo(tmp_path / "web.json")
    with pytest.raises(OSError, match="it is no plain file"):
        load_corpus(DataConfig(sources=(str(tmp_path / "web.bin"),)))


def test_a_text_that_cannot_be_prepared_leaves_no_folder_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8 at byte 0"):
        prepare([str(tmp_path / "bad.txt")], "bytes", tmp_path / "new" / "below" / "web")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]
