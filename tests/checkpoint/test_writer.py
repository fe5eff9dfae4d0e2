"""Training goes on while checkpoints are written, and whatever becomes of them."""

import os
import re
import threading
import time
from pathlib import Path

import pytest
from checkpoint_samples import interrupt, make_part, mark_of, no_damage, write_all

from slipstream.checkpoint import Store, Writer


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def test_a_part_is_made_and_written_in_the_background(store, said):
    writer = Writer(store, 1, said.append)
    assert writer.last_written is None and writer.last_committed is None
    ready, makers = threading.Event(), []

    def make():
        makers.append(threading.current_thread())
        assert ready.wait(10)
        return make_part("only", 4)

    assert writer.submit(10, make)
    assert store.steps() == []
    ready.set()
    writer.wait()
    assert makers != [threading.current_thread()]
    assert mark_of(store.open(10), ("only",)) == 4
    written = writer.last_written
    assert written.step == writer.last_committed == 10
    assert 0 < written.seconds < 10 and written.num_bytes == store.needed_bytes(make_part("only", 4))
    [line] = said
    assert re.fullmatch(r"saved step 10 in \d\.\d s", line)


def test_a_step_is_left_out_while_the_one_before_is_being_written_and_that_is_said_once(store, said):
    writer = Writer(store, 1, said.append)
    ready = threading.Event()

    def make_late():
        assert ready.wait(10)
        return make_part("only", 1)

    assert writer.submit(1, make_late)
    assert not writer.submit(2, no_damage) and not writer.submit(3, no_damage)
    writer.wait(timeout=0.01)
    assert not writer.submit(4, no_damage)
    ready.set()
    writer.wait()
    assert writer.submit(5, lambda: make_part("only", 5))
    writer.close()
    assert store.steps() == [1, 5] and writer.num_left_out == 3
    assert len([line for line in said if not line.startswith("saved step")]) == 1
    assert said[0].startswith("step 2 has no checkpoint, for that of step 1 has been under way for 0.")
    assert "the disk is slower than checkpoints are asked for, save less often" in said[0]


def test_the_last_committed_waits_for_the_others(store, said):
    writer = Writer(store, 2, said.append)
    for step in (1, 2):
        writer.submit(step, lambda step=step: make_part("stage-0", step))
        writer.wait()
        if step == 1:
            store.write(1, make_part("stage-1", 1), 2)
    assert writer.last_written.step == 2 and writer.last_committed == 1
    store.folder.rename(store.folder.with_name("elsewhere"))
    store.folder.touch()
    assert writer.last_committed is None


def test_a_full_disk_is_said_and_training_goes_on(store, said, monkeypatch):
    def no_space() -> None:
        raise OSError(28, "No space left on device")

    write_all(store, 1, 1, ("only",))
    writer = Writer(store, 1, said.append)
    with monkeypatch.context() as patch:
        interrupt(lambda name, function: patch.setattr(os, name, function), 3, no_space)
        assert writer.submit(2, lambda: make_part("only", 2))
        writer.wait()
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("step 2 has no checkpoint: ")
    assert said[0].endswith(".partial cannot be written (No space left on device)")
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]
    assert writer.last_written is None
    assert writer.submit(3, lambda: make_part("only", 3))
    writer.close()
    assert store.steps() == [1, 3] and mark_of(store.newest(no_damage), ("only",)) == 3


def test_a_part_that_cannot_be_made_is_said(store, said):
    def make():
        raise RuntimeError("the device\nis gone")

    writer = Writer(store, 1, said.append)
    assert writer.submit(1, make)
    writer.close()
    assert said == ["step 1 has no checkpoint: RuntimeError: the device is gone"]
    assert store.steps() == []


def test_waiting_for_nothing_returns_and_a_closed_writer_takes_nothing(store, said):
    writer = Writer(store, 1, said.append)
    began = time.perf_counter()
    writer.wait()
    writer.close()
    writer.close()
    assert time.perf_counter() - began < 20
    with pytest.raises(RuntimeError, match="this writer is closed"):
        writer.submit(1, no_damage)
