"""A run that saves itself and goes on: from its configuration, in processes, and in another shape."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import forks
from runs import folder_of, rows_of, summary_of
from settings import changed

from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.pipeline.checkpoints import StageWriter
from slipstream.train.checkpointing import SIGNALS, SignalRequests
from slipstream.train.trainer import train


def steps_of(config: Config) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (folder_of(config) / "checkpoints").iterdir())


@pytest.fixture
def base(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Its disk is never too slow: a checkpoint that is due while the one before is still being written is left out."""
    save = StageWriter.save

    def save_and_wait(writer: StageWriter, step: int) -> None:
        save(writer, step)
        writer.wait()

    monkeypatch.setattr(StageWriter, "save", save_and_wait)
    return changed(tiny, train__steps=12, evaluation__every_steps=5, checkpoint__keep_last=20)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `whole` is kept once it is trained."""
    return tmp_path_factory.mktemp("trained") / "whole"


@pytest.fixture
def whole(base: Config, trained: Path) -> Config:
    """A run with a checkpoint after every third step."""
    config = changed(base, run__name="whole", checkpoint__every_steps=3)
    if trained.exists():
        shutil.copytree(trained, folder_of(config))
    else:
        train(config)
        shutil.copytree(folder_of(config), trained)
    return config


def cut_after(whole: Config, step: int, **fields: Any) -> Config:
    """A run that knows the whole one's checkpoints up to a step, and all of its metrics."""
    config = changed(whole, run__name=f"cut{step}", checkpoint__resume=True, **fields)
    shutil.copytree(folder_of(whole), folder_of(config))
    (folder_of(config) / "summary.json").unlink()
    for path in (folder_of(config) / "checkpoints").iterdir():
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    return config


@pytest.mark.parametrize("step", [3, 9])
@pytest.mark.parametrize("transport", ["thread", pytest.param("process", marks=forks)])
def test_a_run_goes_on_in_the_same_bits_and_says_nothing_twice(whole, step, transport):
    assert steps_of(whole) == [3, 6, 9, 12]
    config = cut_after(whole, step, pipeline__transport=transport)
    train(config)
    assert summary_of(config)["parameter_checksum"] == summary_of(whole)["parameter_checksum"]
    assert summary_of(config)["resumed_at"] == step
    assert summary_of(config)["first_loss"] == summary_of(whole)["first_loss"]
    assert rows_of(config) == rows_of(whole)
    assert steps_of(config) == [3, 6, 9, 12]


@pytest.mark.parametrize("fields", [
    {"pipeline__stages": 1},
    {"pipeline__stages": 3, "pipeline__microbatches": 4, "pipeline__layers_per_stage": (1, 2, 1)},
    {"pipeline__replicas": 2, "pipeline__microbatches": 2},
    {"pipeline__replicas": 2, "pipeline__microbatches": 2, "optimizer__sharded": True},
], ids=str)  # fmt: skip
def test_a_run_goes_on_in_another_shape(base, fields):
    own = changed(base, run__name="whole", checkpoint__every_steps=4, train__dtype="float64")
    train(own)
    config = cut_after(own, 4, **fields)
    train(config)
    assert [row["step"] for row in rows_of(config)] == [row["step"] for row in rows_of(own)]
    for ours, theirs in zip(rows_of(config), rows_of(own), strict=True):
        for key in ("loss", "val_loss"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-10)


def test_a_synchronous_run_goes_on_asynchronously_and_back(base):
    """As one that had a synchronous start; the way back has no such twin, but it has to be walked."""
    sync = changed(base, run__name="sync", checkpoint__every_steps=4, pipeline__schedule="one_f_one_b")
    train(sync)
    config = cut_after(sync, 4, pipeline__schedule="two_bw")
    train(config)
    expected = changed(base, run__name="expected", pipeline__sync_start_steps=4)
    train(expected)
    assert summary_of(config)["parameter_checksum"] == summary_of(expected)["parameter_checksum"]
    back = cut_after(config, 8, pipeline__schedule="one_f_one_b")
    train(back)
    assert summary_of(back)["steps"] == 12


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(whole):
    config = cut_after(whole, 9)
    rows = rows_of(config)
    for part in (folder_of(config) / "checkpoints").glob("*/stage-1.safetensors"):
        part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"no other checkpoint is whole: start anew with --run\.overwrite"):
        train(config)
    assert rows_of(config) == rows


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(whole, capsys):
    config = cut_after(whole, 9)
    part = folder_of(config) / "checkpoints" / "step-00000009" / "stage-1.safetensors"
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    train(config)
    said = capsys.readouterr().out
    assert "step-00000009" in said and "the checkpoint before it is taken" in said and "step 6" in said
    assert summary_of(config)["resumed_at"] == 6
    assert summary_of(config)["parameter_checksum"] == summary_of(whole)["parameter_checksum"]


