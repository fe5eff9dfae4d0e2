"""What a run says when it goes on otherwise than it began, and what it keeps of how it began."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import forks
from settings import changed

from slipstream.config.schema import Config
from slipstream.config.toml import load_toml
from slipstream.errors import ConfigError
from slipstream.train.build import read_corpus
from slipstream.train.run_folder import occupied
from slipstream.train.trainer import train


def folder_of(config: Config) -> Path:
    return Path(config.run.folder, config.run.name)


@pytest.fixture
def half(tiny: Config) -> Config:
    """A run that has made six of twelve steps, as far as its learning rate knows."""
    config = changed(tiny, optimizer__horizon_steps=12, checkpoint__keep_last=9)
    train(config)
    return changed(config, train__steps=12, checkpoint__resume=True)


def said(config: Config, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """From the line that names the checkpoint to the one that describes the model."""
    capsys.readouterr()
    train(config)
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if "checkpoint" in line)
    return lines[first : next(i for i, line in enumerate(lines) if "parameters on" in line)]


def test_a_run_that_goes_on_as_it_was_says_no_more_than_that(tiny, capsys):
    config = changed(tiny, checkpoint__every_steps=3, checkpoint__keep_last=9)
    train(config)
    for name in ("step-00000006", "summary.json"):
        (folder_of(config) / ("checkpoints" if "step" in name else "") / name).rename(folder_of(config) / f"old-{name}")
    assert said(changed(config, checkpoint__resume=True), capsys) == ["resuming from the checkpoint of step 3"]
    assert not list(folder_of(config).glob("config.until*"))


def test_every_difference_is_a_line_and_the_earlier_configuration_is_kept(half, text_file, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("another text altogether. " * 900)
    lines = said(changed(half, data__sources=(str(other),), optimizer__learning_rate=0.5), capsys)
    assert lines[1:] == [
        f"data.sources was [{str(text_file)!r}] until step 6, and is [{str(other)!r}] from here on",
        "optimizer.learning_rate was 0.02 until step 6, and is 0.5 from here on",
        "train.steps was 6 until step 6, and is 12 from here on",
        lines[4],
    ]
    assert lines[4].startswith("the corpus is another than until step 6: ")
    assert load_toml(folder_of(half) / "config.until-step-6.toml").train.steps == 6
    assert load_toml(folder_of(half) / "config.toml").train.steps == 12


def test_the_kept_configuration_is_that_of_the_steps_that_were_made(half, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("slipstream.train.trainer.launch_world", lambda *_, **__: (_ for _ in ()).throw(RuntimeError()))
        train(changed(half, optimizer__learning_rate=0.5))
    train(changed(half, optimizer__learning_rate=0.01))
    assert load_toml(folder_of(half) / "config.until-step-6.toml").optimizer.learning_rate == 0.02


def test_a_file_of_the_same_name_with_another_text_is_noticed(half, text_file, capsys):
    content = text_file.read_text()
    try:
        text_file.write_text(content[::-1])
        read_corpus.cache_clear()  # a process reads a corpus once
        assert any("the corpus is another" in line for line in said(half, capsys))
    finally:
        text_file.write_text(content)
        read_corpus.cache_clear()


def test_a_rate_that_jumps_is_told_with_the_remedy_and_the_remedy_helps(tiny, capsys):
    train(tiny)
    longer = changed(tiny, train__steps=12, checkpoint__resume=True)
    lines = said(longer, capsys)
    assert "set optimizer.horizon_steps = 6 to keep to that" in lines[-1] and "0.002 as it was laid out" in lines[-1]
    further = changed(longer, train__steps=14, optimizer__horizon_steps=12)
    assert not any("rate is" in line for line in said(further, capsys))
    rows = [json.loads(line) for line in (folder_of(tiny) / "metrics.jsonl").read_text().splitlines()]
    rates = {row["step"]: row["learning_rates"]["matrices"] for row in rows if "loss" in row}
    assert rates[13] == rates[14] == pytest.approx(0.002)


def test_a_run_without_a_checkpoint_says_that_it_begins(tiny, capsys):
    config = changed(tiny, run__name="typo", checkpoint__resume=True)
    [line] = said(config, capsys)
    assert line == f"{folder_of(config)} has no checkpoint to resume from: starting at step 1"


def test_a_summary_is_of_the_whole_run(half, capsys):
    def summary() -> dict[str, Any]:
        return json.loads((folder_of(half) / "summary.json").read_text())

    first = summary()
    train(half)
    assert (summary()["steps"], summary()["tokens"]) == (12, 2 * first["tokens"])
    assert summary()["since_start"]["tokens"] == first["tokens"]
    assert summary()["seconds"] > summary()["since_start"]["seconds"] + 0.5 * first["seconds"]


def test_a_horizon_bounds_warm_up_and_decay(tiny):
    with pytest.raises(ConfigError, match=r"warmup_steps = 5 does not fit into optimizer.horizon_steps = 4"):
        train(changed(tiny, optimizer__horizon_steps=4, optimizer__warmup_steps=5))
    with pytest.raises(ConfigError, match=r"optimizer.horizon_steps = 0"):
        train(changed(tiny, optimizer__horizon_steps=0))


@forks
def test_a_folder_in_which_another_process_trains_is_refused(tiny):
    train(tiny)
    with occupied(folder_of(tiny)):
        child = os.fork()
        if not child:  # a stage that outlives its parent must not keep the folder
            time.sleep(30)
            os._exit(0)
        for fields in ({"checkpoint__resume": True}, {"run__overwrite": True}):
            with pytest.raises(ConfigError, match="is in use, another process trains in"):
                train(changed(tiny, train__steps=8, **fields))
    try:
        train(changed(tiny, train__steps=8, checkpoint__resume=True))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_whose_configuration_is_lost_goes_on(half):
    (folder_of(half) / "config.toml").unlink()
    train(half)
    assert load_toml(folder_of(half) / "config.toml").train.steps == 12


def test_checkpoints_that_cannot_be_listed_are_one_sentence(half):
    shutil.rmtree(folder_of(half) / "checkpoints")
    (folder_of(half) / "checkpoints").touch()
    with pytest.raises(
        ConfigError, match=r"checkpoints cannot be read \(Not a directory\): make it readable, or choose"
    ):
        train(half)
