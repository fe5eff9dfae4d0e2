"""How `slipstream train` ends: a stage that is killed or fails, interrupts, and requests to end."""

import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import forks
from settings import as_arguments, changed

from slipstream import cli
from slipstream.config.schema import Config
from slipstream.transport.stage_processes import INTERRUPTED
from tests.faults.runs import children, is_running, world_by_hand

TIMEOUT_SECONDS = 120.0
"""Of stages that wait for each other. What ends a run ends it well before."""


class Training:
    """`slipstream train` in a process of its own that has torch loaded already."""

    def __init__(self, arguments: list[str], folder: Path, hang_up: signal.Handlers = signal.SIG_DFL) -> None:
        """hang_up: how it is started to take SIGHUP. nohup starts it with SIG_IGN."""
        self._hang_up = hang_up
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        self._process = multiprocessing.get_context("fork").Process(target=self._train, args=(arguments, folder))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _train(self, arguments: list[str], folder: Path) -> None:
        sys.stdout, sys.stderr = self._out.open("w"), self._err.open("w")
        for number, file in enumerate((sys.stdout, sys.stderr), 1):
            os.dup2(file.fileno(), number)
        signal.signal(signal.SIGHUP, self._hang_up)
        sys.path.insert(0, str(folder))
        sys.argv = ["slipstream", "train", *arguments]
        cli.main()

    def wait_for(self, text: str, error: bool = False) -> None:
        path, deadline = self._err if error else self._out, time.monotonic() + TIMEOUT_SECONDS / 2
        while True:
            goes_on = self._process.is_alive() and time.monotonic() < deadline  # before looking: it may say it and end
            if path.exists() and text in path.read_text():
                return
            assert goes_on, self._err.read_text()
            time.sleep(0.02)

    def end(self) -> tuple[int | None, str]:
        """Returns the exit code and the errors, once it has ended by itself."""
        self._process.join(TIMEOUT_SECONDS / 2)
        return self._process.exitcode, self._err.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def running(tiny: Config, *extra: str, hang_up: signal.Handlers = signal.SIG_DFL) -> Iterator[Training]:
    """A run of three stages that would go on for ever, once it is well under way."""
    tiny = changed(tiny, train__steps=10**6, pipeline__transport="process", pipeline__stages=3, evaluation__batches=0)
    tiny = changed(tiny, pipeline__timeout_seconds=TIMEOUT_SECONDS)
    training = Training([*as_arguments(tiny), *extra], Path(tiny.run.folder).parent, hang_up)
    try:
        training.wait_for("\nstep 10/")
        yield training
    finally:
        training.kill()


def ending(training: Training, stages: list[int]) -> tuple[int | None, str]:
    """Exit code and the one line, of a run that ends long before a time-out would end it, and leaves nobody behind."""
    code, said = training.end()
    assert said.startswith("slipstream: ") and said.count("\n") == 1, said
    deadline = time.monotonic() + 30
    while any(map(is_running, stages)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, stages))
    return code, said


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@linux
@forks
def test_a_killed_stage_ends_the_run_with_one_message_that_names_it(tiny):
    with running(tiny) as training:
        stages = sorted(children(training.pid))
        assert len(stages) == 3
        os.kill(stages[1], signal.SIGKILL)
        code, said = ending(training, stages)
    assert code == 1
    assert said.startswith("slipstream: stage 1 was killed by SIGKILL; ")
    assert re.search(r" is gone: stage [02] was waiting for (the|its) \w+", said)


@linux
@forks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_stages_start_is_not_lost(tiny, number):
    config = changed(tiny, train__steps=10**6, pipeline__transport="process", evaluation__batches=0)
    training = Training(as_arguments(config), Path(tiny.run.folder).parent)
    try:
        while not children(training.pid):
            time.sleep(0.0005)
        os.kill(training.pid, number)
        code, said = training.end()
    finally:
        training.kill()
    assert code == (130 if number == signal.SIGINT else 0) and "Traceback" not in said, said


FAULTY = """
import multiprocessing, torch

class Faulty(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 20 and multiprocessing.current_process().name == "stage 1":
            raise RuntimeError("a fault\\nin two lines")
        return super().step(closure)
"""


