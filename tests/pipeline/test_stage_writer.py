"""Training goes on while checkpoints are written, and whatever becomes of them."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_samples import interrupt

from slipstream.checkpoint import Store
from slipstream.checkpoint.stage_state import StageState
from slipstream.pipeline.checkpoints import StageWriter


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def writer_of(store: Store, said: list[str], take: Callable[[], Any]) -> StageWriter:
    """Of a pipeline of one stage, whose snapshots `take` returns."""
    transport = SimpleNamespace(stage=0, replica=0, num_stages=1, num_replicas=1)
    pipeline: Any = SimpleNamespace(transport=transport, is_sharded=False, snapshot=lambda into: take)
    return StageWriter(pipeline, store, said.append, {"run": "mine"})


def state(mark: int) -> StageState:
    return StageState(mark, {"master/w": torch.full((3,), float(mark))})


def test_a_part_is_taken_and_written_in_the_background(store, said):
    ready, takers = threading.Event(), []

    def take() -> StageState:
        takers.append(threading.current_thread())
        assert ready.wait(10)
        return state(4)

    writer = writer_of(store, said, take)
    assert writer.latest is None and not writer.is_busy
    writer.save(10)
    assert writer.latest == 10 and writer.is_busy and store.steps() == []
    ready.set()
    writer.wait()
    assert takers != [threading.current_thread()] and not writer.has_failed
    found = store.open(10)
    assert found.read(["master/w"])["master/w"].tolist() == [4.0] * 3
    assert found.facts == {"stage-0": {"run": "mine", "state": {}}}
    [line] = said
    assert re.fullmatch(r"saved step 10 in \d\.\d s", line)


def test_a_step_is_left_out_while_the_one_before_is_being_written_and_that_is_said_once(store, said):
    ready = threading.Event()

    def take_late() -> StageState:
        assert ready.wait(10)
        return state(1)

    writer = writer_of(store, said, take_late)
    for step in (1, 2, 3, 4):
        writer.save(step)
    assert writer.latest == 1
    ready.set()
    writer.wait()
    writer.save(5)
    writer.wait()
    assert store.steps() == [1, 5]
    assert len([line for line in said if not line.startswith("saved step")]) == 1
    assert said[0].startswith("step 2 has no checkpoint, for that of step 1 has been under way for 0.")
    assert "the disk is slower than checkpoints are asked for, save less often" in said[0]


def test_a_full_disk_is_said_and_training_goes_on(store, said, monkeypatch):
    def no_space() -> None:
        raise OSError(28, "No space left on device")

    writer = writer_of(store, said, lambda: state(1))
    writer.save(1)
    writer.wait()
    said.clear()
    with monkeypatch.context() as patch:
        interrupt(lambda name, function: patch.setattr(os, name, function), 3, no_space)
        writer.save(2)
        writer.wait()
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("step 2 has no checkpoint: ")
    assert said[0].endswith(".partial/stage-0.safetensors cannot be written (No space left on device)")
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]
    assert writer.latest == 2 and writer.has_failed
    writer.save(3)
    writer.wait()
    assert store.steps() == [1, 3] and not writer.has_failed


def test_a_state_that_cannot_be_taken_is_said(store, said):
    def take() -> StageState:
        raise RuntimeError("the device\nis gone")

    writer = writer_of(store, said, take)
    writer.save(1)
    writer.wait()
    assert said == ["step 1 has no checkpoint: RuntimeError: the device is gone"]
    assert writer.has_failed and store.steps() == []


def test_waiting_for_nothing_returns(store, said):
    began = time.perf_counter()
    writer_of(store, said, lambda: state(1)).wait()
    assert time.perf_counter() - began < 20
