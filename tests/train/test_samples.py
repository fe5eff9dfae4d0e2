"""`evaluation.prompts`: what a run writes of the continuations, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import folder_of
from settings import changed

from slipstream.errors import ConfigError
from slipstream.train.build import build_components
from slipstream.train.trainer import train

PROMPTS: dict[str, Any] = {
    "evaluation__prompts": ("de", "[b]ß"),
    "evaluation__sample_tokens": 4,
    "evaluation__every_steps": 2,
}


def rows_of(config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder_of(config) / "metrics.jsonl").read_text().splitlines()]


def checksum(config) -> str:
    return json.loads((folder_of(config) / "summary.json").read_text())["parameter_checksum"]


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_run_writes_its_samples_and_trains_as_without(tiny, capsys, transport):
    plain = changed(tiny, run__name="plain", pipeline__transport=transport, evaluation__every_steps=2)
    train(plain)
    config = changed(plain, run__name="prompted", **PROMPTS)
    train(config)
    assert checksum(plain) == checksum(config)
    rows = [row for row in rows_of(config) if "val_loss" in row]
    assert [row["val_loss"] for row in rows] == [row["val_loss"] for row in rows_of(plain) if "val_loss" in row]
    for row in rows:
        assert [sample["prompt"] for sample in row["samples"]] == ["de", "[b]ß"]
        assert all(1 <= len(sample["text"]) <= 4 for sample in row["samples"])
    said = capsys.readouterr().out if transport == "thread" else ""  # processes write to the terminal themselves
    lines = [f"  {sample['prompt']!r} -> {sample['text']!r}\n" for row in rows for sample in row["samples"]]
    assert transport == "process" or all(line in said for line in lines)


def test_a_loss_in_chunks_draws_the_same_samples(tiny):
    texts = []
    for name, chunk in (("whole", 0), ("chunks", 8)):
        config = changed(tiny, run__name=name, train__loss_chunk_tokens=chunk, train__dtype="float64", **PROMPTS)
        train(config)
        texts.append([row["samples"] for row in rows_of(config) if "samples" in row])
    assert texts[0] == texts[1] != []


def test_tensorboard_shows_the_samples_as_text(tiny):
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    train(changed(tiny, run__sinks=("tensorboard",), **PROMPTS))
    content = b"".join(path.read_bytes() for path in (folder_of(tiny) / "tensorboard").iterdir())
    assert proto and b"samples/0/text_summary" in content and b"samples/1/text_summary" in content
    assert b"**de**" in content and "**[b]ß**".encode() in content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"evaluation__prompts": ("",)},
            r"evaluation\.prompts has '', which is no token of the model: write",
        ),
        ({"evaluation__prompts": ("x" * 99,)}, r"whose 99 tokens and the 4 of .*sample_tokens do not fit model\.seq"),
        ({"evaluation__batches": 0}, r"evaluation\.prompts are continued at evaluations, and evaluation\.batches = 0"),
        ({"pipeline__schedule": "pipedream", "optimizer__error_feedback": 0.0}, r"those of pipedream do not: leave"),
        ({"evaluation__sample_tokens": 0}, r"evaluation\.sample_tokens = 0 is too small: use 1 or more"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(tiny, fields, message):
    with pytest.raises(ConfigError, match=message):
        build_components(changed(tiny, **{**PROMPTS, **fields}))


def test_prompts_need_a_known_tokenizer(tiny, tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(bytes(range(200)) * 20)
    shards = {"data__sources": (str(tmp_path / "a.bin"),), "data__token_dtype": "uint8"}
    with pytest.raises(ConfigError, match=r"evaluation\.prompts needs the tokenizer, which data\.sources"):
        build_components(changed(tiny, **PROMPTS, **shards))
