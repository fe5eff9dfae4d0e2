"""Faults in one of four ranks: is every process gone in time, with one message and the right exit code?

    python -m tests.faults.gpus                      four ranks on one GPU, over NCCL
    python -m tests.faults.gpus --device cpu         the same over gloo

A stage is killed, stopped, raises, or runs out of memory in the middle of a run, in each way to start one: by
slipstream itself, by torchrun, and by hand as srun does (RANK, WORLD_SIZE and MASTER_ADDR in the environment). All
ranks must be gone within the time-out and ten seconds. Then undisturbed starts by hand: every rank must exit with 0.

    python -m tests.faults.gpus --cold 30            cold starts of `slipstream train` in a row
    python -m tests.faults.gpus --long 2000          one run of so many steps, with six reshapes: is its memory flat?
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream import Pipeline, launch
from slipstream.errors import NonFiniteError, PipelineError, StageFailure
from slipstream.tools.bench.slices import sliced
from slipstream.transport.base import Transport

from .runs import is_running, world_by_hand

NUM_STAGES = 4
TIMEOUT_SECONDS = 12.0
SPARE_SECONDS = 10.0
WIDTH = 512
SHARE = 24
"""Percent of the GPU for each rank of the long run: without slices the ranks take turns of milliseconds on it."""
SPRINGS = ("kill", "stop", "raise", "memory")
WAYS = ("slipstream", "torchrun", "hand")
REASONS = {
    "kill": r"stage \d is gone|another stage is gone|stage 1 was killed by SIGKILL",
    "stop": rf"has been silent for {TIMEOUT_SECONDS:g} s: stage \d was waiting for|stuck for",
    "raise": r"stage 1 failed at 1F\d+@v\d+ with ValueError: boom",
    "memory": r"stage 1 failed at 1F\d+@v\d+ with (OutOfMemoryError|RuntimeError)",
}
"""What the message must say."""


class Trap(nn.Module):
    """Does something terrible in a certain forward, and notes when."""

    def __init__(self, spring: str, folder: Path, after: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.spring, self.folder, self.left = spring, folder, after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and self.spring:
            (self.folder / "sprung").write_text(str(time.time()))
            if self.spring == "raise":
                raise ValueError("boom")
            if self.spring == "memory":
                torch.empty(2**50, dtype=torch.uint8, device=x.device)
            os.kill(os.getpid(), signal.SIGKILL if self.spring == "kill" else signal.SIGSTOP)
        outputs: Tensor = self.layer(x)
        return outputs


def work(transport: Transport, spring: str, folder: Path, device: str, num_steps: int) -> None:
    (folder / f"rank{transport.stage}").write_text(str(os.getpid()))
    springs = [spring if stage == 1 else "" for stage in range(NUM_STAGES)]
    pipeline = Pipeline(
        transport,
        [Trap(each, folder, after=30) for each in springs],
        data=lambda step, microbatch: (torch.ones(64, WIDTH), torch.zeros(64, WIDTH)),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        num_microbatches=NUM_STAGES,
        num_steps=num_steps,
        device=device,
    )
    for _ in pipeline.run():
        pass


def stage_main(given: argparse.Namespace) -> int:
    worker = partial(
        work, spring=given.spring, folder=given.folder, device=given.device, num_steps=400 if given.spring else 6
    )
    try:
        launch(
            worker,
            NUM_STAGES,
            device=given.device,
            timeout_seconds=TIMEOUT_SECONDS,
            share_gpu=given.device == "cuda",
            shared_memory=False,
        )
    except (StageFailure, PipelineError, NonFiniteError) as failure:
        print(f"slipstream: {' '.join(str(failure).split())}", file=sys.stderr, flush=True)
        return 1
    return 0


def start(way: str, spring: str, folder: Path, device: str) -> list[subprocess.Popen[str]]:
    own = ["-m", "tests.faults.gpus", "--stage", "--folder", str(folder), "--spring", spring, "--device", device]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}

    def process(prefix: list[str], name: str, more: dict[str, str]) -> subprocess.Popen[str]:
        with (folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, *prefix, *own], env=environment | more, stdout=log, stderr=log, text=True
            )

    if way == "slipstream":
        return [process([], "launcher", {})]
    if way == "torchrun":
        return [process(["-m", "torch.distributed.run", f"--nproc-per-node={NUM_STAGES}"], "torchrun", {})]
    world = world_by_hand(NUM_STAGES)
    return [process([], f"rank{r}", {"RANK": str(r), "LOCAL_RANK": str(r), **world}) for r in range(NUM_STAGES)]


def stages_alive(folder: Path) -> list[int]:
    return [pid for path in folder.glob("rank?") if is_running(pid := int(path.read_text() or "0"))]


def try_fault(way: str, spring: str, device: str) -> list[str]:
    """What is wrong with it; also prints a line."""
    faults = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        processes = start(way, spring, folder, device)
        deadline = time.monotonic() + 120
        while not (folder / "sprung").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        began, left = time.monotonic(), list[int]()
        while time.monotonic() - began < TIMEOUT_SECONDS + SPARE_SECONDS:
            left = stages_alive(folder)
            if not left and all(process.poll() is not None for process in processes):
                break
            time.sleep(0.1)
        seconds = time.monotonic() - began
        if left:
            faults.append(f"{len(left)} ranks are left after {seconds:.0f} s")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        codes = [process.wait(60) for process in processes]
        killed = [1] if way == "hand" and spring in ("kill", "stop") else []  # no other rank may end by a signal
        if any(code != (-signal.SIGKILL if rank in killed else 1) for rank, code in enumerate(codes)):
            faults.append(f"exit codes {codes}")
        said = "\n".join(path.read_text() for path in folder.glob("*.log"))
        messages = sorted(set(re.findall(r"^slipstream: (.*)$", said, re.MULTILINE)))
        if not any(re.search(REASONS[spring], message) for message in messages):
            faults.append(f"said {messages or said[-600:]}")
        if "core dumped" in said or "terminate called" in said:
            faults.append("a process was aborted")
    verdict = "; ".join(faults) or "as it should be"
    print(f"{way:11} {spring:7} {seconds:5.1f} s  {verdict}", flush=True)
    print(f"{'':27} said: {' | '.join(messages)[:300]}", flush=True)
    return faults


def start_by_hand(device: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        began = time.monotonic()
        processes = start("hand", "", Path(name), device)
        try:
            codes = [process.wait(90) for process in processes]
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
            codes = [process.wait() for process in processes]
        said = "\n".join(path.read_text() for path in Path(name).glob("*.log"))
    print(f"by hand: exit codes {codes}, {time.monotonic() - began:.1f} s", flush=True)
    return [] if not any(codes) else [f"exit codes {codes}: {said[-600:]}"]


# ---- undisturbed runs


def train_command(folder: Path, device: str, num_steps: int, *more: str) -> list[str]:
    options = {
        "run.folder": folder,
        "run.name": "run",
        "train.device": device,
        "train.steps": num_steps,
        "pipeline.stages": NUM_STAGES,
        "pipeline.timeout-seconds": 60,
        "evaluation.every-steps": max(2, num_steps // 40),
        "evaluation.batches": 2,
        "checkpoint.every-steps": max(3, num_steps // 20),
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    shared = ["--pipeline.share-gpu"] if device == "cuda" else []
    return [sys.executable, "-m", "slipstream", "train", *words, *shared, *more]


def start_cold(device: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        began = time.monotonic()
        try:
            done = subprocess.run(
                train_command(Path(name), device, 12), capture_output=True, text=True, timeout=120 + TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            print("cold start: HANGS", flush=True)
            return ["a cold start hangs"]
    print(f"cold start: exit code {done.returncode}, {time.monotonic() - began:.1f} s", flush=True)
    return [] if done.returncode == 0 else [f"a cold start ended with {done.returncode}: {done.stderr[-300:]}"]


def memory_of(run: subprocess.Popen[str]) -> tuple[int, int]:
    """MiB of the run's processes: of the host and, as far as nvidia-smi tells, of the device."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,rss="], capture_output=True, text=True).stdout.split("\n")
    rows = [tuple(map(int, line.split())) for line in listed if line.strip()]
    own = {run.pid}
    while more := {pid for pid, parent, _ in rows if parent in own} - own:
        own |= more
    on_host = sum(rss for pid, _, rss in rows if pid in own) // 1024
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
        ).stdout.split()
    except OSError:
        told = []
    return on_host, sum(int(word) for word in told if word.isdigit())


