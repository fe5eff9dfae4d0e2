"""Text files and tokenizers: documents, their ends, and bad text."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_files import everything, refused, text_files

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
from slipstream.data import DataError, load_corpus, prepare
from slipstream.data import text as text_module
from slipstream.train.trainer import train


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
