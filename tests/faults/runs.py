"""A training to be disturbed: started, watched through files and /proc, and compared with one that was not."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from slipstream.observe.status_file import FOLDER_VARIABLE

COMPARED = ("step", "loss", "val_loss", "gradient_norms", "learning_rates", "skipped", "tokens")
"""Of a row of metrics.jsonl: what does not tell the time."""


@dataclass(frozen=True)
class Shape:
    """Of a training that takes seconds: 53,000 parameters, with clipping and error feedback."""

    stages: int = 4
    replicas: int = 1
    sharded: bool = False
    steps: int = 60
    every: int = 3
    timeout_seconds: float = 60.0

    @property
    def name(self) -> str:
        return f"p{self.stages}" + (f"-dp{self.replicas}" if self.replicas > 1 else "") + "-sharded" * self.sharded

    @property
    def size(self) -> int:
        return self.stages * self.replicas

    def arguments(self, folder: Path, name: str) -> list[str]:
        options = {
            "model.dim": 32,
            "model.num-layers": 4,
            "model.num-heads": 2,
            "model.num-kv-heads": 1,
            "model.hidden-dim": 64,
            "model.sequence-length": 32,
            "pipeline.stages": self.stages,
            "pipeline.replicas": self.replicas,
            "pipeline.microbatches": self.stages,
            "pipeline.timeout-seconds": self.timeout_seconds,
            "optimizer.clip-norm": 0.5,
            "optimizer.error-feedback": 1.0,
            "train.microbatch-size": 1,
            "train.steps": self.steps,
            "evaluation.every-steps": 10,
            "evaluation.batches": 1,
            "checkpoint.every-steps": self.every,
            "run.folder": folder,
            "run.name": name,
        }
        arguments = [text for option, value in options.items() for text in (f"--{option}", str(value))]
        return [*arguments, "--checkpoint.resume", *(["--optimizer.sharded"] if self.sharded else [])]


def _train(arguments: list[str], log: Path, environment: Mapping[str, str]) -> None:
    """In a process of its own, that has torch loaded already: `slipstream train`."""
    from slipstream import cli

    os.setsid()  # so that all that is left of it can be found and ended
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv = ["slipstream", "train", *arguments]
    cli.main()


class Run:
    """`slipstream train`, or torchrun with it, as it goes."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        log: Path,
        torchrun: int = 0,
        max_restarts: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """folder: of the run. torchrun: so many processes that it starts; 0: the run starts its own, or is one of
        several ranks if the environment says so."""
        self.folder, self.log = folder, log
        self.status = log.with_suffix(".status")
        log.parent.mkdir(parents=True, exist_ok=True)
        own_environment = {**(environment or {}), FOLDER_VARIABLE: str(self.status)}
        self._own: ForkServerProcess | None = None
        self._torchrun: subprocess.Popen[bytes] | None = None
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
            command += [f"--max-restarts={max_restarts}", "--monitor-interval=0.1", "-m", "slipstream", "train"]
            inherited = {**os.environ, **own_environment, "OMP_NUM_THREADS": "1"}
            with log.open("wb") as file:
                self._torchrun = subprocess.Popen(
                    [*command, *arguments], stdout=file, stderr=file, env=inherited, start_new_session=True
                )
            self.pid = self._torchrun.pid
            return
        context = multiprocessing.get_context("forkserver")
        # torch._dynamo too, which every optimizer of torch imports.
        context.set_forkserver_preload(["slipstream.cli.dispatch", "slipstream.train.trainer", "torch._dynamo"])
        self._own = context.Process(target=_train, args=(list(arguments), log, own_environment))
        self._own.start()
        assert self._own.pid is not None
        self.pid = self._own.pid

    @property
    def code(self) -> int | None:
        """Exit code, once it has ended."""
        return self._own.exitcode if self._own is not None else self._torchrun.poll() if self._torchrun else None

    def wait(self, seconds: float) -> int:
        until(lambda: self.code is not None, seconds, f"the end of {self.log.stem}")
        # Stages of a launcher that was killed end by themselves a moment later, and must.
        until(lambda: not in_session(self.pid), seconds, f"the end of all stages of {self.log.stem}")
        assert self.code is not None
        return self.code

    def end(self) -> None:
        """Whatever is left of it, at once."""
        for pid in in_session(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def stages(self) -> dict[str, int]:
        """Processes of stages that have come to their work, by the name of their part of a checkpoint."""
        found = {}
        for path in sorted(self.status.glob("stage-*")) if self.status.exists() else []:
            status = read_status(path)
            if status is not None and is_running(status[0]):
                found[path.name] = status[0]
        return found

    def num_rows(self) -> int:
        """Steps in metrics.jsonl."""
        return sum("loss" in row for row in rows_of(self.folder))


# ---- processes


def world_by_hand(size: int, port: int = 0) -> dict[str, str]:
    """The environment that srun gives to ranks, at a free port if none is named. Each of them has its RANK besides."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = port or free.getsockname()[1]
    return {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def read_status(path: Path) -> tuple[int, str, str] | None:
    """Returns the process id, the current activity, and the activity in the background. None means that there is no
    valid file."""
    try:
        process, at, beside = path.read_text(encoding="utf-8").splitlines()
        return int(process), at.strip(), beside.strip()
    except (OSError, ValueError):
        return None


def until(is_so: Callable[[], bool], seconds: float, what: str, pause: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds:g} s")
        time.sleep(pause)


def _stat(pid: int) -> list[str] | None:
    """[state, parent, process group, session, ...]"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_running(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def in_session(session: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if (stat := _stat(pid)) and stat[0] not in "ZX" and stat[3] == str(session)]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return [child for child in found if is_running(child)]


# ---- what a run leaves behind


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path, rows = folder / "metrics.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):  # half a line of a stage that was killed
            rows.append(json.loads(line))
    return rows


def committed(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("checkpoints/step-*") if path.suffix == "")


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """Of two finished runs, in words."""
    found = []
    try:
        ours, theirs = (json.loads((f / "summary.json").read_text(encoding="utf-8")) for f in (folder, undisturbed))
    except (OSError, ValueError) as error:
        return [f"no summary: {error}"]
    if ours["parameter_checksum"] != theirs["parameter_checksum"]:
        found.append("parameters differ")
    rows = [[{key: row[key] for key in COMPARED if key in row} for row in rows_of(f)] for f in (folder, undisturbed)]
    if len(rows[0]) != len(rows[1]):
        found.append(f"metrics.jsonl has {len(rows[0])} rows, not {len(rows[1])}")
    found += [f"row {a} is not {b}" for a, b in zip(*rows, strict=False) if a != b][:3]
    return found


def undisturbed(shape: Shape, folder: Path) -> Path:
    """The folder of a run that nobody disturbs."""
    name = f"{shape.name}-undisturbed"
    run = Run(shape.arguments(folder, name), folder / name, folder / "logs" / f"{name}.log")
    try:
        if run.wait(300) != 0:
            raise RuntimeError(f"the undisturbed run failed: {run.said}")
    finally:
        run.end()
    return folder / name