@linux
@forks
def test_a_stage_that_raises_ends_the_run_with_one_message_and_its_traceback_in_a_file(tiny, tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    with running(tiny, "--optimizer.name", "faulty.Faulty") as training:
        code, said = ending(training, sorted(children(training.pid)))
    assert code == 1
    assert re.search(
        r"stage 1 failed at 1U79@v20 with RuntimeError: a fault in two lines, at faulty.py:10 in step \(traceback", said
    )
    kept = Path(tiny.run.folder, tiny.run.name, "failure.txt").read_text()
    assert "faulty.py" in kept and kept.endswith("RuntimeError: a fault\nin two lines\n")


@linux
@forks
@pytest.mark.parametrize("transport", ["process", "thread"])
def test_an_interrupt_saves_and_ends(tiny, transport):
    with running(tiny, "--pipeline.transport", transport) as training:
        os.kill(training.pid, signal.SIGINT)
        assert training.end() == (130, f"{INTERRUPTED}\nslipstream: interrupted\n")
    assert list(Path(tiny.run.folder, tiny.run.name, "checkpoints").glob("step-*/manifest.json"))


@linux
@forks
def test_an_interrupt_of_a_rank_that_was_started_by_hand_saves_and_ends(tiny, monkeypatch):
    for name, value in {**world_by_hand(1), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with running(tiny, "--pipeline.stages", "1") as training:
        os.kill(training.pid, signal.SIGINT)
        assert training.end() == (130, f"{INTERRUPTED}\nslipstream: interrupted\n")


@linux
@forks
def test_a_second_interrupt_ends_all_stages_at_once(tiny):
    with running(tiny) as training:
        stages = sorted(children(training.pid))
        assert len(stages) == 3
        os.kill(stages[1], signal.SIGSTOP)  # so that nothing can be saved
        os.kill(training.pid, signal.SIGINT)
        training.wait_for(f"{INTERRUPTED}\n", error=True)
        os.kill(training.pid, signal.SIGINT)
        assert training.end() == (130, f"{INTERRUPTED}\nslipstream: interrupted\n")
        assert not any(map(is_running, stages))


@linux
@forks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_obeyed_when_the_run_is_saved(tiny, number):
    with running(tiny) as training:
        os.kill(training.pid, number)
        assert training.end() == (0, "")
    assert list(Path(tiny.run.folder, tiny.run.name, "checkpoints").glob("step-*/manifest.json"))


@linux
@forks
def test_a_run_that_nohup_started_goes_on_when_the_terminal_is_closed(tiny):
    with running(tiny, hang_up=signal.SIG_IGN) as training:
        for process in (training.pid, *children(training.pid)):
            os.kill(process, signal.SIGHUP)
        said = Path(tiny.run.folder).with_name("out.txt").read_text()
        latest = int(re.findall(r"\nstep (\d+)0/", said)[-1])
        training.wait_for(f"\nstep {latest + 3}0/")
        os.kill(training.pid, signal.SIGTERM)
        assert training.end() == (0, "")


def test_a_failure_among_threads_keeps_its_traceback(tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / "faulty_thread.py").write_text(FAULTY.replace("multiprocessing.current_process().name", "'stage 1'"))
    monkeypatch.syspath_prepend(tmp_path)
    arguments = as_arguments(changed(tiny, train__steps=30, optimizer__name="faulty_thread.Faulty"))
    assert cli.run(["train", *arguments]) == 1
    said = capsys.readouterr().err
    place = "at faulty_thread.py:10 in step"
    assert re.search(
        rf"^slipstream: stage [01] failed at [01]U79@v20 with RuntimeError: a fault in two lines, {place}", said
    )
    assert said.count("\n") == 1
    assert "faulty_thread.py" in Path(tiny.run.folder, tiny.run.name, "failure.txt").read_text()


FILLS = """
import resource

def fill():  # from now on no file takes more than 100 bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

class FillsAtTheEnd:
    def __init__(self, folder, config): pass
    def write(self, row): pass
    def close(self): fill()
"""


@contextmanager
def limited_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_whose_last_step_could_not_be_saved_is_no_success(tiny, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    assert cli.run(["train", *as_arguments(tiny)]) == 1
    said = capsys.readouterr()
    steps = tiny.train.steps
    assert said.err == f"slipstream: ended after step {steps}, which has no checkpoint: there is no other\n"
    assert f"step {steps} has no checkpoint: stage-0 needs" in said.out
    assert Path(tiny.run.folder, tiny.run.name, "summary.json").exists()


def test_a_disk_that_is_full_at_the_end_is_one_sentence_and_the_run_is_resumed(tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / "fills.py").write_text(FILLS)
    monkeypatch.syspath_prepend(tmp_path)
    config, folder = changed(tiny, checkpoint__every_steps=4), Path(tiny.run.folder, tiny.run.name)
    with limited_files():
        assert cli.run(["train", *as_arguments(config), "--run.sinks", "fills.FillsAtTheEnd"]) == 1
    assert capsys.readouterr().err == (
        f"slipstream: {folder}/summary.json cannot be written (File too large): make room for it, and resume the run "
        "with --checkpoint.resume\n"
    )
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "config.toml", "metrics.jsonl"}
    assert cli.run(["train", *as_arguments(config), "--checkpoint.resume"]) == 0
    assert (folder / "summary.json").exists()


def test_a_full_disk_has_no_half_traceback(tiny, tmp_path, capsys, monkeypatch):
    faulty = FAULTY.replace("multiprocessing.current_process().name", "'stage 1'").replace("raise", "fill(); raise")
    (tmp_path / "faulty_disk.py").write_text(FILLS + faulty)
    monkeypatch.syspath_prepend(tmp_path)
    config = changed(tiny, train__steps=30, evaluation__batches=0, optimizer__name="faulty_disk.Faulty")
    with limited_files():
        assert cli.run(["train", *as_arguments(config)]) == 1
    folder = Path(tiny.run.folder, tiny.run.name)
    assert capsys.readouterr().err.endswith(f" (no traceback in {folder}/failure.txt: File too large)\n")
    assert {path.name for path in folder.iterdir()} == {"config.toml", "metrics.jsonl"}
