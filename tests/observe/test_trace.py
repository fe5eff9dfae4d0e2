"""trace.json and the drawing of a window of it."""

import json
import os

import pytest

from slipstream.cli.dispatch import run
from slipstream.observe.trace import Window, chrome_trace, measured_timeline, steady_window
from slipstream.pipeline.clock import Activity, Span
from slipstream.schedule import Action, Op, Schedule

ACTIVITIES = {"F": Activity.FORWARD, "B": Activity.BACKWARD, "U": Activity.UPDATE, "E": Activity.EVALUATION}


def span(text: str, start: float, end: float, activity: Activity | None = None) -> Span:
    action = Action.parse(text)
    default = ACTIVITIES[action.op]
    return Span(action, default if activity is None else activity, start, end, in_background=action.op is Op.UPDATE)


@pytest.fixture
def trace() -> dict:
    first = [
        span("0F0@v0", 0.0, 1.0),
        span("0F1@v0", 1.0, 2.0),
        span("0B0@v0", 2.0, 4.0, Activity.WAIT_GRADIENTS),
        span("0B0@v0", 4.0, 6.0),
        span("0U0@v1", 6.5, 7.5),
        span("0F2@v1", 6.0, 7.0),
    ]
    last = [
        span("1F0@v0", 1.5, 2.0),
        span("1B0@v0", 2.0, 3.5),
        span("1F1@v0", 3.5, 3.500001, Activity.WAIT_ACTIVATIONS),
        span("1F1@v0", 3.5, 4.0),
    ]
    return chrome_trace(Schedule("two_bw", 2, 2), [first, last], [100.25, 100.0])


def played(trace: dict, stage: int) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == stage]


def test_a_stage_is_a_row_and_what_overlaps_it_another(trace):
    rows = {event["name"]: event["tid"] for event in played(trace, 0)}
    assert rows == {"0F0@v0": 0, "0F1@v0": 0, "wait for gradients": 0, "0B0@v0": 0, "0F2@v1": 0, "0U0@v1": 1}
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "stage 0", 1: "stage 1"}


def test_stages_share_one_calendar_and_a_wait_of_no_length_is_none(trace):
    assert played(trace, 0)[0]["ts"] == pytest.approx(0.25e6)
    assert [event["name"] for event in played(trace, 1)] == ["1F0@v0", "1B0@v0", "1F1@v0"]
    assert played(trace, 0)[0]["args"] == {"stage": 0, "microbatch": 0, "version": 0, "action": "0F0@v0"}


def test_every_message_is_an_arrow_between_boxes_that_are_there(trace):
    arrows = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    assert set(arrows) == {"forward 0 from stage 0", "forward 1 from stage 0", "backward 0 from stage 1"}
    for ends in arrows.values():
        for event in ends.values():
            on = [box for box in played(trace, event["pid"]) if box["ts"] <= event["ts"] < box["ts"] + box["dur"]]
            assert on, f"{event} hangs in the air"


def test_a_window_is_cut_at_its_edges_and_a_background_update_is_a_moment(trace):
    timeline = measured_timeline(trace, Window(start=4.75, seconds=3.5))
    boxes = {str(box.action): (box.start, box.end) for box in timeline.boxes}
    assert boxes["0B0@v0"] == pytest.approx((0.0, 1500.0))
    assert boxes["0U0@v1"] == pytest.approx((3000.0, 3000.0))
    assert boxes["0F2@v1"] == pytest.approx((1500.0, 2500.0))
    assert all(box.action.op is not Op.EVALUATE for box in timeline.boxes)


def test_the_steady_window_ends_with_the_last_forward_of_the_last_stage(trace):
    window = steady_window(trace)
    assert (window.start, window.seconds) == pytest.approx((1.5, 2.0))


def test_the_command_draws_a_window(trace, tmp_path, capsys):
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert run(["timeline", str(tmp_path), "--output", str(tmp_path / "new" / "window.svg")]) == 0
    assert "1B0@v0" in (tmp_path / "new" / "window.svg").read_text()
    assert run(["timeline", str(tmp_path), "--start", "0", "--seconds", "1", "--output", f"{tmp_path}/w.png"]) == 0
    assert (tmp_path / "w.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--start", "50"], "nothing was played in the window of 2 s from 50 s: the trace holds 0.250 s to 7.750 s"),
        (["--seconds", "0"], "seconds = 0 shows nothing: use more than 0"),
        (["--output", "w.pdf"], "output = 'w.pdf' cannot be drawn: end its name in .svg or .png"),
    ],
)
def test_a_mistake_is_one_sentence(trace, tmp_path, capsys, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert run(["timeline", ".", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"slipstream: {sentence.split(' of 2 s')[0]}") and said.count("\n") == 1


@pytest.mark.parametrize("content", [None, "no json", '{"traceEvents": []}', "[]"])
def test_a_folder_without_a_trace_is_one_sentence(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "trace.json").write_text(content)
    assert run(["timeline", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "trace.json" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "key, value", [("ts", "x"), ("dur", float("nan")), ("args", {"action": "9F0@v0"}), ("pid", None)]
)
def test_an_event_that_says_nothing_is_one_sentence(trace, tmp_path, capsys, key, value):
    event = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    if value is None:
        del event[key]
    else:
        event[key] = value
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert run(["timeline", str(tmp_path)]) == 2
    assert "trace.json is no trace that slipstream train wrote: run it again" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "trace.json")
    assert run(["timeline", str(tmp_path)]) == 2
    assert "trace.json cannot be read (it is no plain file): name the folder" in capsys.readouterr().err
