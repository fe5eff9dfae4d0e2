"""A window of torch's profiler."""

import json

from runs import folder_of, summary_of
from settings import changed

from slipstream.observe.torch_profile import TorchProfile
from slipstream.train.trainer import train


def names_in(path):
    return [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]


def test_every_stage_writes_a_trace_of_the_chosen_steps_and_computes_the_same(tiny):
    config = changed(tiny, evaluation__batches=0, train__steps=8)
    train(config)
    assert not (folder_of(config) / "profile").exists()
    profiled = changed(config, pipeline__transport="process", run__name="profiled", run__profile_steps="3:5")
    train(profiled)
    folder = folder_of(profiled) / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["stage-0.replica-0.json", "stage-1.replica-0.json"]
    num_microbatches = names_in(folder / "stage-0.replica-0.json").count("aten::embedding")
    assert abs(num_microbatches - 3 * 4) <= 4  # of 8 x 4 in the whole run
    assert "aten::mm" in names_in(folder / "stage-1.replica-0.json")
    assert summary_of(profiled)["parameter_checksum"] == summary_of(config)["parameter_checksum"]


def test_a_run_that_resumes_within_the_steps_records_the_rest_of_them(tmp_path):
    profile = TorchProfile(tmp_path / "profile" / "stage.json", (1, 4), print)
    profile.after(3)
    assert not (tmp_path / "profile").exists()
    profile.after(4)
    assert (tmp_path / "profile" / "stage.json").exists()
    profile.after(5)


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path):
    said = []
    (tmp_path / "profile").write_text("in the way")
    profile = TorchProfile(tmp_path / "profile" / "stage.json", (1, 1), said.append)
    profile.after(0)
    profile.close()
    assert len(said) == 1 and "stage.json cannot be written" in said[0] and "\n" not in said[0]
