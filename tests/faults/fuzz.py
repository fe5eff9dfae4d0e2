"""Bad input, generated: configurations, command lines and files that nobody would write by hand.

    python -m tests.faults.fuzz --configs 2000 --files 500 --seed 0
    python -m tests.faults.fuzz --configs 0 --files 0 --paths --numbers     special files and names; extreme numbers
    python -m tests.faults.fuzz --seed 0 --only config/17      one case again, with all that it said

Every case is one command of the program, in a process and a folder of its own. It ends well, or is refused: exit code 2
and one sentence. No traceback, no hang, and not a file changed outside the run's folder; where it is refused, none at
all. The number of a case and the seed decide all about it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream import cli

from .runs import in_session

TIMEOUT_SECONDS = 90.0
"""After which a case counts as hung."""
LASTING_SECONDS = 1.5
"""How long one that has begun to train, and may take for ever, is watched."""
MEMORY_BYTES = 6 << 30
"""Of addresses, for each process of a case."""
BEGUN = "; writing "
"""In what `slipstream train` says when it has checked all it can, and starts the stages."""
EXCUSES = {
    "diverged": ("not finite", "inf or nan", " is nan", " is inf", " is -inf"),
    "no memory": ("MemoryError", "can't allocate memory", "has no room for", "can't start new thread"),
}
"""One sentence and exit code 1, for reasons that no check could have known: it began, and what it says of them."""


@dataclass(frozen=True)
class Case:
    """One command, and what it may do."""

    what: str
    """In words."""
    arguments: list[str]
    may_write: tuple[str, ...] = ("here/runs",)
    """Where, when it is not refused; from the case's folder."""
    codes: tuple[int, ...] = (0, 2)
    """How it may end."""
    must_say: str = ""
    """Somewhere in its output, if it ends with 0."""
    may_last: bool = False
    """It asks for so much that it need not end."""
    timeout: float = TIMEOUT_SECONDS


@dataclass(frozen=True)
class Outcome:
    code: int | None
    """None: it was ended, for it took too long."""
    out: str
    err: str
    seconds: float
    has_begun: bool
    left_over: int
    """Processes that were still there when the first one had ended."""


Make = Callable[[random.Random, Path, Path], Case]
"""From dice, the case's folder (the command runs in `here` below it) and the templates."""


# ---- one case


def play(case: Case, folder: Path) -> Outcome:
    """In a fork, for torch takes seconds to import; in a session of its own, so that all of it can be ended."""
    out, err = folder.with_suffix(".out"), folder.with_suffix(".err")
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_program(case.arguments, folder, out, err)
    code, begun_at = None, None
    while code is None:
        done, status = os.waitpid(child, os.WNOHANG)
        now = time.monotonic()
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if begun_at is None and BEGUN in out.read_text(errors="replace") if out.exists() else False:
            begun_at = now
        if now - started > case.timeout or (case.may_last and begun_at and now - begun_at > LASTING_SECONDS):
            break
        time.sleep(0.005)
    seconds = time.monotonic() - started
    left_over = 0 if code is None else _left_over(child)
    if code is None or left_over:
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    said, complained = out.read_text(errors="replace"), err.read_text(errors="replace")
    return Outcome(code, said, complained, seconds, BEGUN in said, left_over)


