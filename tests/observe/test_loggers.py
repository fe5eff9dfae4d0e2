"""TensorBoard, W&B and trackio get what metrics.jsonl gets."""

import importlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from runs import folder_of
from settings import as_arguments, changed

from slipstream.errors import ConfigError
from slipstream.observe import loggers
from slipstream.observe.loggers import TensorBoard, WeightsAndBiases, logged
from slipstream.train.trainer import train

RECORDER = """
calls = []

def Settings(**fields):
    return fields

def init(**fields):
    calls.append(("init", fields))
    return Run()

class Run:
    def log(self, values, step):
        calls.append(("log", step, values))

    def finish(self):
        calls.append(("finish",))
"""
"""A module that has what wandb and trackio have, and records its calls."""


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    """The modules `wandb` and `trackio`, replaced by modules that record their calls."""
    path = tmp_path / "modules"
    path.mkdir()
    names = ("wandb", "trackio")
    for name in names:
        (path / f"{name}.py").write_text(RECORDER)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(path))
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name)


def rows_of(config):
    return [json.loads(line) for line in (folder_of(config) / "metrics.jsonl").read_text().splitlines()]


def expected(rows):
    """Every number of metrics.jsonl, by step and name."""
    return {(row["step"], name): value for row in rows for name, value in logged(row).items()}


def test_every_number_of_a_row_has_a_name_and_none_is_left_out():
    row = {"step": 3, "time": 1.5, "loss": 2.5, "mfu": None, "skipped": True, "delay": 1}
    row |= {"gradient_norms": {"matrices": 0.5, "rest": None}, "utilisations": [None, 0.75], "note": "text"}
    row |= {"stage_seconds": [{"forward": 1.0}, {"forward": 2.0}], "update_cosines": {}}
    assert logged(row) == {
        "loss/train": 2.5,
        "optimizer/skipped": 1,
        "prediction/delay": 1,
        "optimizer/gradient_norms/matrices": 0.5,
        "stages/utilisations/1": 0.75,
        "stage_seconds/0/forward": 1.0,
        "stage_seconds/1/forward": 2.0,
    }


# ---- TensorBoard


def events_of(folder: Path) -> list:
    """Reads the event files in the order of their names, as TensorBoard does. A record is a length, its checksum, an
    event and the checksum of that."""
    event_type = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    events = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(event_type.FromString(data[at + 12 : at + 12 + length]))
            at += length + 16
    return events


def scalars(events: list) -> dict:
    """The values that TensorBoard shows: the start of a session hides what was written before for its step and later
    ones."""
    shown = {}
    for event in events:
        if event.HasField("session_log"):
            shown = {key: value for key, value in shown.items() if key[0] < event.step}
        for value in event.summary.value:
            assert (event.step, value.tag) not in shown or "validation" in value.tag
            shown[event.step, value.tag] = (value.simple_value, event.wall_time)
    return shown


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def test_loggers_get_every_number_of_metrics_jsonl_and_the_configuration(recorders, tiny):
    pytest.importorskip("tensorboardX")
    train(changed(tiny, run__sinks=("tensorboard", "wandb", "trackio")))
    rows, shown = rows_of(tiny), scalars(events_of(folder_of(tiny) / "tensorboard"))
    assert {key: value for key, (value, _) in shown.items()} == {
        key: float32(value) for key, value in expected(rows).items()
    }
    assert {(step, time) for (step, _), (_, time) in shown.items()} == {(row["step"], row["time"]) for row in rows}
    for recorder in recorders.values():
        (_, fields), *logs, last = recorder.calls
        assert last == ("finish",) and fields["project"] == "slipstream"
        assert fields["config"]["train"]["steps"] == 6 and fields["config"]["model"]["dim"] == 16
        assert [step for _, step, _ in logs] == sorted(step for _, step, _ in logs)
        values = {(step, name): value for _, step, values in logs for name, value in values.items()}
        assert values == expected(rows)
    # There are few groups, and the losses come first.
    names = {name for _, name in shown}
    groups = ["loss", "optimizer", "prediction", "speed", "stage_seconds", "stages"]
    assert sorted({name.split("/")[0] for name in names}) == groups
    assert {name for name in names if name.startswith("loss/")} == {
        "loss/train",
        "loss/validation",
        "loss/validation_bits_per_byte",
    }
    assert {"optimizer/gradient_norms/matrices", "stage_seconds/1/forward"} <= names


def test_a_resumed_run_continues_in_the_same_tensorboard(tiny):
    pytest.importorskip("tensorboardX")
    config = changed(tiny, run__sinks=("tensorboard",), optimizer__horizon_steps=6)
    train(changed(config, train__steps=3))
    lost = TensorBoard(folder_of(tiny), {})  # a step after the checkpoint, of a run that was killed
    lost.write({"step": 4, "time": 0.5, "loss": 99.0, "lost": 1.0})
    lost.close()
    train(changed(config, checkpoint__resume=True))
    shown = scalars(events_of(folder_of(tiny) / "tensorboard"))
    assert {key: value for key, (value, _) in shown.items()} == {
        key: float32(value) for key, value in expected(rows_of(tiny)).items()
    }
    assert {step for step, name in shown if name == "loss/train"} == {1, 2, 3, 4, 5, 6}


