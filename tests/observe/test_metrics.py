"""What a run leaves behind while it runs: rows of JSON, a progress bar or lines."""

import io
import json
import math
import os
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from runs import step_report

from slipstream.observe.console import Screen
from slipstream.observe.metrics import Metrics, finite
from slipstream.observe.plots import draw_losses
from slipstream.observe.sinks import Guarded
from slipstream.pipeline import EvaluationReport
from slipstream.pipeline.clock import TimeSplit
from slipstream.schedule import EvaluationSteps, Schedule

SCHEDULE = Schedule("two_bw", num_stages=2, num_microbatches=2, num_steps=2)


def metrics_of(folder, schedule=SCHEDULE, stage=1, **options):
    transport = SimpleNamespace(stage=stage, num_stages=2, replica=0)
    pipeline = SimpleNamespace(transport=transport, schedule=schedule)
    return Metrics(pipeline, folder, tokens_per_step=64, log_every_steps=1, **options)


def test_numbers_that_json_does_not_know_are_null():
    value = {"a": math.nan, "b": [math.inf, 1.5, (-math.inf, "nan")], "c": 3, "d": None, "e": True}
    assert finite(value) == {"a": None, "b": [None, 1.5, [None, "nan"]], "c": 3, "d": None, "e": True}


def test_an_update_is_a_row_and_an_evaluation_another(tmp_path, capsys):
    metrics = metrics_of(tmp_path)
    metrics.log(step_report(0), learning_rates={"all": 0.1})
    metrics.log(EvaluationReport(0, 2.25))
    metrics.log(step_report(1, math.nan), learning_rates={"all": 0.05})
    metrics.log(EvaluationReport(1, None))
    assert metrics.close() > 0
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["step"], row.get("loss"), row.get("val_loss")) for row in rows] == [
        (1, 2.5, None),
        (1, None, 2.25),
        (2, None, None),
    ]
    assert rows[0]["learning_rates"] == {"all": 0.1}
    assert rows[0]["utilisations"] == [None, 0.75]
    assert [split["backward"] for split in rows[0]["stage_seconds"]] == [0.0, 2.0]
    assert rows[0]["expected_utilisation"] is None
    assert rows[0]["gradient_norms"] == {"all": None}
    assert [row["tokens"] for row in rows if "tokens" in row] == [64, 128]
    assert rows[0]["memory_bytes"] == [2**30, 3 * 2**29] and rows[0]["mfu"] is None
    assert "  memory 1.5 GiB  " in capsys.readouterr().out


def test_the_share_of_what_devices_could_do_is_of_the_last_steps(tmp_path, capsys):
    schedule = Schedule("two_bw", 2, 2, 40)
    metrics = metrics_of(tmp_path, schedule, peak_tokens_per_second=1e9)
    metrics.log(step_report(0))
    time.sleep(0.01)
    metrics.log(step_report(1))
    metrics.close()
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["mfu"] is None  # a step that fills the pipeline
    assert second["mfu"] == pytest.approx(64 / second["seconds"] / 1e9)
    assert "  MFU 0%  memory 1.5 GiB" in capsys.readouterr().out


def test_rows_are_there_before_the_run_ends(tmp_path):
    metrics = metrics_of(tmp_path)
    metrics.log(step_report(0))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    metrics.close()


def test_a_terminal_gets_a_progress_bar_and_a_line_for_every_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=100, highlight=False)
    metrics = metrics_of(tmp_path, screen=terminal)
    metrics.log(step_report(0))
    metrics.log(EvaluationReport(0, 2.25))
    metrics.log(step_report(1))
    metrics.close()
    said = text.getvalue()
    assert "step 2/2" in said and "━" in said and "validation loss 2.2500 after step 1\n" in said
    assert "step 2/2  loss" not in said


@pytest.mark.parametrize(("width", "said"), [
    (50, "loss 2.5000  2 s left"),
    (60, "loss 2.5000  64 tokens/s  2 s left"),
    (82, "loss 2.5000  64 tokens/s  MFU 50%  memory 1.5 GiB  2 s left"),
    (105, "loss 2.5000  64 tokens/s  MFU 50%  memory 1.5 GiB  stages busy 75%  2 s left"),
    (200, "loss 2.5000  lr 0.1  grad norm inf  64 tokens/s  MFU 50%  memory 1.5 GiB  stages busy 75%  2 s left"),
])  # fmt: skip
def test_a_narrow_terminal_leaves_out_whole_fields_and_never_the_time_left(width, said, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=width, highlight=False)
    metrics = metrics_of(tmp_path, Schedule("two_bw", 2, 2, 4), screen=terminal, peak_tokens_per_second=128.0)
    for step in range(2):
        metrics.log(step_report(step), learning_rates={"all": 0.1})
    metrics.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue())
    assert f"{said}\n" in re.sub(r" +\n", "\n", shown) and "…" not in shown