def _be_the_program(arguments: Sequence[str], folder: Path, out: Path, err: Path) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(folder / "here")
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        temporary = folder.with_suffix(".tmp")
        temporary.mkdir()
        os.environ |= {"TMPDIR": str(temporary), "HOME": str(folder / "home")}
        tempfile.tempdir = None
        code = cli.run(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _left_over(session: int) -> int:
    """Stages end themselves when the process that started them is gone, but not in the same moment."""
    deadline = time.monotonic() + 20
    while (alive := len(in_session(session))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


# ---- what counts as a violation


def violations(case: Case, outcome: Outcome, changes: Sequence[str]) -> list[str]:
    found = []
    if "Traceback" in outcome.out + outcome.err:
        found.append("a traceback")
    if outcome.left_over:
        found.append(f"{outcome.left_over} processes were left behind")
    if outcome.code is None:
        if not (case.may_last and outcome.has_begun):
            found.append(f"a hang: it was ended after {outcome.seconds:.0f} s")
    elif outcome.code == 2:
        lines = outcome.err.splitlines()
        if len(lines) != 1 or not lines[0].startswith("slipstream: "):
            found.append(f"a refusal of {len(lines)} lines instead of one sentence")
        if changes:
            found.append(f"a refusal that has changed {', '.join(changes[:3])}")
    elif excuse(outcome):
        pass
    elif outcome.code not in case.codes:
        found.append(f"exit code {outcome.code}")
    elif case.must_say not in outcome.out:
        found.append(f"it says nothing of {case.must_say!r}")
    elsewhere = [path for path in changes if not _may_change(path, case.may_write)]
    if elsewhere and outcome.code != 2:
        found.append(f"files changed where it had no business: {', '.join(elsewhere[:3])}")
    if outcome.code == 2 and 2 not in case.codes:
        found.append("a refusal of what is right")
    return found


def _may_change(path: str, may_write: Sequence[str]) -> bool:
    """What is in these folders, and the folders that they are in, which may have had to be made."""
    return any(path.startswith(folder) or folder.startswith(f"{path}/") for folder in may_write)


def excuse(outcome: Outcome) -> str:
    said = outcome.err if outcome.code == 1 and outcome.has_begun and outcome.err.count("\n") == 1 else ""
    return next((name for name, words in EXCUSES.items() if any(word in said for word in words)), "")


def snapshot(*folders: Path) -> dict[str, tuple[object, ...]]:
    """What every file is, by its path. Of folders only that they are there: a new run changes their times."""
    found: dict[str, tuple[object, ...]] = {}
    for folder in folders:
        for where, names, files in os.walk(folder):
            for name in names + files:
                path = Path(where, name)
                about = path.lstat()
                kind = stat.S_IFMT(about.st_mode)
                content: object = None
                if kind == stat.S_IFREG:
                    content = (about.st_size, about.st_mtime_ns, hashlib.sha256(_bytes(path)).hexdigest())
                elif kind == stat.S_IFLNK:
                    content = os.readlink(path)
                found[str(path.relative_to(folder))] = (kind, stat.S_IMODE(about.st_mode), content)
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.stat().st_size < 1 << 20 else b""
    except OSError:  # one that a case has made unreadable
        return b""


def differences(before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]) -> list[str]:
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


# ---- all cases


@dataclass
class Tally:
    """What became of the cases of one kind."""

    ended: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0


def outcome_in_words(outcome: Outcome) -> str:
    if outcome.code is None:
        return "still going" if outcome.has_begun else "hung"
    return {0: "ended well", 2: "refused"}.get(outcome.code, excuse(outcome) or f"exit {outcome.code}")


class Fuzzer:
    def __init__(self, seed: int, work: Path, templates: Path) -> None:
        self._seed, self._work, self._templates = seed, work, templates
        self._before = snapshot(templates)
        self.tallies: dict[str, Tally] = {}
        self.num_violations = 0

    def run(self, kind: str, number: int, make: Make, loud: bool = False) -> None:
        name = f"{kind}/{number}"
        folder = self._work / name.replace("/", "-")
        (folder / "here").mkdir(parents=True)
        (folder / "home").mkdir()
        case = make(random.Random(f"{self._seed}/{name}"), folder, self._templates)
        before = snapshot(folder)
        outcome = play(case, folder)
        changes = differences(before, snapshot(folder))
        found = violations(case, outcome, changes)
        if self._before != snapshot(self._templates):
            found.append("files changed that are not even the case's")
            self._before = snapshot(self._templates)
        group = case.what.partition(":")[0]
        tally = self.tallies.setdefault(group, Tally())
        tally.ended["violations" if found else outcome_in_words(outcome)] += 1
        tally.slowest = max(tally.slowest, outcome.seconds)
        if found or loud:
            self.num_violations += bool(found)
            self._show(name, case, outcome, found)
        if not loud:
            for path in (folder, folder.with_suffix(".tmp")):
                shutil.rmtree(path, ignore_errors=True)
            for suffix in (".out", ".err"):
                folder.with_suffix(suffix).unlink(missing_ok=True)

    def _show(self, name: str, case: Case, outcome: Outcome, found: Sequence[str]) -> None:
        words = "; ".join(found) or outcome_in_words(outcome)
        print(f"\n{name}: {words}\n  {case.what}\n  slipstream {ascii(case.arguments)[:1500]}")
        for line in (outcome.out.splitlines() + outcome.err.splitlines())[-12:]:
            print(f"  | {ascii(line)[:400]}")
        print(f"  again: python -m tests.faults.fuzz --seed {self._seed} --only {name}", flush=True)

    def table(self) -> str:
        columns = ["ended well", "refused", *EXCUSES, "still going"]
        rows = [["cases", "number", *columns, "violations", "slowest"]]
        total: Counter[str] = Counter()
        for group, tally in sorted(self.tallies.items()):
            total += tally.ended
            rows.append([group, *self._numbers(tally.ended, columns), f"{tally.slowest:.1f} s"])
        rows.append(["all", *self._numbers(total, columns), ""])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)

    @staticmethod
    def _numbers(ended: Counter[str], columns: Sequence[str]) -> list[str]:
        fine = [ended[column] for column in columns]
        return [str(ended.total()), *map(str, fine), str(ended.total() - sum(fine))]


