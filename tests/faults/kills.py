"""One training, a stage of which is killed again and again at random moments: python -m tests.faults.kills --help

Each line says where the kill fell, as the stage itself left it in memory that outlives it
(slipstream/observe/status_file.py), which step the run went on from, and how many updates were made again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .runs import Run, Shape, children, committed, differences, is_running, read_status, undisturbed, until

AIMS = {
    "anywhere": 4,
    "start-up": 3,
    "save": 4,
    "forward": 1,
    "backward": 1,
    "update": 2,
    "waiting": 1,
}
"""What a kill waits to see its victim at, and how often. It may have moved on when the kill falls."""
WAITS = ("wait_activations", "wait_gradients", "wait_sums")
PATIENCE_SECONDS = 4.0
LAUNCHER_SHARE = 0.08
"""Of the kills, for the process that started the stages."""


@dataclass
class Kill:
    victim: str
    fell: str
    newest: int
    """Committed when all stages had ended; 0: none."""
    done: int
    """Updates in metrics.jsonl by then."""
    resumed: int | None = None
    seconds: float = 0.0
    """From the kill to the end of all stages."""


def train_with_kills(
    shape: Shape, num_kills: int, seed: int, folder: Path, expected: Path, say: Callable[[str], None] = print
) -> tuple[list[Kill], list[str]]:
    """A run that is started again after every kill. The kills, and what is wrong."""
    rng = random.Random(seed)
    name = f"{shape.name}-killed"
    arguments, kills, faults = shape.arguments(folder, name), list[Kill](), list[str]()
    start_seconds = 1.0
    while True:
        began = time.monotonic()
        run = Run(arguments, folder / name, folder / "logs" / f"{name}.{len(kills)}.log")
        try:
            is_last = len(kills) >= num_kills
            kill = None if is_last else _kill(run, shape, rng, num_kills - len(kills), start_seconds)
            code = run.wait(shape.timeout_seconds + 300 * is_last)
        finally:
            run.end()
        resumed = _resumed(run.said)
        for number, earlier in enumerate(kills, 1) if resumed is not None else ():
            if earlier.resumed is None:  # a start that was killed at once has not said where it goes on from
                earlier.resumed = resumed
                if resumed != earlier.newest:
                    faults.append(f"kill {number}: went on from step {resumed}, and {earlier.newest} was committed")
        if kill is None:
            if code != 0:
                faults.append(f"exit code {code} without a kill: {run.said[-500:]}")
            if not is_last:
                say(f"the training was over after {len(kills)} kills")
            break
        kill.newest, kill.done = max(committed(folder / name), default=0), run.num_rows()
        kills.append(kill)
        if kill.victim != "launcher" and (code != 1 or " was killed by SIGKILL" not in run.said):
            faults.append(f"kill {len(kills)}: exit code {code}, and the run said {run.said[-300:]!r}")
        if kill.fell != "start-up" and resumed == 0 and kill.done:
            start_seconds = min(start_seconds, time.monotonic() - began)
        say(_line(len(kills), kill, resumed))
    return kills, faults + differences(folder / name, expected)


def torchrun_with_kills(
    shape: Shape, num_kills: int, seed: int, folder: Path, expected: Path, say: Callable[[str], None] = print
) -> tuple[list[Kill], list[str]]:
    """One torchrun, which starts all stages again after every kill."""
    rng = random.Random(seed)
    name = f"{shape.name}-torchrun"
    kills, faults = list[Kill](), list[str]()
    run = Run(shape.arguments(folder, name), folder / name, folder / "logs" / f"{name}.log", shape.size, num_kills + 1)
    try:
        for _ in range(num_kills):
            kill = None
            while kill is None and run.code is None:  # between two starts there is nobody to kill
                kill = _kill(run, shape, rng, num_kills - len(kills), 8.0, is_torchrun=True)
            if kill is None:
                say(f"the training was over after {len(kills)} kills")
                break
            _await_end_of(set(children(run.pid)))
            kill.newest, kill.done = max(committed(run.folder), default=0), run.num_rows()
            kills.append(kill)
            say(_line(len(kills), kill, None))
        code = run.wait(300)
    finally:
        run.end()
    # Of a start that was killed before it could say where it went on from, there is no line.
    lines = [int(step) for step in re.findall(r"resuming from the checkpoint of step (\d+)", run.said)]
    expected_lines = [kill.newest for kill in kills if kill.newest]
    for number, kill in enumerate(kills, 1):
        kill.resumed = kill.newest
        if kill.newest and kill.newest not in lines:
            following = [k for k in kills[number:] if k.fell == "start-up"]
            if not following:
                faults.append(f"kill {number}: nothing went on from step {kill.newest}, but from {lines}")
    if not set(lines) <= set(expected_lines):
        faults.append(f"went on from {lines}, committed were {expected_lines}")
    if code != 0:
        faults.append(f"exit code {code}: {run.said[-500:]}")
    return kills, faults + differences(run.folder, expected)


def _await_end_of(pids: set[int]) -> None:
    until(lambda: not any(map(is_running, pids)), 90, "the end of the other stages")


def _kill(
    run: Run, shape: Shape, rng: random.Random, num_left: int, start_seconds: float, is_torchrun: bool = False
) -> Kill | None:
    """None if the run ended before."""
    aim = rng.choices(list(AIMS), list(AIMS.values()))[0]
    first = run.num_rows()
    if aim == "start-up":
        until(lambda: bool(children(run.pid)) or run.code is not None, 60, "a stage")
        time.sleep(rng.uniform(0, start_seconds))
    else:
        until(lambda: len(run.stages()) == shape.size or run.code is not None, 120, "all stages")
        # So many updates that the last kill falls near the end of the training.
        resumed = max(committed(run.folder), default=0)
        wanted = resumed + rng.randint(0, max(1, 2 * (shape.steps - resumed) // (num_left + 1)))
        deadline = time.monotonic() + 60
        while run.code is None and run.num_rows() < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
    stages = run.stages()
    is_launcher = not is_torchrun and rng.random() < LAUNCHER_SHARE
    part, pid = rng.choice(sorted(stages.items())) if len(stages) == shape.size else ("", 0)
    if is_launcher:
        part, pid = "launcher", run.pid
    elif not pid:
        early = children(run.pid)
        if not early:
            time.sleep(0.1)
            return None
        part, pid = "a stage", rng.choice(early)
    else:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while aim not in ("anywhere", "start-up", _at(run, part)) and time.monotonic() < deadline and is_running(pid):
            time.sleep(0.0005)
    if run.code is not None or not is_running(pid):
        return None
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid), 10, "death", pause=0.0002)
    fell = _at(run, part) if part.startswith("stage-") else "any" if first and part == "launcher" else "start-up"
    if not is_torchrun:
        run.wait(60)
    return Kill(part, fell, 0, 0, seconds=time.monotonic() - began)


def _at(run: Run, part: str) -> str:
    if _is_saving(run.folder, part):
        return "save"
    status = read_status(run.status / part)
    if status is None or status[1] == "starting":
        return "start-up"
    at = status[1].split()[0]
    return "update" if status[2] or at == "update" else "waiting" if at in WAITS else at


def _is_saving(folder: Path, part: str) -> bool:
    """Its tensors are being written, and its record is not there yet."""
    stage = part.partition(".")[0]
    for partial in folder.glob("checkpoints/step-*.partial"):
        for name in (stage, part):
            begun = any((partial / f"{name}.safetensors{suffix}").exists() for suffix in ("", ".tmp"))
            if begun and not (partial / f"{name}.json").exists():
                return True
    return any(folder.glob("checkpoints/step-*.committing"))


def _resumed(said: str) -> int | None:
    """None: it was killed before it could say so."""
    found = re.search(r"resuming from the checkpoint of step (\d+)", said)
    return int(found[1]) if found else 0 if " parameters on " in said else None


def _line(number: int, kill: Kill, resumed: int | None) -> str:
    began = "began at   -" if resumed is None else f"began at {resumed:3}"
    again = kill.done - kill.newest
    return (
        f"{number:3}  {kill.victim:<18}  {kill.fell:<10}  {began}, updates {kill.done:3}, "
        f"newest checkpoint {kill.newest:3}, to be made again {again:2}, over in {kill.seconds:4.1f} s"
    )


def summary(shape: Shape, kills: list[Kill], faults: list[str], seconds: float) -> str:
    where = ", ".join(f"{count} {fell}" for fell, count in Counter(kill.fell for kill in kills).most_common())
    # A start that is killed at once has made no updates: those in the file were lost before, and counted.
    lost = [max(0, kill.done - kill.newest) for kill in kills if kill.fell != "start-up"] or [0]
    verdict = "WRONG: " + "; ".join(faults) if faults else "bitwise the same"
    return (
        f"{shape.name:<16} {len(kills):3} kills ({where}); updates made again: {sum(lost)}, "
        f"at most {max(lost)} at once; {seconds:.0f} s; {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills",
        type=int,
        default=50,
        help="of one training on four stages, and a fifth as many each of two with replicas (default 50)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true", help="which starts all stages again after every kill")
    parser.add_argument("--folder", type=Path, help="to keep what the runs leave behind")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = given.folder or Path(temporary)
        part, replicated = given.kills // 5, Shape(stages=2, replicas=2)  # which share the optimizer or do not
        shapes = {Shape(): given.kills, replicated: part, replace(replicated, sharded=True): part}
        lines, is_fine = [], True
        for planned, num_kills in shapes.items():
            if not num_kills:
                continue
            shape = replace(planned, steps=max(60, (12 if given.torchrun else 4) * num_kills))
            began = time.monotonic()
            expected = undisturbed(shape, folder)
            disturb = torchrun_with_kills if given.torchrun else train_with_kills
            kills, faults = disturb(shape, num_kills, given.seed, folder, expected)
            if len(kills) < num_kills:
                faults.append(f"{len(kills)} kills of {num_kills}: make the training longer")
            lines.append(summary(shape, kills, faults, time.monotonic() - began))
            print(lines[-1], flush=True)
            is_fine = is_fine and not faults
        print("\n" + "\n".join(lines))
    sys.exit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