def test_an_evaluation_counts_in_the_time_left_and_not_in_the_speed(tmp_path, capsys, monkeypatch):
    """Or a long evaluation would slow down the next sixteen steps, and the run would seem to take hours longer."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    steps = EvaluationSteps(100, 10)
    metrics = metrics_of(tmp_path, Schedule("two_bw", 2, 2, 100, evaluate_after=steps, num_evaluations=2))
    for step in range(15):
        now[0] += 2.0
        if step == 10:
            metrics.log(EvaluationReport(9, 2.25))
            now[0] += 30.0
        metrics.log(step_report(step))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert all("  32 tokens/s  " in line for line in lines[1:])
    assert lines[9].endswith("  3 min left") and lines[14].endswith(f"  {round((85 * 2 + 8.5 * 30) / 60)} min left")
    metrics.close()


def test_a_run_goes_on_when_nobody_reads_it(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        screen = Screen()
        screen.print("a line")
        screen.print("another")
    assert screen.quiet


def test_a_run_goes_on_when_its_terminal_is_closed(monkeypatch):
    terminal, end = os.openpty()
    with os.fdopen(end, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        screen = Screen()
        os.close(terminal)
        screen.print("a line")
        screen.print("another")
    assert screen.quiet


def test_what_is_measured_stands_beside_what_the_simulator_expects(tmp_path, capsys):
    metrics = metrics_of(tmp_path, Schedule("one_f_one_b", 2, 2, num_steps=4))
    stage = TimeSplit(forward=2.0, backward=4.0, wait_gradients=3.5, other=0.5)
    for step in range(4):
        metrics.log(replace(step_report(step), utilisations=(0.6, 0.6), splits=(stage, stage)))
    metrics.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["expected_utilisation"] == pytest.approx(2 / 3)  # m / (m + P - 1)
    assert "stages busy 60% (67% possible)" in capsys.readouterr().out


class FullDisk(io.BytesIO):
    """Takes half of what it is given, and then nothing."""

    name, is_full = "metrics.jsonl", True

    def write(self, data: bytes) -> int:
        if not self.is_full:
            return super().write(data)
        if len(self.getvalue()) > 0:
            raise OSError(28, "No space left on device")
        return super().write(data[: len(data) // 2])


def test_rows_that_a_full_disk_does_not_take_are_written_when_it_does(tmp_path, capsys):
    metrics = metrics_of(tmp_path)
    (sink,) = metrics._sinks
    sink.close()
    disk = sink._file = FullDisk()
    metrics.log(step_report(0))
    metrics.log(EvaluationReport(0, 2.25))
    assert disk.getvalue() and b"\n" not in disk.getvalue()
    disk.is_full = False
    metrics.log(step_report(1))
    rows = [json.loads(line) for line in disk.getvalue().splitlines()]
    assert [row["step"] for row in rows] == [1, 1, 2]
    metrics.close()
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl cannot be written (No space left on device)") == 1 and "lacks" not in said


def test_half_a_row_that_a_full_disk_took_is_not_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 64, "loss": 2.5}\n{"step": 2, "tok')
    draw_losses(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


class Unlucky:
    def __init__(self, folder, config):
        raise ConnectionError("no route\n\n  to the\nserver")


def test_a_sink_of_the_users_that_fails_is_one_line(tmp_path):
    said = []
    Guarded(Unlucky, tmp_path, {}, said.append)
    assert said == ["the sink Unlucky failed and is left out (ConnectionError: no route to the server)"]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_sink_of_the_users_that_exits_is_named(tmp_path, kind):
    class Leaves(Unlucky):
        def __init__(self, folder, config):
            raise kind(3)

    said = []
    with pytest.raises(KeyboardInterrupt) if kind is KeyboardInterrupt else nullcontext():
        Guarded(Leaves, tmp_path, {}, said.append)
    assert said == [f"the sink Leaves failed and is left out ({kind.__name__}: 3)"]


def test_a_line_tells_rate_norm_speed_and_what_is_left(tmp_path, capsys):
    schedule = Schedule("two_bw", 2, 2, 40)
    metrics = metrics_of(tmp_path, schedule)
    metrics.log(step_report(0), learning_rates={"matrices": 0.0125, "rest": 0.1})
    metrics.log(step_report(1), learning_rates={"matrices": 0.02, "rest": 0.1})
    metrics.log(EvaluationReport(1, 2.25))
    metrics.close()
    first, second, evaluation = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 1/40  loss 2\.5000  lr 0\.0125  grad norm inf.*", first) and "left" not in first
    assert re.fullmatch(r"step 2/40  loss 2\.5000  lr 0\.02  grad norm inf  [\d,]+ tokens/s.*  \d+ s left", second)
    assert evaluation == "validation loss 2.2500 after step 2"
