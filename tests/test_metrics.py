"""What a run leaves behind while it runs: rows of JSON, a progress bar or lines."""

import io
import json
import math
import os
from dataclasses import replace

import pytest
from rich.console import Console

from slipstream.metrics import Metrics, Screen, finite
from slipstream.optim.correction import Alignment
from slipstream.pipeline import EvaluationReport, StepReport
from slipstream.pipeline.clock import TimeSplit
from slipstream.schedule import Schedule

SCHEDULE = Schedule("two_bw", num_stages=2, num_microbatches=2, num_steps=2)


def report(step: int, loss: float = 2.5) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        utilisations=(math.nan, 0.75),
        splits=(TimeSplit(forward=1.0), TimeSplit(backward=2.0)),
        gradient_norms={"all": math.inf},
        learning_rates={},
        alignments={"all": Alignment(math.nan, math.nan)},
        skipped=False,
        save=False,
        delay=1,
    )


def test_numbers_that_json_does_not_know_are_null():
    value = {"a": math.nan, "b": [math.inf, 1.5, (-math.inf, "nan")], "c": 3, "d": None, "e": True}
    assert finite(value) == {"a": None, "b": [None, 1.5, [None, "nan"]], "c": 3, "d": None, "e": True}


def test_an_update_is_a_row_and_an_evaluation_another(tmp_path, capsys):
    metrics = Metrics(tmp_path, schedule=SCHEDULE, tokens_per_step=64, log_every_steps=1, screen=Screen())
    metrics.step(report(0), {"all": 0.1})
    metrics.evaluation(EvaluationReport(0, 2.25))
    metrics.step(report(1, math.nan), {"all": 0.05})
    metrics.evaluation(EvaluationReport(1, None))
    assert metrics.close() > 0
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["step"], row.get("loss"), row.get("val_loss")) for row in rows] == [
        (0, 2.5, None),
        (0, None, 2.25),
        (1, None, None),
    ]
    assert rows[0]["learning_rates"] == {"all": 0.1}
    assert rows[0]["utilisations"] == [None, 0.75]
    assert [split["backward"] for split in rows[0]["stage_seconds"]] == [0.0, 2.0]
    assert rows[0]["expected_utilisation"] is None
    assert rows[0]["gradient_norms"] == {"all": None}
    assert [row["tokens"] for row in rows if "tokens" in row] == [64, 128]


def test_rows_are_there_before_the_run_ends(tmp_path):
    metrics = Metrics(tmp_path, schedule=SCHEDULE, tokens_per_step=64, log_every_steps=1, screen=Screen())
    metrics.step(report(0), {})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 0
    metrics.close()


def test_a_terminal_gets_a_progress_bar_and_no_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=100)
    metrics = Metrics(tmp_path, schedule=SCHEDULE, tokens_per_step=64, log_every_steps=1, screen=terminal)
    metrics.step(report(0), {})
    metrics.evaluation(EvaluationReport(0, 2.25))
    metrics.step(report(1), {})
    metrics.close()
    said = text.getvalue()
    assert "step 2/2" in said and "━" in said and "loss 2.5000  val 2.2500" in said
    assert "step 2/2  loss" not in said


def test_a_run_goes_on_when_nobody_reads_it(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        screen = Screen()
        screen.print("a line")
        screen.print("another")
    assert screen.quiet


def test_what_is_measured_stands_beside_what_the_simulator_expects(tmp_path, capsys):
    metrics = Metrics(
        tmp_path, Schedule("one_f_one_b", 2, 2, num_steps=4), tokens_per_step=64, log_every_steps=1, screen=Screen()
    )
    stage = TimeSplit(forward=2.0, backward=4.0, wait_gradients=3.5, other=0.5)
    for step in range(4):
        metrics.step(replace(report(step), utilisations=(0.6, 0.6), splits=(stage, stage)), {})
    metrics.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["expected_utilisation"] == pytest.approx(2 / 3)  # m / (m + P - 1)
    assert "utilisation 0.60 of 0.67 expected" in capsys.readouterr().out
