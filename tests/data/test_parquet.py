"""Parquet files become the shards that the same documents in a .jsonl file become."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream import cli
from slipstream.config.schema import DataConfig
from slipstream.data import DataError, load_corpus, prepare
from slipstream.data.parquet import read_parquet

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

TEXTS = ["one", "", "zwei ß", "three\n<|endoftext|>\nstill three", *(f"row {i}" for i in range(3000))]


def table(path: Path, columns: dict[str, Any], rows_per_group: int = 100) -> str:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return str(path)


def refused(source: str, output: Path, message: str, **settings: Any) -> None:
    with pytest.raises(DataError, match=message) as caught:
        prepare([source], "bytes", output, **settings)
    sentence = str(caught.value)
    assert sentence.endswith(".") and ": " in sentence and "\n" not in sentence
    assert not output.parent.exists()  # nothing was begun


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_rows_become_the_same_shards_as_the_lines_of_a_jsonl_file(tmp_path: Path, kind: str) -> None:
    named = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    column = pyarrow.array(TEXTS, named.get(kind) or getattr(pyarrow, kind)())
    source = table(tmp_path / "a.parquet", {"id": list(range(len(TEXTS))), "body": column})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    said: list[str] = []
    settings: dict[str, Any] = {"shard_tokens": 5000, "text_field": "body", "tell": said.append}
    shards = prepare([source], "bytes", tmp_path / "p" / "a", **settings)
    expected = prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "j" / "a", **settings)
    assert [shard.name for shard in shards] == [shard.name for shard in expected]
    assert [shard.read_bytes() for shard in shards] == [shard.read_bytes() for shard in expected]
    assert all(line.startswith("documents: 3,003, ") for line in said)  # an empty row is none
    corpus = load_corpus(DataConfig((str(tmp_path / "p"),)))
    assert bytes(corpus.train.read(0, 11).tolist()).decode() == "one\0zwei ß"


def test_progress_counts_the_bytes_of_the_files_and_ends_at_the_end(tmp_path: Path) -> None:
    sources = [table(tmp_path / f"{name}.parquet", {"text": ["x" * 2**16] * 200}, 20) for name in "ab"]
    calls: list[tuple[int, int]] = []
    [shard] = prepare(sources, "bytes", tmp_path / "out" / "a", 10**9, 0, lambda *call: calls.append(call))
    total = sum(Path(source).stat().st_size for source in sources)
    assert len(calls) > 8 and calls == sorted(calls) and calls[-1] == (total, total)
    assert len(np.fromfile(shard, np.uint8)) == 2 * 200 * (2**16 + 1)


def test_a_file_is_read_one_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = table(tmp_path / "a.parquet", {"text": [f"row {i}" for i in range(50)]}, 10)
    groups: list[Any] = []
    original = parquet.ParquetFile.iter_batches

    def watched(self: Any, *arguments: Any, **settings: Any) -> Any:
        groups.append(settings["row_groups"])
        return original(self, *arguments, **settings)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", watched)
    pieces = read_parquet(Path(source), "text")
    assert [next(pieces).text for _ in range(11)][-1] == "row 10" and groups == [[0], [1]]
    assert len(list(pieces)) == 39 and groups == [[0], [1], [2], [3], [4]]


def test_text_and_parquet_may_be_prepared_together(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", {"text": ["from parquet"]})
    (tmp_path / "b.txt").write_text("from text")
    [shard] = prepare([str(tmp_path)], "bytes", tmp_path / "out" / "mix", validation_fraction=0)
    assert shard.read_bytes() == b"from parquet\0from text\0"


def test_what_cannot_be_prepared_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("fine")
    out = tmp_path / "out" / "web"
    source = table(tmp_path / "a.parquet", {"body": ["x"], "id": [1]})
    refused(source, out, r"a\.parquet' has no column 'text': set text_field to one of body, id")
    refused(
        source, out, r"a\.parquet' has int64 in the column 'id': set text_field to a column of text", text_field="id"
    )
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no PAR1")
    refused(str(tmp_path / "bad.parquet"), out, r"bad\.parquet' is no Parquet file that can be read \(.*\): write it")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    refused(str(tmp_path / "cut.parquet"), out, r"cut\.parquet' is no Parquet file that can be read")
    missing = table(tmp_path / "null.parquet", {"text": ["a", None, "b"]})
    refused(missing, out, r"null\.parquet' row 2 has no text in the column 'text': set text_field to one that has")
    raw = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    refused(table(tmp_path / "raw.parquet", {"text": raw}), out, r"raw\.parquet' is no Parquet file .*utf-8")
    refused(table(tmp_path / "none.parquet", {"text": pyarrow.array([], pyarrow.string())}), out, "without any text")


def test_damaged_pages_are_refused(tmp_path: Path) -> None:
    content = bytearray(Path(table(tmp_path / "a.parquet", {"text": TEXTS})).read_bytes())
    content[4:2000] = bytes(1996)
    (tmp_path / "a.parquet").write_bytes(content)
    refused(str(tmp_path / "a.parquet"), tmp_path / "out" / "web", r"a\.parquet' is no Parquet file that can be read")


def test_training_on_parquet_is_refused_with_the_remedy(tmp_path: Path) -> None:
    source = table(tmp_path / "a.parquet", {"text": ["x"]})
    for sources in ((source,), (str(tmp_path),), (str(tmp_path / "*.parquet"),)):
        with pytest.raises(
            DataError, match=r"data\.sources names '.*a\.parquet', .*: run slipstream prepare on it, and"
        ):
            load_corpus(DataConfig(sources))
    (tmp_path / "b.txt").write_text("a folder may hold both")
    assert len(load_corpus(DataConfig((str(tmp_path),), validation_fraction=0)).train) == 23


def test_a_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = table(tmp_path / "a.parquet", {"text": ["x"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(source, tmp_path / "out" / "web", r"needs the pyarrow library: pip install 'slipstream\[parquet\]'")


def test_the_command_prepares_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        table(Path(f"{name}.parquet"), {"body": [f"text of {name}"] * 50})
    assert cli.run(["prepare", "a.parquet", "b.parquet", "--text-field", "body", "--output", "data/web"]) == 0
    assert capsys.readouterr().out.split() == ["data/web.train.00000.bin", "data/web.validation.00000.bin"]
    assert cli.run(["prepare", "a.parquet", "--output", "data/other"]) != 0
    assert "'a.parquet' has no column 'text': set text_field to one of body" in capsys.readouterr().err
