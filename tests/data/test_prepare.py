"""`prepare` writes shards that hold what loading the text gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_files import everything, shard, text_files

from slipstream.config.schema import DataConfig
from slipstream.data import DataError, load_corpus, prepare


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
    with pytest.raises(DataError, match=r"output would overwrite '.*mix\.train\.00000\.bin': choose another"):
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


def test_a_text_that_cannot_be_prepared_leaves_no_folder_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8 at byte 0"):
        prepare([str(tmp_path / "bad.txt")], "bytes", tmp_path / "new" / "below" / "web")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]
