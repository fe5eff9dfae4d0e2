"""When a run saves itself, and that it says so only if it did."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import step_report
from settings import as_arguments, changed

from slipstream import cli
from slipstream.checkpoint import CheckpointError, Store
from slipstream.pipeline import Requests
from slipstream.pipeline.checkpoints import StageWriter
from slipstream.schedule import Schedule
from slipstream.train.checkpointing import Saver, SignalRequests
from slipstream.train.trainer import train


class Written(StageWriter):
    """A writer that writes nothing."""

    is_busy = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.saved: list[int] = []
        self.left_out: list[int] = []

    def _write(self, step: int, take: object) -> None:
        self.saved.append(step)

    def leave_out(self, step: int) -> None:
        self.left_out.append(step)


def no_snapshot(into: object) -> None:
    """Of a stage that has nothing to save."""


def steps_of(
    busy: set[int],
    asked: set[int],
    tiny: Any,
    monkeypatch: pytest.MonkeyPatch,
    writer: type[Written] = Written,
    snapshot: Any = no_snapshot,
) -> Written:
    """every = 2, eight updates; busy and asked: after which."""
    monkeypatch.setattr("slipstream.train.checkpointing.StageWriter", writer)
    transport: Any = SimpleNamespace(stage=0, replica=0, num_stages=2, num_replicas=1)
    pipeline: Any = SimpleNamespace(
        transport=transport, is_sharded=False, snapshot=snapshot, schedule=Schedule("two_bw", 2, 2, 8)
    )
    model: Any = SimpleNamespace(sequence_length=16, weight_folder=None)
    saver = Saver(changed(tiny, checkpoint__every_steps=2), model, pipeline, Store(Path("none")), print, {})
    for step in range(8):
        saver.after(SimpleNamespace(**{**vars(step_report(step)), "busy": step + 1 in busy, "save": step + 1 in asked}))
        saver.writer.wait()
    return saver.writer


def test_a_process_that_is_free_leaves_out_what_another_is_too_busy_for(tiny, monkeypatch):
    """Were each to go by itself, those that are busy in turns would never complete a checkpoint."""
    writer = steps_of({3, 4, 5}, set(), tiny, monkeypatch)
    assert writer.saved == [2, 6, 8] and writer.left_out == [4]


def test_copies_that_are_still_being_written_are_not_overwritten(tiny, monkeypatch):
    """Whether somebody is busy was asked when the batch ended, and a report may be older than that."""

    class Busy(Written):
        is_busy = True

    writer = steps_of(set(), set(), tiny, monkeypatch, Busy, snapshot=lambda into: pytest.fail("a copy was made"))
    assert writer.saved == [] and writer.left_out == [2, 4, 6, 8]


def test_a_save_that_was_asked_for_is_made_up_for(tiny, monkeypatch):
    writer = steps_of({3, 4}, {3}, tiny, monkeypatch)
    assert writer.saved == [2, 5, 6, 8] and writer.left_out == [3, 4]


def test_a_row_is_written_before_its_step_is_saved(tiny, monkeypatch):
    """Else a kill in between would leave a checkpoint and a gap in metrics.jsonl."""
    path, seen = Path(tiny.run.folder, tiny.run.name, "metrics.jsonl"), []
    after = Saver.after

    def look(saver: Saver, said: Any) -> None:
        if saver.writer._part_name == "stage-1":
            seen.append((said.step, json.loads(path.read_text().splitlines()[-1])["step"]))
        after(saver, said)

    monkeypatch.setattr(Saver, "after", look)
    train(changed(tiny, checkpoint__every_steps=1))
    assert seen == [(step, step + 1) for step in range(6)]


def test_a_run_that_was_killed_after_its_last_save_still_gives_its_summary(tiny):
    folder = Path(tiny.run.folder, tiny.run.name)
    config = changed(tiny, checkpoint__every_steps=3, checkpoint__resume=True)
    train(config)
    left, said = (folder / "summary.json").read_text(), rows_of(folder)
    (folder / "summary.json").write_text(left[:100])
    train(config)
    again = json.loads((folder / "summary.json").read_text())
    assert again["parameter_checksum"] == json.loads(left)["parameter_checksum"]
    assert again["val_loss"] == json.loads(left)["val_loss"]
    assert rows_of(folder) == said


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Of the metrics, whenever they were written."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def test_a_run_that_was_killed_before_it_wrote_anything_begins(tiny):
    folder = Path(tiny.run.folder, tiny.run.name)
    folder.mkdir(parents=True)
    train(changed(tiny, checkpoint__resume=True))
    assert (folder / "summary.json").exists()


class StopsAtOnce(SignalRequests):
    def __call__(self) -> Requests:
        return Requests(save=True, stop=True)


def test_a_stop_without_a_checkpoint_is_no_success(tiny, monkeypatch, capsys):
    def fail(store: Store, *args: object) -> None:
        raise CheckpointError("the disk is full")

    for module in ("trainer", "process"):
        monkeypatch.setattr(f"slipstream.train.{module}.SignalRequests", StopsAtOnce)
    config = changed(tiny, train__steps=40)
    assert cli.run(["train", *as_arguments(config)]) == 0
    assert "and saved: resume with --checkpoint.resume" in capsys.readouterr().out
    monkeypatch.setattr(Store, "write", fail)
    assert cli.run(["train", *as_arguments(changed(config, run__name="other"))]) == 1
    said = capsys.readouterr()
    assert "has no checkpoint: the disk is full" in said.out and "and saved" not in said.out
    assert "which has no checkpoint: there is no other" in said.err


def test_stages_leave_their_last_actions_when_a_run_fails(tiny, monkeypatch):
    fails_at = 4

    def fail(saver: Saver, said: Any) -> None:
        if saver.writer._part_name == "stage-1" and said.step == fails_at:
            raise ValueError("boom")

    monkeypatch.setattr(Saver, "after", fail)
    assert cli.run(["train", *as_arguments(changed(tiny, train__steps=40))]) == 1
    folder = Path(tiny.run.folder, tiny.run.name)
    first, last = ((folder / f"stage-{stage}.actions.txt").read_text() for stage in (0, 1))
    assert "ValueError: boom" in last and f"updates made: {fails_at + 1}" in last
    assert "PipelineError" in first and first.splitlines()[-1].split()[2].startswith("wait_")