def _get_ready(work: Path) -> None:
    """Imports, once, what cases would import each for itself. One that never had a second thread is safe to fork."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    os.environ["MPLCONFIGDIR"] = str(work / "matplotlib")  # whose cache of fonts is nobody's violation
    for name in (
        "train.trainer",
        "tools.study.runner",
        "cli.report",
        "cli.plan",
        "cli.profile",
        "cli.schedule",
        "data",
    ):
        importlib.import_module(f"slipstream.{name}")
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    for name in ("matplotlib.pyplot", "pytorch_optimizer", "pyarrow.parquet", "tokenizers", "torch._dynamo"):
        importlib.import_module(name)
    rehearsal = work / "rehearsal"
    rehearsal.mkdir()
    rows = [{"step": step, "loss": 1.0, "tokens": step} for step in (1, 2)]
    (rehearsal / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    importlib.import_module("slipstream.observe.plots").draw_losses(rehearsal)  # reads fonts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", type=int, default=2000, help="configurations and command lines to generate")
    parser.add_argument("--files", type=int, default=500, help="files to spoil")
    parser.add_argument("--paths", action="store_true", help="also every special file and name for every path")
    parser.add_argument("--numbers", action="store_true", help="also every number without bound in every field")
    parser.add_argument("--every", type=int, default=1, help="of paths and numbers, every so manieth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case of each kind")
    parser.add_argument("--only", default="", help="one case, such as config/17: shows it, and keeps its folder")
    given = parser.parse_args()

    from .spoilt_configs import make_config
    from .spoilt_files import make_file, make_templates
    from .spoilt_paths import ENUMERATED

    work = Path(tempfile.mkdtemp(prefix="slipstream-fuzz-"))
    _get_ready(work)
    templates = work / "templates"
    count = {"path": given.paths, "number": given.numbers}
    jobs: dict[str, list[Make]] = {"config": [make_config] * given.configs, "file": [make_file] * given.files}
    jobs |= {kind: makes if count[kind] else [] for kind, makes in ENUMERATED.items()}
    try:
        make_templates(templates)
        fuzzer = Fuzzer(given.seed, work, templates)
        if given.only:
            kind, _, number = given.only.partition("/")
            make = {"config": make_config, "file": make_file}.get(kind) or ENUMERATED[kind][int(number)]
            fuzzer.run(kind, int(number), make, loud=True)
            print(f"  in {work}")
            return min(fuzzer.num_violations, 1)
        began = time.monotonic()
        for kind, makes in jobs.items():
            step, first = (1, given.start) if kind in ("config", "file") else (given.every, 0)
            for done in range(0, len(makes), step):
                fuzzer.run(kind, first + done, makes[done])
                if (done + 1) % 100 == 0 or done + step >= len(makes):
                    seconds, so_far = time.monotonic() - began, f"{kind} {done + 1}/{len(makes)}"
                    print(f"{so_far}, {fuzzer.num_violations} violations, {seconds:.0f} s", flush=True)
    finally:
        if not given.only:
            shutil.rmtree(work, ignore_errors=True)
    print(f"\nseed {given.seed}\n{fuzzer.table()}")
    return min(fuzzer.num_violations, 1)


if __name__ == "__main__":
    sys.exit(main())
