"""Splits one GPU into slices for a pipeline: CUDA's MPS gives each process a share of the multiprocessors.

    with sliced(share=25, clock_mhz=1100) as gpu:
        ...                      # processes that start here find the service in their environment
        print(gpu.take_readings())

The multi-process service (MPS) is a daemon that `sliced` starts in a temporary folder. At the end `sliced` stops it and
restores the environment and the clock, also after an error.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...errors import RunFailure, UsageError
from .spread import Spread

CONTROL = "nvidia-cuda-mps-control"
MAX_CONNECTIONS = "8"
"""Number of hardware work queues per process (CUDA_DEVICE_MAX_CONNECTIONS). All clients of the service share one pool
of queues: four clients with 32 each fail to start."""
START_SECONDS, QUIT_SECONDS, SERVER_QUIT_SECONDS = 30.0, 15.0, 5
SAMPLE_SECONDS = 1.0
READINGS = {"sm_clock_mhz": "clocks.sm", "power_watts": "power.draw"}
"""Values to sample: our name, and the name in nvidia-smi."""


class Gpu:
    """The GPU that `sliced` yields: controls the MPS daemon, if there is one, and reads nvidia-smi."""

    def __init__(self, folder: Path | None, target: Sequence[str]) -> None:
        """folder: the folder of the MPS daemon. None means that there is no daemon. target: the options of nvidia-smi
        that select the GPU. Empty means all GPUs."""
        self._folder, self._target = folder, list(target)
        self._samples: dict[str, list[float]] = {name: [] for name in READINGS}
        self._clock_mhz: int | None = None

    # ---- the service

    def start(self) -> None:
        if self._folder is None:
            return
        said = self._folder / "start.txt"  # a file, because the daemon would keep a pipe open
        with said.open("w", encoding="utf-8") as file:
            started = subprocess.run(
                [CONTROL, "-d"], stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=START_SECONDS
            )
        if started.returncode:
            reason = " ".join(said.read_text(encoding="utf-8").split())
            raise RunFailure(f"{CONTROL} does not start ({reason}): use --no-slices, with a GPU for every stage")

    def stop(self) -> None:
        """Asks the daemon to quit. Kills the daemon and its server if they do not."""
        if self._folder is None:
            return
        pids = [int(word) for word in self._ask("get_server_list").split() if word.isdigit()]
        with suppress(OSError, ValueError):
            pids.append(int((self._folder / "pipes" / f"{CONTROL}.pid").read_text(encoding="utf-8")))
        self._ask(f"quit -t {SERVER_QUIT_SECONDS}")
        _await_end(pids)
        for pid in filter(_is_service, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _await_end(pids)

    def restart(self) -> None:
        """Restarts the daemon. After a client process was killed, the daemon refuses new clients."""
        self.stop()
        self.start()

    def _ask(self, command: str) -> str:
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                [CONTROL], input=f"{command}\n", capture_output=True, text=True, timeout=QUIT_SECONDS
            ).stdout
        return ""

    # ---- clock and power

    def lock_clock(self, clock_mhz: int) -> None:
        locked = self._smi("-lgc", f"{clock_mhz},{clock_mhz}")
        if locked is None or locked.returncode:
            reason = "there is no nvidia-smi" if locked is None else " ".join((locked.stdout + locked.stderr).split())
            raise UsageError(f"clock = {clock_mhz} cannot be locked ({reason}): run as root, or leave clock out")
        self._clock_mhz = clock_mhz

    def reset_clock(self) -> None:
        self._smi("-rgc")

    def sample(self, ended: threading.Event) -> None:
        while not ended.wait(SAMPLE_SECONDS):
            for values in self._query(",".join(READINGS.values())):
                for name, value in zip(READINGS, values, strict=False):
                    with suppress(ValueError):  # nvidia-smi prints [N/A] for an unknown value
                        self._samples[name].append(float(value))

    def take_readings(self) -> dict[str, Spread]:
        """Returns the spread of clock and power since the last call. A value without samples is left out."""
        taken, self._samples = self._samples, {name: [] for name in READINGS}
        return {name: spread for name, values in taken.items() if (spread := Spread.of(values)) is not None}

    def describe(self) -> dict[str, Any]:
        has_nccl = torch.version.cuda is not None and dist.is_nccl_available()
        return {
            "gpus": [", ".join(values) for values in self._query("name")],
            "driver": next((values[0] for values in self._query("driver_version")), None),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
            "cuda": torch.version.cuda,
            "locked_clock_mhz": self._clock_mhz,
            "max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        }

    def _query(self, fields: str) -> list[list[str]]:
        """Returns a list of values for every GPU. The result is empty if nvidia-smi fails."""
        answer = self._smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
        lines = answer.stdout.splitlines() if answer is not None and not answer.returncode else []
        return [[value.strip() for value in line.split(",")] for line in lines]

    def _smi(self, *options: str) -> subprocess.CompletedProcess[str] | None:
        with suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run(
                ["nvidia-smi", *self._target, *options], capture_output=True, text=True, timeout=QUIT_SECONDS
            )
        return None


@contextmanager
def sliced(share: int | None, clock_mhz: int | None = None) -> Iterator[Gpu]:
    """Starts MPS, locks the clock and samples clock and power inside the `with` block.

    share: percent of the multiprocessors for each process. None means that every process has its own GPU, without MPS.

    clock_mhz: the frequency at which the GPU's clock is locked. None means that the clock is not changed, because other
    users may share the GPU."""
    if share is not None and shutil.which(CONTROL) is None:
        raise UsageError(f"{CONTROL} is not installed, which shares one GPU among stages: use --no-slices")
    stack = ExitStack()
    with _on_end_signals(_exit):
        try:
            yield _open(stack, share, clock_mhz)
        finally:
            with _on_end_signals(signal.SIG_IGN, signal.SIGINT):  # the cleanup must not be interrupted
                stack.close()


def _open(stack: ExitStack, share: int | None, clock_mhz: int | None) -> Gpu:
    """Sets up everything, and registers on `stack` how to undo it."""
    if share is None:
        gpu = Gpu(None, [])
    else:
        folder = Path(tempfile.mkdtemp(prefix="mps-"))
        gpu = Gpu(folder, ["-i", os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"])
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)  # the last callback is called first
        os.environ.update(_environment(folder, share))
        stack.callback(gpu.stop)
        gpu.start()
    if clock_mhz is not None:
        stack.callback(gpu.reset_clock)
        gpu.lock_clock(clock_mhz)
    ended = threading.Event()
    sampler = threading.Thread(target=gpu.sample, args=(ended,), name="samples clock and power", daemon=True)
    sampler.start()
    stack.callback(sampler.join)
    stack.callback(ended.set)
    return gpu


def _environment(folder: Path, share: int) -> dict[str, str]:
    """Returns the environment variables of the daemon and its clients."""
    paths = {"CUDA_MPS_PIPE_DIRECTORY": folder / "pipes", "CUDA_MPS_LOG_DIRECTORY": folder / "log"}
    for path in paths.values():
        path.mkdir()
    return {
        **{name: str(path) for name, path in paths.items()},
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", MAX_CONNECTIONS),
    }


def _is_service(pid: int) -> bool:
    """Returns whether the process runs and is the MPS daemon or its server."""
    try:
        found = re.match(r"\d+ \((.*)\) (\w)", Path(f"/proc/{pid}/stat").read_text(encoding="utf-8"))
    except OSError:
        return False
    return found is not None and found[1].startswith(CONTROL[:15]) and found[2] not in "ZX"


def _await_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + QUIT_SECONDS
    while any(map(_is_service, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _on_end_signals(handler: Any, *others: signal.Signals) -> Iterator[None]:
    """Installs a handler for SIGTERM, SIGHUP and `others` inside the `with` block, if this is the main thread. Without
    `others` it does not replace an existing handler, because that handler ends the run in its own way, or ignores the
    signal on purpose."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGHUP, *others]
    if not others:
        numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, handler) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
