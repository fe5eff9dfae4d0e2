"""A run's folder, whole, unfinished, old or broken."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.errors import UsageError
from slipstream.tools.report import read
from slipstream.tools.report.read import read_metrics, read_run

WriteRun = Callable[..., Path]


def test_a_whole_run_has_nothing_missing(write_run: WriteRun) -> None:
    run = read_run(write_run(), "demo")
    assert run.notes == ()
    assert run.metrics.steps.tolist() == list(range(1, 41))
    assert run.metrics.validation_steps.tolist() == [10, 20, 30, 40]
    assert set(run.metrics.group("learning_rates")) == {"matrices", "rest"}
    assert run.config["pipeline.stages"] == 2
    assert len(run.spans) == 96  # and neither names of rows nor arrows


def test_nulls_are_gaps(write_run: WriteRun) -> None:
    cosines = read_run(write_run(), "demo").metrics.group("update_cosines")["rest"]
    assert [math.isnan(value) for value in cosines[:3]] == [True, True, False]


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("summary.json", "the run has not ended"),
        ("trace.json", "timeline is not known"),
        ("config.toml", "configuration is not known"),
        ("metrics.jsonl", "no metrics yet"),
    ],
)
def test_a_missing_file_is_said_in_words(write_run: WriteRun, file: str, word: str) -> None:
    notes = read_run(write_run(without=(file,)), "demo").notes
    assert len(notes) == 1 and word in notes[0]


def test_half_a_last_line_is_left_out_and_said(write_run: WriteRun) -> None:
    path = write_run(num_steps=5) / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 5, "loss": 1.')
    metrics = read_metrics(path)
    assert metrics.is_torn and len(metrics.steps) == 5
    assert "half a line" in " ".join(read_run(path.parent, "demo").notes)


@pytest.mark.parametrize("line", [b"garbage\n", b"[1, 2]\n", b'{"loss": 1}\n', b'{"step": "x"}\n', b"\xff\xfe\n"])
def test_a_line_that_is_no_update_is_named(write_run: WriteRun, line: bytes) -> None:
    path = write_run(num_steps=3) / "metrics.jsonl"
    path.write_bytes(line + path.read_bytes())
    with pytest.raises(UsageError, match=r"metrics\.jsonl line 1 is no update and no evaluation, .*: remove"):
        read_metrics(path)


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json", "trace.json"])
def test_a_file_that_cannot_be_read_is_named(write_run: WriteRun, file: str) -> None:
    folder = write_run(without=(file,))
    (folder / file).mkdir()
    with pytest.raises(UsageError, match=f"{file} cannot be read"):
        read_run(folder, "demo")


@pytest.mark.parametrize("file", ["summary.json", "trace.json"])
@pytest.mark.parametrize("text", ["{", "[]", '"text"'])
def test_a_file_that_holds_something_else_is_named(write_run: WriteRun, file: str, text: str) -> None:
    folder = write_run()
    (folder / file).write_text(text)
    with pytest.raises(UsageError, match=f"{file} (is not JSON|holds no object)"):
        read_run(folder, "demo")


def test_a_folder_of_runs_is_no_run_and_one_of_them_is_suggested(write_run: WriteRun) -> None:
    folder = write_run("inner")
    with pytest.raises(UsageError, match=r"is no run: name a folder in it, such as .*inner"):
        read_run(folder.parent, "outer")


def test_a_key_that_comes_late_or_goes_is_a_gap_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "loss": 3}, {"step": 1, "loss": 2, "norms": {"a": 7}}, {"step": 2}]
    path.write_text("\n".join(map(json.dumps, lines)))
    metrics = read_metrics(path)
    assert not metrics.is_torn
    assert [None if math.isnan(v) else v for v in metrics.column("loss")] == [3, 2, None]
    assert [None if math.isnan(v) else v for v in metrics.column("norms", "a")] == [None, 7, None]


def test_older_traces_say_the_stage_in_the_name_and_put_updates_in_rows_of_their_own(write_run: WriteRun) -> None:
    folder = write_run()
    box = {"ph": "X", "cat": "backward", "tid": 2, "ts": 1.0, "dur": 2.0, "args": {"version": 3, "microbatch": 19}}
    events = [box | {"name": "1B19@v3"}, box | {"name": "1U19@v4", "cat": "update", "tid": 3}, box | {"name": "odd"}]
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
    run = read_run(folder, "demo")
    assert [(span.stage, span.op, span.in_background) for span in run.spans] == [(1, "B", False), (1, "U", True)]
    assert run.notes == ("1 events of trace.json name no stage or time and were left out.",)


def test_a_long_trace_keeps_its_end_and_says_so(write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "MAX_SPANS", 10)
    run = read_run(write_run(), "demo")
    assert len(run.spans) == 10 and run.spans[-1].microbatch == 23
    assert "latest 10 of 96" in run.notes[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["summary.json", "trace.json", "metrics.jsonl"])
def test_pipes_are_not_waited_for_and_devices_not_read_to_their_end(write_run: WriteRun, file: str) -> None:
    path = write_run(without=(file,)) / file
    os.mkfifo(path)
    with pytest.raises(UsageError, match=rf"{file} cannot be read \(it is no plain file\)"):
        read_run(path.parent, "demo")
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=rf"{file} cannot be read \(it is no plain file\)"):
        read_run(path.parent, "demo")
