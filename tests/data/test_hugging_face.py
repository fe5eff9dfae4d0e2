"""Datasets of Hugging Face become the shards that the same documents in a .jsonl file become."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli
from slipstream.config.schema import DataConfig
from slipstream.data import DataError, load_corpus, prepare

pyarrow = pytest.importorskip("pyarrow")
TEXTS = ["one", "", "zwei ß", "three\n<|endoftext|>\nstill three", *(f"row {i}" for i in range(3000))]
HELD_OUT = ["held", "out"]


@pytest.fixture
def datasets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    library.disable_progress_bars()
    return library


def lines(path: Path, texts: list[str], field: str = "body") -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return str(path)


def folder(kind: str, path: Path, library: Any) -> str:
    if kind == "jsonl":
        lines(path / "train.jsonl", TEXTS)
        lines(path / "test.jsonl", HELD_OUT)
        return f"hf:{path}"
    made = {
        name: library.Dataset.from_dict({"id": list(range(len(texts))), "body": texts})
        for name, texts in (("train", TEXTS), ("test", HELD_OUT))
    }
    if kind == "parquet":
        path.mkdir()
        for name, dataset in made.items():
            dataset.to_parquet(path / f"{name}.parquet")
    elif kind == "saved splits":
        library.DatasetDict(made).save_to_disk(path)
    else:
        made["train"].save_to_disk(path)
    return f"hf:{path}"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved splits", "saved"])
def test_rows_become_the_same_shards_as_the_lines_of_a_jsonl_file(tmp_path: Path, datasets: Any, kind: str) -> None:
    source, said = folder(kind, tmp_path / "d", datasets), []
    calls: list[tuple[int, int | None]] = []
    settings: dict[str, Any] = {"text_field": "body", "tell": said.append}
    shards = prepare([source], "bytes", tmp_path / "h" / "a", 5000, 0.1, lambda *call: calls.append(call), **settings)
    expected = prepare([lines(tmp_path / "a.jsonl", TEXTS)], "bytes", tmp_path / "j" / "a", 5000, 0.1, **settings)
    assert [shard.name for shard in shards] == [shard.name for shard in expected]
    assert [shard.read_bytes() for shard in shards] == [shard.read_bytes() for shard in expected]
    assert [line.partition(" tokens")[0] for line in said] == [said[1].partition(" tokens")[0]] * 2
    assert calls[-1][0] == len(TEXTS) and calls[-1][1] in (len(TEXTS), None)  # rows, if the dataset tells how many


@pytest.mark.parametrize("kind", ["jsonl", "saved splits"])
def test_a_validation_split_is_held_out_as_a_whole(tmp_path: Path, datasets: Any, kind: str) -> None:
    source = folder(kind, tmp_path / "d", datasets)
    settings: dict[str, Any] = {"text_field": "body", "validation_split": "test"}
    prepare([source], "bytes", tmp_path / "out" / "a", **settings)
    corpus = load_corpus(DataConfig((str(tmp_path / "out"),)))
    assert corpus.validation.read(0, len(corpus.validation)).tolist() == list(b"held\0out\0")
    assert len(corpus.train) == sum(len(text.encode()) + 1 for text in TEXTS if text)
    swapped = {**settings, "split": "test", "validation_split": "train"}
    shards = prepare([source], "bytes", tmp_path / "swapped" / "a", **swapped)
    assert shards[0].read_bytes() == b"held\0out\0"


def test_reading_stops_at_max_tokens(tmp_path: Path, datasets: Any) -> None:
    """Of a stream without an end, only what is needed is read."""
    source, said = folder("jsonl", tmp_path / "d", datasets), []
    calls: list[tuple[int, int | None]] = []
    settings: dict[str, Any] = {"text_field": "body", "validation_split": "test", "max_tokens": 1e1}
    prepare([source], "bytes", tmp_path / "out" / "a", 6, 0, lambda *c: calls.append(c), tell=said.append, **settings)
    corpus = load_corpus(DataConfig((str(tmp_path / "out"),)))
    assert corpus.train.read(0, 10).tolist() == list("one\0zwei ß".encode())[:10] and len(corpus.train) == 10
    assert len(corpus.validation) == 9
    assert "19 tokens; reading stopped at max_tokens" in said[0]
    for max_tokens in (0, -1, float("nan"), float("inf")):
        with pytest.raises(DataError, match=f"max_tokens is {max_tokens}: set it to 1 or more"):
            prepare([source], "bytes", tmp_path / "no" / "a", max_tokens=max_tokens)
    (tmp_path / "long.txt").write_text("abc" * 2**20)
    [shard] = prepare([str(tmp_path / "long.txt")], "bytes", tmp_path / "t", validation_fraction=0, max_tokens=2**21)
    assert shard.stat().st_size == 2**21


def test_a_dataset_is_read_a_batch_at_a_time(tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.data import hugging_face

    seen: list[int] = []
    original = hugging_face.check_column
    monkeypatch.setattr(
        hugging_face, "check_column", lambda source, table, field: seen.append(1) or original(source, table, field)
    )
    source = folder("jsonl", tmp_path / "d", datasets)
    pieces, _ = hugging_face.hub_text(source, hugging_face.open_hub(source, None), "train", "split", "body")
    assert not seen
    assert [next(pieces).text for _ in range(2)] == ["one", "zwei ß"] and len(seen) == 1
    assert len(list(pieces)) == len(TEXTS) - 3 and len(seen) == 3


def test_what_cannot_be_read_is_one_sentence_and_leaves_nothing(tmp_path: Path, datasets: Any) -> None:
    source = folder("jsonl", tmp_path / "d", datasets)
    lines(tmp_path / "null" / "train.jsonl", ["a", None])  # type: ignore[list-item]
    (tmp_path / "empty").mkdir()
    lines(tmp_path / "blank" / "train.jsonl", [""])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.jsonl").write_text('{"body": "a"}\n{"body"')
    body: dict[str, Any] = {"text_field": "body"}
    for given, settings, message in [
        (source, {}, r"d' has no column 'text': set text_field to one of id, body"),
        (source, {"text_field": "id"}, r"d' has int64 in the column 'id': set text_field to a column of text"),
        (
            source,
            {**body, "split": "dev"},
            r"split is 'dev', which 'hf:.*' does not have: set it to one of train",
        ),
        (source, {**body, "validation_split": "dev"}, r"validation_split is 'dev', which 'hf:.*d' does not have: set"),
        (source, {**body, "validation_split": "train"}, r"validation_split is 'train', which is also the split"),
        (source, {**body, "config": "x"}, r"the datasets library cannot read \(.*'x' not found.*\): check"),
        (f"hf:{tmp_path / 'null'}", body, r"null' row 2 has no text in the column 'body': set text_field"),
        (f"hf:{tmp_path / 'blank'}", body, r"sources names 1 datasets without any text"),
        (f"hf:{tmp_path / 'empty'}", body, r"the datasets library cannot read \(.*contain any data files"),
        (f"hf:{tmp_path / 'bad'}", body, r"the datasets library cannot read \("),
        ("hf:", body, r"sources names 'hf:', which names no dataset: write hf:NAME"),
        ("hf:no/such/folder", body, r"'hf:no/such/folder', which the datasets library cannot read"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            prepare([given], "bytes", tmp_path / "out" / "web", **settings)
        sentence = str(caught.value)
        assert sentence.endswith(".") and ": " in sentence and "\n" not in sentence
        assert not (tmp_path / "out").exists()


def test_an_unreachable_hub_is_one_sentence(tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: Any, **settings: Any) -> None:
        raise ConnectionError("Couldn't reach\n'nobody/none' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"cannot read \(Couldn't reach 'nobody/none' on the Hub .*\): check the name"):
        prepare(["hf:nobody/none"], "bytes", tmp_path / "out" / "web")


def test_an_interrupted_prepare_leaves_nothing(tmp_path: Path, datasets: Any) -> None:
    source = folder("jsonl", tmp_path / "d", datasets)

    def interrupt(done: int, total: int | None) -> None:
        assert any((tmp_path / "new" / "out").iterdir())  # it has begun
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], "bytes", tmp_path / "new" / "out" / "web", progress=interrupt, text_field="body")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the datasets library: pip install 'slipstream\[datasets\]'"):
        prepare(["hf:some/name"], "bytes", tmp_path / "out" / "web")


def test_datasets_do_not_mix_with_files_and_training_does_not_read_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"sources names 'hf:some/name', which only slipstream prepare reads, and not"):
        prepare([str(tmp_path / "a.txt"), "hf:some/name"], "bytes", tmp_path / "out" / "web")
    with pytest.raises(DataError, match=r"data\.sources names 'hf:some/name', which only slipstream prepare reads"):
        load_corpus(DataConfig(("hf:some/name",)))


@pytest.mark.parametrize("option", ["config", "split", "validation_split"])
def test_options_of_datasets_are_refused_for_files(tmp_path: Path, option: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    settings: dict[str, Any] = {option: "test"}
    with pytest.raises(DataError, match=f"^{option} is 'test', but sources names files: leave it out"):
        prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "out" / "web", **settings)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    hub = pytest.importorskip("huggingface_hub")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"cat": 0, "?": 1, "<|endoftext|>": 2}, "?"))
    made.save(str(tmp_path / "tokenizer.json"))
    asked: list[tuple[str, ...]] = []

    def download(*name: str) -> str:
        asked.append(name)
        return str(tmp_path / "tokenizer.json")

    monkeypatch.setattr(hub, "hf_hub_download", download)
    (tmp_path / "a.txt").write_text("cat")
    [shard] = prepare([str(tmp_path / "a.txt")], "hf:some/model", tmp_path / "out" / "web", validation_fraction=0)
    assert asked == [("some/model", "tokenizer.json")] and shard.read_bytes() == bytes([0, 2])
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"tokenizer is 'hf:a b', whose tokenizer\.json cannot be downloaded \("):
        prepare([str(tmp_path / "a.txt")], "hf:a b", tmp_path / "out" / "other")


def test_the_command_prepares_a_dataset(
    tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder("jsonl", Path("d"), datasets)
    options = ["--text-field", "body", "--split", "train", "--max-tokens", "1e3"]
    assert cli.run(["prepare", "hf:d", *options, "--output", "data/web"]) == 0
    assert capsys.readouterr().out.split() == ["data/web.train.00000.bin", "data/web.validation.00000.bin"]
    assert Path("data/web.train.00000.bin").stat().st_size == 950
    assert cli.run(["prepare", "hf:d", "--output", "data/other"]) == 2
    assert "'hf:d' has no column 'text': set text_field to one of id, body" in capsys.readouterr().err
