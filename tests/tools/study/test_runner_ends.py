"""How `slipstream study` ends when it is interrupted or killed."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from harness import forks
from study_folder import Study

from slipstream import cli
from slipstream.tools.study import runner as command
from tests.faults.runs import children, is_running

pytestmark = forks

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

LONG = """
[[grid]]
mode = "ef"
[[grid]]
mode = ["ef", "async"]
train.steps = 1000000
evaluation.every_steps = 0
"""
"""Three cells, of which the first ends at once and the others never."""


def wait_until(condition: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


class Running:
    """A study in a session of its own, with two cells under way, and a third done, whose worker has no more to do."""

    def __init__(self, pid: int, study: Study, errors: Path) -> None:
        self.pid, self._study, self._errors = pid, study, errors
        self._code: int | None = None
        wait_until(lambda: study.times())
        wait_until(lambda: len(list(study.folder.glob("cells/*/metrics.jsonl"))) >= 3)
        self.workers = children(pid)
        assert len(self.workers) == 3

    def ending(self) -> tuple[int, str]:
        """Exit code and what it said, of a study that ends in time and leaves nobody behind."""
        wait_until(self._has_ended)
        wait_until(lambda: not any(map(is_running, self.workers)))
        assert len(self._study.times()) == 1  # what was done stays
        assert self._code is not None
        return self._code, self._errors.read_text()

    def _has_ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None

    def clear(self) -> None:
        for pid in ([] if self._has_ended() else [self.pid]) + self.workers:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        wait_until(self._has_ended)


@contextmanager
def running(study: Study) -> Iterator[Running]:
    """Forked from here, for starting Python and torch anew takes seconds."""
    study.write(LONG)
    errors = study.folder.with_name("errors")
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with study.folder.with_name("said").open("wb") as said, errors.open("wb") as failed:
            os.dup2(said.fileno(), 1)
            os.dup2(failed.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        sys.argv = ["slipstream", "study", str(study.path), "--output", str(study.folder), "--jobs", "3"]
        try:
            cli.main()
        finally:
            os._exit(99)
    started = Running(pid, study, errors)
    try:
        yield started
    finally:
        started.clear()


@linux
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
def test_an_interrupt_ends_all_workers_with_one_line(signum: signal.Signals, study: Study) -> None:
    with running(study) as process:
        os.kill(process.pid, signum)
        assert process.ending() == (130, "slipstream: interrupted\n")


@linux
def test_a_killed_worker_ends_the_study_with_one_sentence_and_the_next_goes_on(
    study: Study, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(study) as process:
        before = study.times()
        os.kill(process.workers[0], signal.SIGKILL)
        code, said = process.ending()
    assert code == 1
    assert re.fullmatch(r"slipstream: a worker died while muon-seed0-\w+ was waiting or running, .* are kept\n", said)
    study.write(LONG.replace("1000000", "2"))
    assert study.run() == 0
    assert "3 cells, 1 of them done before" in capsys.readouterr().out
    assert before.items() < study.times().items()


def test_whoever_calls_it_and_lives_on_is_left_no_workers_and_all_its_own_children(
    study: Study, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it hears SIGTERM itself, as one does that has trained before, and whoever is forked from it inherits
    that."""

    def interrupt(*arguments: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_sentence", interrupt)  # said of the first cell, while the others run
    study.write(LONG)
    handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
    others = set(multiprocessing.active_children())
    own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    own.start()
    try:
        assert study.run("--jobs", "2") == 130
        assert capsys.readouterr().err == "slipstream: interrupted\n"
        wait_until(lambda: set(multiprocessing.active_children()) - others == {own})
        assert own.is_alive()
    finally:
        signal.signal(signal.SIGTERM, handler)
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
            process.join()


@linux
def test_workers_leave_interrupts_to_the_parent_and_do_not_outlive_it_if_it_is_killed(study: Study) -> None:
    """A terminal sends an interrupt to all, and a worker that answered as well would do so with a traceback."""
    with running(study) as process:
        for pid in process.workers:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
        assert all(map(is_running, [process.pid, *process.workers]))
        os.kill(process.pid, signal.SIGKILL)
        assert process.ending() == (-signal.SIGKILL, "")


@linux
def test_an_interrupt_from_the_keyboard_ends_the_command(study: Study) -> None:
    study.write(LONG)
    arguments = [sys.executable, "-m", "slipstream", "study", "grid.toml", "--output", "out", "--jobs", "3"]
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background may have told them to ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: len(list(study.folder.glob("cells/*/metrics.jsonl"))) >= 3)
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (process.returncode, said) == (130, "slipstream: interrupted\n")
    assert len(workers) == 3
    wait_until(lambda: not any(map(is_running, workers)))
