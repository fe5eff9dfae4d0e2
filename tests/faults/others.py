"""Faults other than kills, each put into a training of its own: python -m tests.faults.others [NAME ...]"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.checkpoint import CheckpointError, Store

from .runs import Run, Shape, committed, differences, undisturbed, until

SHAPE = Shape(stages=4, steps=60, every=3, timeout_seconds=5.0)
FAULTY_SECONDS = 1.5
"""From the first save that fails; the training must last longer."""


class Skipped(Exception):
    """The reason."""


@dataclass
class Case:
    """One training, and what was wrong about it."""

    name: str
    folder: Path
    faults: list[str]
    shape: Shape = SHAPE
    num_starts: int = 0
    logs: Path | None = None
    """By default, beside the run."""

    @property
    def run_folder(self) -> Path:
        return self.folder / self.name

    @contextmanager
    def start(self) -> Iterator[Run]:
        log = (self.logs or self.folder / "logs") / f"{self.name}.{self.num_starts}.log"
        self.num_starts += 1
        run = Run(self.shape.arguments(self.folder, self.name), self.run_folder, log)
        try:
            yield run
        finally:
            run.end()

    def expect(self, is_so: bool, what: str) -> None:
        if not is_so:
            self.faults.append(f"not so: {what}")

    def finish(self) -> str:
        """Goes on to the end. What it said first."""
        with self.start() as run:
            code = run.wait(120)
            self.expect(code == 0, f"the run that goes on ends with 0 (it is {code}: {run.said[-300:]})")
            return run.said

    def check_committed(self) -> list[int]:
        """All that is committed is intact."""
        store = Store(self.run_folder / "checkpoints")
        steps = committed(self.run_folder)
        for step in steps:
            with suppress(FileNotFoundError):
                try:
                    store.open(step)
                except CheckpointError as damage:
                    if step in committed(self.run_folder):  # else it was pruned meanwhile, by rule
                        self.faults.append(f"the checkpoint of step {step} is damaged: {damage}")
        return steps


def reach(run: Run, num_rows: int) -> None:
    until(lambda: run.num_rows() >= num_rows or run.code is not None, 120, f"step {num_rows}")
    if run.code is not None:
        raise RuntimeError(f"the run ended too early: {run.said[-500:]}")


def first_line(said: str, pattern: str) -> str:
    return next((line for line in said.splitlines() if re.search(pattern, line)), "(nothing)")


# ---- signals


def sigterm(case: Case) -> str:
    """Saves, leaves with success, and goes on."""
    with case.start() as run:
        reach(run, 7)
        began = time.monotonic()
        os.kill(run.pid, signal.SIGTERM)
        code = run.wait(60)
        seconds = time.monotonic() - began
        said = first_line(run.said, "^stopped after step")
    stopped = re.search(r"stopped after step (\d+), and saved", said)
    case.expect(code == 0, f"exit code 0 (it is {code})")
    case.expect(stopped is not None and int(stopped[1]) == case.check_committed()[-1], f"saved ({said})")
    again = case.finish()
    case.expect(stopped is not None and f"step {stopped[1]}\n" in again, "goes on from where it stopped")
    return f"{said} (after {seconds:.1f} s)"


def sigstop(case: Case) -> str:
    """A stage that falls silent is found in time, and named; nothing hangs."""
    with case.start() as run:
        reach(run, 7)
        began = time.monotonic()
        os.kill(run.stages()["stage-2.replica-0"], signal.SIGSTOP)
        code = run.wait(60)
        seconds = time.monotonic() - began
        said = first_line(run.said, "^slipstream: ")
    case.expect(code == 1, f"exit code 1 (it is {code})")
    case.expect(seconds < case.shape.timeout_seconds + 10, f"found within the time-out ({seconds:.1f} s)")
    named = (
        r"stage 2 has been silent for 5 s: stage [13] was waiting for the (gradient|activations) of [13][BF]\d+@v\d+"
    )
    case.expect(re.search(named, said) is not None, f"named, with what was waited for ({said})")
    left = sorted(path.name for path in case.run_folder.glob("*.actions.txt"))
    expected = [f"stage-{stage}.actions.txt" for stage in (0, 1, 3)]
    case.expect(left == expected, f"the others leave their last actions ({left})")
    case.finish()
    return f"{said} (after {seconds:.1f} s; {', '.join(left)})"


# ---- disks


def _while_faulty(case: Case, run: Run, fault: Callable[[], None], mend: Callable[[], None]) -> str:
    """The fault lasts for some updates; training does not mind, and saves again afterwards."""
    reach(run, 7)
    fault()
    try:
        until(lambda: "has no checkpoint" in run.said or run.code is not None, 60, "a save that fails")
        time.sleep(FAULTY_SECONDS)
        case.expect(run.code is None, f"training goes on ({run.said[-300:]})")
        before = case.check_committed()
        case.expect(len(before) > 0, "earlier checkpoints stay")
    finally:
        mend()
    code = run.wait(120)
    case.expect(code == 0, f"exit code 0 (it is {code}: {run.said[-300:]})")
    after = case.check_committed()
    case.expect(after[-1] == case.shape.steps, f"later checkpoints are saved again ({after})")
    case.expect("lacks its last rows" not in run.said, "all rows are written in the end")
    return first_line(run.said, "has no checkpoint: ")


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise Skipped(f"cannot mount here: {done.stderr.strip()}")


def full_disk(case: Case) -> str:
    """The whole run on a small disk, which another file fills."""
    place = case.folder / "small disk"
    place.mkdir()
    _mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place))
    small = Case(case.name, place, case.faults, logs=case.folder / "logs")
    filler = place / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    try:
        with small.start() as run:
            said = _while_faulty(small, run, fill, filler.unlink)
            case.expect("metrics.jsonl cannot be written (No space left on device)" in run.said, "rows are kept")
        subprocess.run(["cp", "-r", str(small.run_folder), str(case.run_folder)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    return said


def file_limit(case: Case) -> str:
    """A disk that takes no more than 100 kB per file, for those who may not mount one."""

    def limit(size: int) -> None:
        for pid in run.stages().values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    with case.start() as run:
        return _while_faulty(case, run, lambda: limit(100_000), lambda: limit(resource.RLIM_INFINITY))


def read_only(case: Case) -> str:
    """The folder of checkpoints cannot be written for a while."""
    place = case.run_folder / "checkpoints"

    def protect() -> None:
        if os.geteuid() != 0:
            place.chmod(0o555)
            return
        _mount("--bind", str(place), str(place))  # permissions mean nothing to root
        _mount("-o", "remount,bind,ro", str(place))

    def permit() -> None:
        if os.geteuid() != 0:
            place.chmod(0o755)
        else:
            subprocess.run(["umount", "-l", str(place)], check=True)

    with case.start() as run:
        return _while_faulty(case, run, protect, permit)


# ---- damage


def _damaged(case: Case, damage: Callable[[Path], None]) -> str:
    """The newest checkpoint is named and left alone, and the one before it taken."""
    with case.start() as run:
        reach(run, 7)
        os.kill(run.pid, signal.SIGTERM)
        case.expect(run.wait(60) == 0 and ", and saved: " in run.said, f"SIGTERM saves ({run.said[-300:]})")
    *_, before, newest = committed(case.run_folder)
    file = case.run_folder / "checkpoints" / f"step-{newest:08d}" / "stage-1.safetensors"
    damage(file)
    again = case.finish()
    said = first_line(again, "the checkpoint before it is taken")
    case.expect(said.startswith(str(file)), f"the file is named ({said})")
    case.expect(f"resuming from the checkpoint of step {before}\n" in again, f"the one before is taken ({again[:300]})")
    return said.replace(str(case.folder), "RUNS")


def truncated(case: Case) -> str:
    return _damaged(case, lambda file: os.truncate(file, file.stat().st_size // 2))


def flipped_bit(case: Case) -> str:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    return _damaged(case, flip)


CASES = {
    function.__name__: function
    for function in (sigterm, sigstop, full_disk, file_limit, read_only, truncated, flipped_bit)
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.others", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--folder", type=Path, help="to keep what the runs leave behind")
    given = parser.parse_args()
    is_fine = True
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = given.folder or Path(temporary)
        expected = undisturbed(SHAPE, folder)
        for name in given.names or CASES:
            case = Case(name, folder, [])
            began = time.monotonic()
            try:
                said = CASES[name](case)
                case.faults += differences(case.run_folder, expected)
            except Skipped as reason:
                print(f"{name:<12} skipped: {reason}", flush=True)
                continue
            except (RuntimeError, TimeoutError) as error:
                said = str(error)
                case.faults.append(type(error).__name__)
            verdict = "WRONG: " + "; ".join(case.faults) if case.faults else "bitwise the same"
            print(f"{name:<12} {verdict}; {time.monotonic() - began:.0f} s; said: {said}", flush=True)
            is_fine = is_fine and not case.faults
    sys.exit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