def run_long(device: str, num_steps: int) -> list[str]:
    """Goes to two stages and back three times, and compares the memory in four stages before and after."""
    third, tenth = num_steps // 3, num_steps // 10
    reshapes = [f"{third + i * tenth // 2}={stages}" for i, stages in enumerate((2, 4, 2, 4, 2, 4))]
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        command = train_command(Path(name), device, num_steps, "--pipeline.reshape", *reshapes)
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        rows, seen = Path(name) / "run" / "metrics.jsonl", list[tuple[int, int, int]]()
        began = time.monotonic()
        while run.poll() is None and time.monotonic() - began < 60 + num_steps:
            time.sleep(2.0)
            num_rows = rows.read_bytes().count(b'"loss"') if rows.exists() else 0
            seen.append((num_rows, *memory_of(run)))
        run.kill()
        said = run.communicate()[1]
    early = [each for each in seen if num_steps // 6 < each[0] < third]
    late = [each for each in seen if 0.8 * num_steps < each[0] < num_steps]
    if run.returncode != 0 or not early or not late:
        return [f"the long run ended with {run.returncode}: {said[-300:]}"]
    print(f"{num_steps} steps in {time.monotonic() - began:.0f} s; MiB of the host and of the device:", flush=True)
    for step, on_host, on_device in [early[-1], *(each for each in seen if third <= each[0]), late[-1]]:
        print(f"  step {step}: {on_host}, {on_device}", flush=True)
    grown = [after / max(1, before) - 1 for before, after in zip(early[-1][1:], late[-1][1:], strict=True)]
    return [] if max(grown) < 0.1 else [f"memory grew by {100 * max(grown):.0f} %"]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.faults.gpus", description=__doc__, formatter_class=form)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--springs", nargs="*", choices=SPRINGS, default=SPRINGS)
    parser.add_argument("--starts", type=int, default=20, help="undisturbed starts by hand")
    parser.add_argument("--cold", type=int, default=0, help="only so many cold starts in a row")
    parser.add_argument("--long", type=int, default=0, help="only one run of so many steps")
    parser.add_argument("--stage", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spring", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage:
        code = stage_main(given)
        sys.stdout.flush()
        os._exit(code)
    faults: list[str] = []
    if given.cold or given.long:
        faults += [fault for _ in range(given.cold) for fault in start_cold(given.device)]
        with sliced(SHARE) if given.long and given.device == "cuda" else nullcontext():
            faults += run_long(given.device, given.long) if given.long else []
    else:
        pairs = [(way, spring) for way in given.ways for spring in given.springs]
        faults += [fault for way, spring in pairs for fault in try_fault(way, spring, given.device)]
        faults += [fault for _ in range(given.starts) for fault in start_by_hand(given.device)]
    print("WRONG: " + "; ".join(faults) if faults else "all as it should be")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
