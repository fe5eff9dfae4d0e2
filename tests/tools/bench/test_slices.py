"""One GPU as several, with tools that only write down what they were asked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import forks

from slipstream.errors import RunFailure, UsageError
from slipstream.tools.bench import slices
from slipstream.tools.bench.slices import sliced

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

CONTROL = """#!/bin/bash
pid_file="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    echo "start $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" >>"$CALLS"
    [ -n "$BROKEN" ] && { echo "no driver"; exit 1; }
    "$0" serve daemon </dev/null >/dev/null 2>&1 & echo $! >"$pid_file"; echo $! >>"$PIDS"
    "$0" serve server </dev/null >/dev/null 2>&1 & echo $! >"$CUDA_MPS_PIPE_DIRECTORY/server"; echo $! >>"$PIDS"
elif [ "$1" = serve ]; then
    while :; do read -r -t 0.05 <> <(:); done
else
    read -r command
    echo "$command" >>"$CALLS"
    case "$command" in
        get_server_list) cat "$CUDA_MPS_PIPE_DIRECTORY/server" ;;
        quit*) [ -n "$STUBBORN" ] || kill -9 $(cat "$pid_file" "$CUDA_MPS_PIPE_DIRECTORY/server") ;;
    esac
fi
"""
SMI = """#!/bin/bash
echo "smi $*" >>"$CALLS"
case "$*" in
    *clocks.sm*) echo "1100, 412.5" ;;
    *name*) echo "NVIDIA H200" ;;
esac
"""
NAMES = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """The folder they write `calls` and `pids` to."""
    for name, text in (("nvidia-cuda-mps-control", CONTROL), ("nvidia-smi", SMI)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "temporary").mkdir()
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "PIDS": str(tmp_path / "pids"),
        "TMPDIR": str(tmp_path / "temporary"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in (*NAMES, "CUDA_VISIBLE_DEVICES", "BROKEN", "STUBBORN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(slices, "SAMPLE_SECONDS", 0.05)
    monkeypatch.setattr(slices, "QUIT_SECONDS", 2.0)
    return tmp_path


def calls(tools: Path) -> list[str]:
    """Without the samples, of which there may be any number."""
    return [line for line in (tools / "calls").read_text().splitlines() if "query" not in line]


def assert_nothing_is_left(tools: Path) -> None:
    pids = [int(line) for line in (tools / "pids").read_text().split()]
    assert pids and not any(slices._is_service(pid) for pid in pids)
    assert not list((tools / "temporary").iterdir())
    assert not any(name in os.environ for name in NAMES)


def test_the_daemon_is_started_once_and_nothing_of_it_is_left(tools):
    with sliced(25):
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
        assert Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert calls(tools) == ["start 25", "get_server_list", "quit -t 5"]
    assert_nothing_is_left(tools)


def test_a_daemon_that_does_not_quit_is_killed(tools, monkeypatch):
    monkeypatch.setenv("STUBBORN", "1")
    with sliced(50):
        pids = [int(line) for line in (tools / "pids").read_text().split()]
        assert all(slices._is_service(pid) for pid in pids)
    assert_nothing_is_left(tools)


def test_the_clock_is_reset_and_the_daemon_ended_after_an_exception(tools):
    with pytest.raises(ZeroDivisionError), sliced(20, clock_mhz=1100):
        raise ZeroDivisionError
    assert calls(tools) == ["start 20", "smi -i 0 -lgc 1100,1100", "smi -i 0 -rgc", "get_server_list", "quit -t 5"]
    assert_nothing_is_left(tools)


def test_a_restart_keeps_the_folder_and_makes_a_new_daemon(tools):
    with sliced(25) as gpu:
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        gpu.restart()
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == folder
        first, _, second, _ = (int(line) for line in (tools / "pids").read_text().split())
        assert slices._is_service(second) and not slices._is_service(first)
    assert calls(tools).count("start 25") == 2
    assert_nothing_is_left(tools)


def test_what_the_user_set_is_kept_and_given_back(tools, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "12")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "theirs")
    with sliced(25):
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "12"
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] != "theirs"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "12"
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "theirs"


@forks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(tools, number):
    def hold() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with sliced(25, clock_mhz=900):
            time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while not ((tools / "calls").exists() and any("-lgc" in line for line in calls(tools))):
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode not in (None, 0)
    assert "smi -i 0 -rgc" in calls(tools)
    assert_nothing_is_left(tools)


def test_clock_and_power_are_sampled_meanwhile(tools):
    with sliced(25) as gpu:
        deadline = time.monotonic() + 20
        while not (readings := gpu.take_readings()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert gpu.describe()["gpus"] == ["NVIDIA H200"]
    assert (readings["sm_clock_mhz"].lowest, readings["power_watts"].median) == (1100.0, 412.5)


def test_without_slices_there_is_no_daemon_and_the_clock_of_all_gpus_is_locked(tools):
    with sliced(None, clock_mhz=1100):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert calls(tools) == ["smi -lgc 1100,1100", "smi -rgc"]


def test_a_daemon_that_does_not_start_is_one_sentence(tools, monkeypatch):
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(RunFailure, match=r"does not start \(no driver\): use --no-slices"), sliced(25):
        pass
    assert not list((tools / "temporary").iterdir()) and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_without_the_service_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"nvidia-cuda-mps-control is not installed, .*: use --no-slices"), sliced(25):
        pass
