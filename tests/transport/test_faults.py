"""A stage that fails, dies or falls silent must not leave the others waiting, nor leave anyone guessing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TIMEOUT_SECONDS, forks, network, run_pipeline, run_reference
from torch import Tensor, nn
from torch.distributed import PrefixStore

from slipstream import Group, Pipeline, launch
from slipstream.errors import NonFiniteError, StageFailure
from slipstream.transport.base import Transport
from slipstream.transport.failures import read_failure
from slipstream.transport.torchrun import meet

SGD = [Group("all", partial(torch.optim.SGD, lr=0.01))]
AWAITED = r"stage \d was waiting for (the gradient of \dB\d+@v\d+|the activations of \dF\d+@v\d+|the sums over stages)"


class Trap(nn.Module):
    """Does something terrible in its n-th forward."""

    def __init__(self, spring: str, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.spring, self.left = spring, after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            if self.spring == "raise":
                raise ValueError("boom")
            if self.spring == "exit":
                sys.exit(0)
            os.kill(os.getpid(), signal.SIGKILL if self.spring == "kill" else signal.SIGSTOP)
        return x * self.weight


def run_with_trap(
    spring: str, stage: int, timeout_seconds: float, threads: bool = False, shared_memory: bool = True
) -> None:
    def worker(transport: Transport) -> None:
        layers = [Trap("none", 10**9) if s != stage else Trap(spring, after=9) for s in range(3)]
        pipeline = Pipeline(
            transport,
            layers,
            data=lambda step, microbatch: (torch.ones(2, 3), torch.zeros(2, 3)),
            loss=nn.functional.mse_loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            num_microbatches=3,
            num_steps=50,
        )
        list(pipeline.run())

    launch(
        worker,
        3,
        threads=threads,
        timeout_seconds=timeout_seconds,
        shared_memory=shared_memory,
        start_method="fork",
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_a_stage_that_raises_is_named_with_its_action(stage, threads):
    started = time.monotonic()
    with pytest.raises(StageFailure, match=rf"stage {stage} failed at {stage}F\d+@v\d+ with ValueError: boom"):
        run_with_trap("raise", stage, timeout_seconds=120, threads=threads)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_a_model_that_exits_is_named_with_its_action_and_its_line(threads):
    where = r"stage 1 failed at 1F\d+@v\d+ with SystemExit: 0, at test_faults.py:\d+ in forward"
    with pytest.raises(StageFailure, match=where):
        run_with_trap("exit", 1, timeout_seconds=120, threads=threads)


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_a_worker_that_exits_before_its_pipeline_is_named_with_its_line(threads):
    def worker(transport: Transport) -> None:
        if transport.stage == 1:
            sys.exit("no such model")

    with pytest.raises(StageFailure, match=r"stage 1 failed with SystemExit: no such model, at test_faults.py:\d+"):
        launch(worker, 2, threads=threads, timeout_seconds=120, start_method="fork")


@forks
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_is_killed_is_named_with_what_was_awaited(stage, shared_memory):
    started = time.monotonic()
    with pytest.raises(StageFailure, match=rf"stage {stage} was killed by SIGKILL; .*{AWAITED}"):
        run_with_trap("kill", stage, timeout_seconds=120, shared_memory=shared_memory)
    assert time.monotonic() - started < 60


@forks
@pytest.mark.filterwarnings("ignore")
def test_a_stage_that_is_stopped_is_found_within_the_time_out():
    started = time.monotonic()
    with pytest.raises(StageFailure, match=rf"has been silent for 3 s: {AWAITED}"):
        run_with_trap("stop", 1, timeout_seconds=3)
    assert time.monotonic() - started < 3 + 60


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_a_nan_stops_every_stage_in_the_same_step(threads):
    task = network()

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        inputs, targets = task.data(step, microbatch)
        return inputs * (float("inf") if (step, microbatch) == (4, 1) else 1.0), targets

    def worker(transport: Transport) -> str:
        torch.manual_seed(0)
        pipeline = Pipeline(
            transport,
            [
                nn.Linear(6, 6, dtype=torch.float64),
                nn.Linear(6, 6, dtype=torch.float64),
                nn.Linear(6, 3, dtype=torch.float64),
            ],
            data=data,
            loss=nn.functional.mse_loss,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            num_microbatches=3,
            num_steps=9,
        )
        with pytest.raises(NonFiniteError) as caught:
            list(pipeline.run())
        return str(caught.value)

    messages = launch(worker, 3, threads=threads, timeout_seconds=TIMEOUT_SECONDS, start_method="fork")
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 5 stops the run: the ")


def test_a_skipped_update_follows_the_oracle():
    task = network()

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        inputs, targets = task.data(step, microbatch)
        return inputs * (float("nan") if (step, microbatch) in ((4, 1), (7, 0)) else 1.0), targets

    poisoned = type(task)(task.model, data, task.loss)
    groups = [Group("all", partial(torch.optim.SGD, lr=0.05, momentum=0.9), error_feedback=1.0, clip_norm=0.1)]
    shared = {"num_microbatches": 3, "num_steps": 12, "skip_non_finite": True}
    expected, _ = run_reference(poisoned, groups, delays=[1], **shared)
    outcome = run_pipeline(poisoned, 3, groups, **shared)
    for name, weight in outcome.weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)
    for reports in outcome.reports:
        assert [report.step for report in reports if report.skipped] == [4, 7]


@forks
def test_a_microbatch_of_another_shape_is_refused_between_processes():
    task = network()

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        inputs, targets = task.data(step, microbatch)
        rows = 3 if (step, microbatch) == (2, 1) else 4
        return inputs[:rows], targets[:rows]

    odd = type(task)(task.model, data, task.loss)
    with pytest.raises(StageFailure, match="make all microbatches the same size"):
        run_pipeline(odd, 2, SGD, threads=False, num_microbatches=2, num_steps=5)


@forks
def test_stages_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\n"
        "from slipstream import launch\n"
        "def worker(transport):\n"
        f"    open(r'{tmp_path}/' + str(os.getpid()), 'w').close()\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    launch(worker, 2, start_method='fork')\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)])
    deadline = time.monotonic() + 120
    while len(pids := [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _leave_at_once(*_: object) -> None:
    os._exit(3)


@forks
def test_a_stage_that_is_gone_before_it_is_told_anything_is_named(monkeypatch):
    store = torch.distributed.TCPStore

    def late(*args: object, **kwargs: object) -> torch.distributed.TCPStore:
        time.sleep(0.5)  # all stages have left by then
        return store(*args, **kwargs)

    monkeypatch.setattr(sys.modules["slipstream.transport.stage_processes"], "_process_main", _leave_at_once)
    monkeypatch.setattr("torch.distributed.TCPStore", late)
    with pytest.raises(StageFailure, match=r"stage \d left without a word \(exit code 3\)"):
        launch(lambda transport: None, 2, start_method="fork")


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_more_stages_than_a_machine_can_start_are_refused_in_a_sentence(threads, monkeypatch):
    kind = threading.Thread if threads else ForkProcess
    start = kind.start

    def refuse(self: Any) -> None:
        if self.name == "stage 2":
            raise RuntimeError("can't start new thread") if threads else OSError("Resource temporarily unavailable")
        start(self)

    monkeypatch.setattr(kind, "start", refuse)
    with pytest.raises(StageFailure, match=r"no room for 3 stages, .*: stage 2 could not be started \(.*\); use fewer"):
        launch(lambda transport: pytest.fail("it began"), 3, threads=threads, start_method="fork")


def test_processes_that_torchrun_starts_again_do_not_take_the_word_of_those_before():
    store = torch.distributed.HashStore()
    words: list[set[str]] = []
    for _ in range(3):
        store.set("meeting/1", "of a process that was killed before it was answered")
        with ThreadPoolExecutor(3) as pool:
            words.append(set(pool.map(lambda rank: meet(store, rank, 3, timeout_seconds=TIMEOUT_SECONDS), (0, 1, 2))))
    assert [len(word) for word in words] == [1, 1, 1] and len(set.union(*words)) == 3


def test_a_rank_that_does_not_come_is_named_by_all_that_came(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    store = torch.distributed.HashStore()

    def come() -> str:
        own_store = PrefixStore(meet(store, 1, 4, TIMEOUT_SECONDS), store)
        while (failure := read_failure(PrefixStore("slipstream", own_store))) is None:
            time.sleep(0.01)
        own_store.set("left/1", "")
        return failure

    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(come)
        with pytest.raises(StageFailure) as caught:
            meet(store, 0, 4, timeout_seconds=0.5)
        assert said.result() == str(caught.value)
    assert str(caught.value) == (
        "ranks 2, 3 did not come to MASTER_ADDR:MASTER_PORT = 10.0.0.1:29500 within 0.5 s: start all 4 ranks with this "
        "address, or correct WORLD_SIZE"
    )


def fail_in_a_layer(transport: Transport) -> None:
    def forward(x: Tensor) -> Tensor:
        raise RuntimeError("no")

    layer = nn.Linear(2, 2)
    layer.forward = forward
    layer(torch.ones(1, 2))


def test_a_failure_says_where_in_the_users_code_it_happened_and_carries_the_traceback_on():
    with pytest.raises(StageFailure, match=r"with RuntimeError: no, at test_faults.py:\d+ in forward") as caught:
        launch(fail_in_a_layer, 1, start_method="fork")
    assert 'raise RuntimeError("no")' in "".join(caught.value.__notes__)
