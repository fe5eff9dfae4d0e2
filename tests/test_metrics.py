"""What a run leaves behind while it runs: rows of JSON, a progress bar or lines, a trace."""

import io
import json
import math
import os

import pytest
from rich.console import Console

from slipstream.metrics import Metrics, Screen, chrome_trace, finite
from slipstream.optim.correction import Alignment
from slipstream.pipeline import EvaluationReport, StepReport
from slipstream.pipeline.clock import Span
from slipstream.schedule import Action


def report(step: int, loss: float = 2.5) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        utilisations=(math.nan, 0.75),
        gradient_norms={"all": math.inf},
        learning_rates={},
        alignments={"all": Alignment(math.nan, math.nan)},
        skipped=False,
        delay=1,
    )


def test_numbers_that_json_does_not_know_are_null():
    value = {"a": math.nan, "b": [math.inf, 1.5, (-math.inf, "nan")], "c": 3, "d": None, "e": True}
    assert finite(value) == {"a": None, "b": [None, 1.5, [None, "nan"]], "c": 3, "d": None, "e": True}


def test_an_update_is_a_row_and_an_evaluation_another(tmp_path, capsys):
    metrics = Metrics(tmp_path, num_steps=2, tokens_per_step=64, log_every_steps=1, screen=Screen())
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
    assert rows[0]["gradient_norms"] == {"all": None}
    assert [row["tokens"] for row in rows if "tokens" in row] == [64, 128]


def test_rows_are_there_before_the_run_ends(tmp_path):
    metrics = Metrics(tmp_path, num_steps=2, tokens_per_step=64, log_every_steps=1, screen=Screen())
    metrics.step(report(0), {})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 0
    metrics.close()


def test_a_terminal_gets_a_progress_bar_and_no_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=100)
    metrics = Metrics(tmp_path, num_steps=2, tokens_per_step=64, log_every_steps=1, screen=terminal)
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


def test_updates_have_a_row_of_their_own_in_the_trace():
    texts = ["1F0@v0", "1B0@v0", "1U0@v1", "1F1@v0"]
    spans = [Span(Action.parse(text), float(i), i + 1.5) for i, text in enumerate(texts)]
    events = chrome_trace([[], spans], [100.0, 100.25])["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 0, updates", 2: "stage 1", 3: "stage 1, updates"}
    played = [event for event in events if event["ph"] == "X"]
    assert [names[event["tid"]] for event in played] == ["stage 1", "stage 1", "stage 1, updates", "stage 1"]
    assert [event["name"] for event in played] == texts
    assert played[1]["ts"] == pytest.approx(1.25e6) and played[1]["dur"] == pytest.approx(1.5e6)