def test_where_there_is_no_checkpoint_a_run_begins(base, capsys):
    config = changed(base, run__name="new", checkpoint__resume=True)
    train(config)
    assert summary_of(config)["resumed_at"] is None
    train(config)  # and there is nothing left to do
    assert "has made its 12 steps: raise train.steps to continue" in capsys.readouterr().out
    longer = changed(config, train__steps=14)
    train(longer)
    assert summary_of(longer)["resumed_at"] == 12 and summary_of(longer)["steps"] == 14


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"train__microbatch_size": 4}, r"step 12 was made with sequences per step 8, and this configuration comes to 16"),
    ({"train__seed": 5}, r"was made with seed 0, and this configuration comes to 5"),
    ({"train__dtype": "float64"}, r"was made with train.dtype = 'float32', and this configuration has 'float64'"),
    ({"train__steps": 11}, r"train.steps = 11 is less than the 12 steps that are made already"),
    ({"model__num_layers": 3}, r"configured model: (block2\S+ is missing; ){4}and 5 more: make model and optimizer wh"),
    ({"model__num_layers": 1}, r"does not fit the configured model: .*block1"),
    ({"model__hidden_dim": 24}, r"does not fit the configured model: .*block0.mlp.\S+ is \(.*32.*\), not \(.*24.*\)"),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_starts(whole, fields, sentence):
    config = changed(whole, checkpoint__resume=True, **fields)
    before = (folder_of(whole) / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=sentence):
        train(config)
    assert (folder_of(whole) / "metrics.jsonl").read_bytes() == before


def test_checkpoints_are_kept_by_rule(base):
    config = changed(
        base, run__name="kept", checkpoint__every_steps=1, checkpoint__keep_last=2, checkpoint__keep_every=5
    )
    train(config)
    # One that comes while another is being written is left out, so it depends on the disk which were the last two.
    kept = steps_of(config)
    assert kept[-1] == 12 and all(step % 5 == 0 for step in kept[:-2]), kept
    nothing = changed(base, run__name="nothing", checkpoint__at_end=False)
    train(nothing)
    assert not (folder_of(nothing) / "checkpoints").exists()


def tell_after_five_steps(config: Config, number: signal.Signals) -> None:
    def tell() -> None:
        metrics = folder_of(config) / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=tell, daemon=True).start()


@forks
def test_a_run_that_is_told_to_stop_saves_itself_and_leaves_with_success(base):
    endless = changed(base, run__name="told", pipeline__transport="process", train__steps=400, evaluation__batches=0)
    tell_after_five_steps(endless, signal.SIGTERM)
    train(endless)
    stopped = summary_of(endless)["steps"]
    assert 5 <= stopped < 400 and steps_of(endless) == [stopped]  # one signal, one checkpoint
    rest = changed(endless, train__steps=stopped + 6, checkpoint__resume=True, optimizer__schedule="constant")
    train(rest)
    assert summary_of(rest)["resumed_at"] == stopped and summary_of(rest)["steps"] == stopped + 6


@forks
def test_a_signal_to_save_reaches_every_stage_and_makes_one_checkpoint(base):
    told = changed(base, run__name="told", pipeline__transport="process", train__steps=60, evaluation__batches=0)
    tell_after_five_steps(told, signal.SIGUSR1)
    train(told)
    assert len(steps_of(told)) == 2 and steps_of(told)[-1] == 60, steps_of(told)


def test_wishes_come_from_signals_and_from_the_clock():
    before = [signal.getsignal(number) for number in SIGNALS]
    signals = SignalRequests(every_minutes=0.0)
    try:
        assert not any(signals())
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals()[:2] == (True, False)
        assert signals()[:2] == (False, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals()[:2] == (False, True)
        assert signals()[:2] == (False, True)
    finally:
        signals.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    often = SignalRequests(every_minutes=1e-9)
    time.sleep(0.001)
    assert often()[:2] == (True, False)
    often.close()


def test_signals_mean_after_a_run_what_they_meant_before(base):
    before = [signal.getsignal(number) for number in SIGNALS]
    train(changed(base, train__steps=1))
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nothing_of_a_checkpoint_is_code(whole):
    """JSON and plain numbers: what a reader of pickles would call is not called."""
    config = cut_after(whole, 9)
    part = folder_of(config) / "checkpoints" / "step-00000009" / "stage-0.safetensors"
    torch.save({"hostile": asdict(config)}, part)
    train(config)
    assert summary_of(config)["resumed_at"] == 6