@pytest.mark.filterwarnings("default")  # of TensorBoard's own libraries
@pytest.mark.parametrize("library", ["tensorboardX", "torch"])
def test_tensorboard_itself_hides_the_steps_that_are_made_again(library, tmp_path, monkeypatch):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    if library == "torch":
        monkeypatch.setitem(sys.modules, "tensorboardX", None)
    else:
        pytest.importorskip("tensorboardX")
    for losses in ({1: 1.0, 2: 2.0, 3: 99.0, 4: 99.0}, {3: 3.0, 4: 4.0}):
        sink = TensorBoard(tmp_path, {})
        if min(losses) == 3:
            sink.write({"step": 2, "time": 0.5, "val_loss": 2.5})
        for step, loss in losses.items():
            sink.write({"step": step, "time": 0.5, "loss": loss})
        sink.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss/train")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.0),
    ]
    assert [(event.step, event.value) for event in found.Scalars("loss/validation")] == [(2, 2.5)]


# ---- W&B and trackio


def test_wandb_gets_samples_as_a_table(recorders, tmp_path):
    recorder = recorders["wandb"]
    recorder.Table = lambda columns, rows: (columns, rows)
    samples = [{"prompt": "a", "text": "b"}, {"prompt": "c", "text": "d"}]
    WeightsAndBiases(tmp_path, {}).write({"step": 2, "time": 0.5, "val_loss": 1.5, "samples": samples})
    table = (["prompt", "text"], [["a", "b"], ["c", "d"]])
    assert recorder.calls[-1] == ("log", 2, {"loss/validation": 1.5, "samples": table})


def test_a_resumed_run_continues_under_the_same_name_and_an_overwritten_one_does_not(recorders, tiny):
    config = changed(tiny, run__sinks=("wandb", "trackio"), train__steps=2)
    train(config)
    train(changed(config, train__steps=3, checkpoint__resume=True))
    train(changed(config, run__overwrite=True))
    for name, key in (("wandb", "id"), ("trackio", "name")):
        calls = recorders[name].calls
        first, resumed, overwritten = [call[1][key] for call in calls if call[0] == "init"]
        assert first == resumed != overwritten
        assert [call[1] for call in calls if call[0] == "log" and "loss/train" in call[2]] == [1, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("variables", "login", "mode"),
    [
        ({}, "", "offline"),
        ({}, "machine api.wandb.ai login user password secret\n", "online"),
        ({"WANDB_BASE_URL": "https://own.example"}, "machine api.wandb.ai login user password secret\n", "offline"),
        ({"WANDB_API_KEY": "secret"}, "", "online"),
        ({"WANDB_API_KEY": "secret", "WANDB_MODE": "offline"}, "", "offline"),
        ({"WANDB_MODE": "disabled"}, "", "disabled"),
        ({}, "no netrc file", "offline"),
    ],
)
def test_wandb_is_offline_unless_there_is_a_key(recorders, variables, login, mode, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text(login)
    (tmp_path / "netrc").chmod(0o600)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    WeightsAndBiases(tmp_path, {})
    fields = recorders["wandb"].calls[0][1]
    assert (fields["mode"], fields["resume"]) == (mode, "allow")
    assert fields["dir"] == str(tmp_path)


def test_wandb_itself_logs_offline_into_the_folder_of_the_run(tiny, capfd):
    pytest.importorskip("wandb")
    config = changed(tiny, run__sinks=("wandb",), train__steps=2)
    train(config)
    ended = expected(rows_of(tiny))  # with an evaluation at the end, which a run of three steps does not make there
    train(changed(config, train__steps=3, checkpoint__resume=True))
    name = (folder_of(tiny) / "logger_id.txt").read_text()
    files = sorted((folder_of(tiny) / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert "left out" not in capfd.readouterr().out
    logged_values = [(step, name, value) for file in files for step, name, value in read_wandb(file)]
    assert len(files) == 2 and {step for step, _, _ in logged_values} == {1, 2, 3}
    assert {(step, name): value for step, name, value in logged_values} == ended | expected(rows_of(tiny))


def read_wandb(path):
    """Yields (step, name, value) of all rows of an offline file, for which W&B has no reader. It is a log of LevelDB:
    after seven bytes of its own, blocks of 32 KiB with parts of records, each after a checksum, a length and a type."""
    from wandb.proto import wandb_internal_pb2

    content, place, data = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # too little for another part
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            data = b""
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                yield int(values["_step"]), name, json.loads(values[name])


def test_trackio_itself_has_one_run_also_after_a_resume(tiny, tmp_path):
    pytest.importorskip("trackio")
    first = ["train", *as_arguments(changed(tiny, run__sinks=("trackio",), train__steps=2))]
    resumed = [*first, "--train.steps", "3", "--checkpoint.resume"]
    program = f"""
import trackio
from slipstream.cli import run
assert run({first!r}) == run({resumed!r}) == 0
for found in trackio.Api().runs("slipstream"):
    print("found", found.name, found.config["train"]["microbatch_size"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    name = (folder_of(tiny) / "logger_id.txt").read_text()
    assert [line for line in done.stdout.splitlines() if line.startswith("found")] == [f"found tiny-{name} 2"], done


# ---- libraries


@pytest.mark.parametrize(
    ("name", "library"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_library_is_one_sentence_before_anything_starts(name, library, tiny, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda library: None)
    with pytest.raises(ConfigError) as caught:
        train(changed(tiny, run__sinks=(name,)))
    assert str(caught.value) == f"run.sinks = {name!r} needs {library}: pip install 'slipstream[log]'"
    assert not Path(tiny.run.folder).exists()


def test_a_folder_of_a_librarys_name_is_no_library(tiny, tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="needs wandb"):
        loggers.check_library("wandb")
