"""What all tests share: one thread, a small text, and the smallest run there is."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from slipstream.config.schema import (
    Config,
    DataConfig,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    RunSection,
    TrainSection,
)
from slipstream.observe import summary
from slipstream.pipeline import executor
from slipstream.pipeline.update_step import OVERLAPPING

# Stages are forked from the process that runs the tests, and the fork of a process that has computed with a second
# thread may hang. On ARM, oneDNN starts threads whatever limit it is given.
torch.set_num_threads(1)
torch.backends.mkldnn.enabled = False
# The tests run on CPUs and stand for GPUs, where updates overlap. Tests of the CPU's own way take it back.
OVERLAPPING.add("cpu")
# A run draws no loss.png, which takes a third of the time of such small ones, but in the test of what it leaves behind.
summary.draw_losses = lambda folder: None
# Together they save a sixth of the suite's time: garbage is looked for less often, and a stage in a thread gives way to
# another after half a millisecond instead of five.
gc.set_threshold(50_000)
sys.setswitchinterval(0.0005)
# As `slipstream train` sets it before it imports torch, for the runs that are started from here.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# A shell starts what runs in its background with Ctrl-C ignored, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def updates_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates as they are made on a CPU outside of tests."""
    monkeypatch.setattr(executor, "OVERLAPPING", {"cuda"})


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} plus {i} makes {2 * i}.\n" for i in range(1500)), encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path: Path, text_file: Path) -> Config:
    """Two stages as threads, 13,000 parameters, six steps."""
    return Config(
        model=ModelSection(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=32, sequence_length=16),
        data=DataConfig(sources=(str(text_file),)),
        pipeline=PipelineSection(transport="thread", timeout_seconds=60.0),
        train=TrainSection(steps=6, microbatch_size=2, device="cpu"),
        evaluation=EvaluationSection(every_steps=3, batches=2),
        run=RunSection(folder=str(tmp_path / "runs"), name="tiny"),
    )
