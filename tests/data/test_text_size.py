"""Bits per byte: the bytes that tokens stand for, and a loss in nats per token converted by them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import folder_of
from settings import changed

from slipstream.config.schema import DataConfig
from slipstream.data import Tokens, load_corpus, prepare, text_size, validation_batches
from slipstream.data.byte_tokenizer import byte_tokenizer
from slipstream.data.text_size import TextSize, byte_lengths
from slipstream.train.trainer import train

TEXT = "Zwölf Boxkämpfer jagen Viktor  quer über den 🚀 Sylter Deich.\n"


@pytest.fixture
def trained_tokenizer(tmp_path: Path, text_file: Path) -> Path:
    """A ByteLevel tokenizer with merges, a special token and an added token that is text."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator(
        [TEXT] * 4 + [text_file.read_text()],
        tokenizers.trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
        ),
    )
    library.add_tokens(["über den"])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    return path


def test_the_lengths_of_tokens_add_up_to_the_bytes_of_the_text(trained_tokenizer):
    from tokenizers import Tokenizer

    library, lengths = Tokenizer.from_file(str(trained_tokenizer)), byte_lengths(trained_tokenizer.read_bytes())
    ids = library.encode(TEXT).ids
    assert len(ids) < len(TEXT) and library.token_to_id("über den") in ids
    assert lengths[ids].sum() == len(TEXT.encode())
    assert lengths[library.token_to_id("über den")] == len("über den".encode())
    assert lengths[library.token_to_id("<|endoftext|>")] == 0


def test_every_byte_of_the_byte_tokenizer_has_length_one():
    pytest.importorskip("tokenizers")
    assert byte_lengths(json.dumps(byte_tokenizer()).encode()).tolist() == [1] * 256


def test_bits_per_byte_are_exact():
    assert TextSize(num_tokens=3, num_bytes=12).bits_per_byte(4 * math.log(2)) == pytest.approx(1.0, rel=1e-15)
    assert TextSize(num_tokens=96, num_bytes=96).bits_per_byte(2.5) == 2.5 * 96 / math.log(2) / 96


def test_padding_and_the_first_token_are_not_counted(trained_tokenizer):
    lengths = byte_lengths(trained_tokenizer.read_bytes())
    ids = np.arange(11, dtype=np.uint16) + 250
    batches = validation_batches(Tokens((ids,)), 5, 4, max_batches=8)  # two windows, two empty rows
    size = text_size(batches, "tokenizer.json 0123", trained_tokenizer.read_bytes())
    assert size == TextSize(10, int(lengths[ids[1:]].sum()))


@pytest.mark.parametrize("source", [None, b'{"decoder": null}', b'{"decoder": {"type": "WordPiece"}}', b"{}"])
def test_the_size_is_unknown_where_the_bytes_of_a_token_are(source):
    batches = validation_batches(Tokens((np.arange(20),)), sequence_length=4, microbatch_size=2, max_batches=8)
    assert text_size(batches, "unknown", source) is None


def rows_and_summary(config):
    folder = folder_of(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "val_loss" in row], json.loads((folder / "summary.json").read_text())


def test_a_run_on_bytes_reports_bits_per_byte(tiny, capsys):
    train(tiny)
    rows, summary = rows_and_summary(tiny)
    num_tokens = 2 * 2 * 16
    expected = [row["val_loss"] * num_tokens / math.log(2) / num_tokens for row in rows]
    assert [row["val_bits_per_byte"] for row in rows] == expected and len(rows) == 2
    assert summary["val_bits_per_byte"] == expected[-1]
    said = capsys.readouterr().out
    shown = [f"validation loss {row['val_loss']:.4f} ({row['val_bits_per_byte']:.4f} bits per byte)" for row in rows]
    assert f"{shown[0]} after step 3\n" in said and f"; {shown[-1]}\n" in said


@pytest.mark.parametrize("prepared", [False, True])
def test_a_run_with_a_tokenizer_reports_bits_per_byte(tiny, trained_tokenizer, text_file, tmp_path, prepared):
    data = replace(tiny.data, tokenizer=str(trained_tokenizer))
    corpus = load_corpus(data)
    if prepared:
        shards = prepare([str(text_file)], str(trained_tokenizer), tmp_path / "shards" / "text")
        data = DataConfig(sources=tuple(map(str, shards)))
    config = replace(tiny, data=data)
    train(config)
    rows, summary = rows_and_summary(config)
    from tokenizers import Tokenizer

    num_tokens = 2 * 2 * 16
    read = corpus.validation.read(1, num_tokens + 1).tolist()
    num_bytes = len(Tokenizer.from_file(str(trained_tokenizer)).decode(read, skip_special_tokens=True).encode())
    assert num_bytes > num_tokens
    assert [row["val_bits_per_byte"] for row in rows] == [
        row["val_loss"] * num_tokens / math.log(2) / num_bytes for row in rows
    ]
    assert summary["val_bits_per_byte"] == rows[-1]["val_bits_per_byte"]


def test_a_run_on_shards_of_an_unknown_tokenizer_reports_nats_alone(tiny, tmp_path, capsys):
    (np.arange(4000, dtype="<u2") % 200).tofile(tmp_path / "ids.bin")
    config = changed(tiny, data__sources=(str(tmp_path / "ids.bin"),), data__token_dtype="uint16")
    train(config)
    rows, summary = rows_and_summary(config)
    assert all("val_bits_per_byte" not in row for row in rows) and summary["val_bits_per_byte"] is None
    assert "bits per byte" not in capsys.readouterr().out
