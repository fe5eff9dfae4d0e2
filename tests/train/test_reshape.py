"""A run that changes its layout on the way, as its users see it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import forks
from runs import folder_of, rows_of, summary_of
from settings import changed

from slipstream.cli.dispatch import run
from slipstream.config.layout import Layout, layout_at, layout_changes, num_processes
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.train.reshape import COMMAND_NAME, Commands, destinations, parameter_of
from slipstream.train.trainer import train


@pytest.fixture
def base(tiny: Config) -> Config:
    """Four layers, so many stages at most, in numbers fine enough to compare."""
    return changed(
        tiny,
        train__steps=16,
        train__dtype="float64",
        optimizer__newton_schulz_dtype="float64",
        evaluation__every_steps=5,
        checkpoint__at_end=False,
    )


def rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what depends on the order of sums."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(item) for key, item in value.items()}
        return float(f"{value:.9g}") if isinstance(value, float) else value

    return [of(row) for row in rows]


@pytest.mark.parametrize("transport", ["thread", pytest.param("process", marks=forks)])
def test_a_run_that_changes_its_shape_says_what_one_says_that_does_not(base, transport):
    base = changed(base, pipeline__transport=transport)
    train(base)
    config = changed(base, run__name="changing", pipeline__reshape=("5=4", "9=2x2", "12=2/1,3"))
    train(config)
    assert rounded(rows_of(config)) == rounded(rows_of(base))
    summary = summary_of(config)
    assert [(r["step"], r["before"], r["after"]) for r in summary["reshapes"]] == [
        (5, "2", "4"),
        (9, "4", "2x2"),
        (12, "2x2", "2/1,3"),
    ]
    assert all(r["bytes_moved"] > 0 and r["pause_seconds"] > r["exchange_seconds"] > 0 for r in summary["reshapes"])
    assert (summary["stages"], summary["replicas"], summary["layers_per_stage"]) == (2, 1, [1, 3])
    assert (summary["resumed_at"], summary["tokens"]) == (None, summary_of(base)["tokens"])
    assert summary["seconds"] > sum(r["pause_seconds"] for r in summary["reshapes"])
    assert summary["config"]["pipeline"]["reshape"] == ["5=4", "9=2x2", "12=2/1,3"]
    assert run(["report", str(folder_of(config)), "--output", str(folder_of(config) / "report.html")]) == 0


@forks
def test_a_run_is_told_to_change_its_shape_while_it_runs(base, capfd):
    config = changed(
        base, pipeline__transport="process", pipeline__processes=4, train__steps=3000, evaluation__batches=0
    )
    folder = folder_of(config)
    said: list[tuple[int, str]] = []

    def tell() -> None:
        for layout, after in (("nonsense", 5), ("4", 10), ("2x2", 40)):
            wait_until(lambda after=after: num_rows(folder) >= after)
            if layout == "nonsense":
                (folder / COMMAND_NAME).write_text(layout)
            else:
                said.append((run(["reshape", str(folder), layout]), layout))
            wait_until(lambda: not (folder / COMMAND_NAME).exists())
        wait_until(lambda: num_rows(folder) >= 80)
        os.kill(os.getpid(), signal.SIGTERM)

    telling = threading.Thread(target=tell)
    telling.start()
    train(config)
    telling.join()
    assert said == [(0, "4"), (0, "2x2")]
    summary = summary_of(config)
    assert [(r["before"], r["after"]) for r in summary["reshapes"]] == [("2", "4"), ("4", "2x2")]
    losses = [row["loss"] for row in rows_of(config)]
    assert len(losses) == summary["steps"] and losses[-1] < losses[0]
    printed = capfd.readouterr().out
    assert "reshape.txt changes nothing: 'nonsense' is no layout: write the number of stages" in printed
    assert f"stopped after step {summary['steps']}, and saved" in printed


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def num_rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_run_that_is_taken_up_again_has_the_shape_of_its_step(base):
    whole = changed(base, pipeline__reshape=("4=4", "10=2"), checkpoint__every_steps=7, checkpoint__keep_last=9)
    train(whole)
    again = changed(whole, checkpoint__resume=True)
    for step in (14,):
        for path in (folder_of(whole) / "checkpoints").glob(f"step-*{step}"):
            path.rename(path.with_name("put-away"))
    tokens = summary_of(whole)["tokens"]
    (folder_of(whole) / "summary.json").unlink()
    rows = rows_of(whole)
    train(again)
    assert rows_of(again) == rows
    assert [(r["step"], r["before"]) for r in summary_of(again)["reshapes"]] == [(10, "4")]
    assert summary_of(again)["resumed_at"] == 7
    assert summary_of(again)["tokens"] == tokens
    assert summary_of(again)["since_start"]["tokens"] == tokens * 9 // 16


@pytest.mark.parametrize(("fields", "message"), [
    ({"pipeline__reshape": ("4",)}, "pipeline.reshape = '4' says no step: write a step and the layout after it, as in"),
    ({"pipeline__reshape": ("4=four",)}, "pipeline.reshape = '4=four': 'four' is no layout: write the number of"),
    ({"pipeline__reshape": ("4=0",)}, "pipeline.reshape = '4=0': '0' is no layout"),
    ({"pipeline__reshape": ("16=4",)}, "pipeline.reshape = '16=4' comes when all train.steps = 16 are made: use less"),
    ({"pipeline__reshape": ("9=4", "5=2")}, "is not in order: sort it by its steps"),
    ({"pipeline__reshape": ("5=4", "5=2")}, "is not in order: sort it by its steps"),
    ({"pipeline__reshape": ("5=5",)}, "pipeline.reshape = '5=5' is invalid: pipeline.microbatches = 4 is inv"),
    ({"pipeline__reshape": ("5=1x3",)}, "pipeline.reshape = '5=1x3' is invalid: a step's 4 microbatches cannot be"),
    ({"pipeline__reshape": ("5=2/1,1",)}, "pipeline.reshape = '5=2/1,1' is invalid: pipeline.layers_per_stage = [1"),
    ({"pipeline__reshape": ("5=4",), "pipeline__processes": 3}, "pipeline.processes = 3 is less than the 4 that"),
    ({"pipeline__processes": 1}, "pipeline.processes = 1 is less than the 2 that"),
    ({"pipeline__processes": 99}, "pipeline.processes = 99 is more than any layout could use, 4 layers in 4 replicas"),
    ({"pipeline__processes": 0}, "pipeline.processes = 0 is too small: use 1 or more"),
    ({"pipeline__reshape": ("5=4",), "pipeline__schedule": "pipedream"}, "pipeline.schedule = 'pipedream' keeps"),
    ({"pipeline__processes": 3, "pipeline__schedule": "paci", "optimizer__error_feedback": 0.0}, "= 'paci' keeps"),
], ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "")  # fmt: skip
def test_a_shape_that_cannot_be_is_refused_before_anything_is_done(base, fields, message):
    config = changed(base, **fields)
    with pytest.raises(ConfigError) as refusal:
        train(config)
    assert message in str(refusal.value)
    assert not folder_of(config).exists()


@pytest.mark.parametrize(("layout", "message"), [
    ("5", "layout = '5' is invalid: 5 takes 5 processes and the run was started with 4: use fewer, or start it with"),
    ("x2", "layout = 'x2' is invalid: 'x2' is no layout"),
    ("1x3", "layout = '1x3' is invalid: a step's 4 microbatches cannot be shared by 3 replicas"),
    ("2/3,3", "layout = '2/3,3' is invalid: pipeline.layers_per_stage = [3, 3] does not cut 4 layers into 2 stages"),
])  # fmt: skip
def test_a_command_that_cannot_be_is_refused_and_the_run_left_alone(base, capsys, layout, message):
    config = changed(base, pipeline__processes=4, train__steps=1)
    train(config)
    capsys.readouterr()
    assert run(["reshape", str(folder_of(config)), layout]) == 2
    said = capsys.readouterr().err
    assert said.startswith("slipstream: ") and message in said and said.count("\n") == 1
    assert not (folder_of(config) / COMMAND_NAME).exists()


def test_only_a_run_can_be_told(tmp_path, capsys):
    assert run(["reshape", str(tmp_path), "4"]) == 2
    assert "has no config.toml and is no run: name the folder of one" in capsys.readouterr().err


def test_a_command_is_followed_once(base, tmp_path):
    said: list[str] = []
    commands = Commands(changed(base, pipeline__processes=4), tmp_path, said.append)
    assert not commands.look() and commands.take() is None
    (tmp_path / COMMAND_NAME).write_text("4\n")
    assert commands.look() and commands.look()
    assert commands.take() == Layout(4) and not commands.look() and not said
    (tmp_path / COMMAND_NAME).write_text("64")
    assert not commands.look() and "64 takes 64 processes" in said[0]


def test_a_command_that_cannot_be_leaves_the_one_before_it(base, tmp_path):
    """The run may be on its way to the layout already."""
    commands = Commands(changed(base, pipeline__processes=4), tmp_path, lambda line: None)
    for text in ("4\n", "64\n"):
        (tmp_path / COMMAND_NAME).write_text(text)
        assert commands.look()
    assert commands.take() == Layout(4)


def test_shapes_are_read_as_they_are_written():
    for text in ("1", "4", "2x2", "12x3/1,2,3", "2/5,5"):
        assert str(Layout.parse(text)) == text
    assert Layout.parse(" 2x2\n") == Layout(2, 2)


def test_the_shape_of_a_step_is_the_last_that_came_before(base):
    config = changed(base, pipeline__reshape=("5=4", "9=2x2"))
    assert [str(layout_at(config, step)) for step in (0, 4, 5, 8, 9, 15)] == ["2", "2", "4", "4", "2x2", "2x2"]
    assert num_processes(config) == 4 and len(layout_changes(config)) == 2
    applied = Layout(2, 2).applied(config).pipeline
    assert (applied.stages, applied.replicas, applied.microbatches, applied.processes) == (2, 2, 2, 4)


def test_every_tensor_of_a_state_goes_to_those_that_hold_its_parameter():
    names = ["master/a.b", "working/1/a.b", "optimizer/a.b/momentum", "optimizer/a.b/shards/0", "sample/a.b"]
    names.append("buffer/a.b")
    assert {parameter_of(name) for name in names} == {"a.b"} and parameter_of("products/0.0") is None
    mesh = Layout(2, 2).mesh(Config())
    holders = [{"a.b"}, {"c", "a.b"}]
    assert destinations(holders, mesh, "working/0/a.b") == [0, 2, 1, 3]
    assert destinations(holders, mesh, "master/c") == [1, 3]
    assert destinations(holders, mesh, "products/1.0") == [0, 2]
