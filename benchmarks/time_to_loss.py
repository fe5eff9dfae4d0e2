"""Held-out loss against the clock: synchronous pipelines beside an asynchronous one with error feedback.

    python benchmarks/time_to_loss.py --output benchmarks/time_to_loss               two cores, less than an hour
    python benchmarks/time_to_loss.py --device cuda --data PREFIX --output ...       one GPU, cut into slices

The rules:
- Many small steps, because a delay is one of a step: it costs little where a step moves the weights little. On two
  cores P = 2 and m = 2; on a GPU P = 4 and m = 4, a model of 123M parameters, and token shards that `slipstream prepare
  --output PREFIX` wrote.
- The contenders differ in the schedule, in optimizer.error_feedback, and in train.steps: a delayed run gets more of
  them (MORE_STEPS), because it may need more tokens to the same loss, and only time counts. Weights, data, rate and
  everything else are the same; the rate is a round number near the synchronous run's best.
- "1F1B" is slipstream's on CPUs. On a GPU it is torch's own, and two more of torch's run beside it
  (benchmarks/torch_training.py): ZBVZeroBubble, torch's fastest in benchmarks/gpu_pipeline_h200_2026-11-17, and
  Interleaved1F1B. Layers are compiled, but not for ZBVZeroBubble: it computes the gradients of inputs and of weights
  one after the other, which torch cannot do with compiled layers (pytorch/pytorch#161904).
- On CPUs the contenders of a seed run in turns of a few seconds: one computes while the others are stopped (SIGSTOP),
  and only the time in which a run computes counts. So a disturbance of the machine hits all of them alike. Other
  processes, or other guests of the machine's host, may take the cores for a while, which hits a full pipeline harder
  than one with idle time. The steps of such a turn (TAKEN) count with the time per step of the nearest other turns of
  the run.
- On a GPU one run follows the other; `--together` runs all seeds of a contender at once, each on slices of its own.
- Neither starting the processes nor evaluations count: of slipstream's time, each evaluation takes off what it computes
  on its slowest stage.
- Time to loss: when a run's held-out loss first comes down to the final loss of the 1F1B run of its seed, between
  evaluations in a straight line; "never" is an answer. The 1F1B run itself may be there before its end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from slipstream.errors import RunFailure
from slipstream.tools.bench.slices import sliced

SYNCHRONOUS, INTERLEAVED, ZERO_BUBBLE, DELAYED = "1F1B", "torch Interleaved1F1B", "torch ZBVZeroBubble", "2BW + EF"
COLOURS = {SYNCHRONOUS: "#6b7280", INTERLEAVED: "#53966a", ZERO_BUBBLE: "#3a84c4", DELAYED: "#e8952c"}
MORE_STEPS = {"cpu": 1.15, "cuda": 1.1}
"""Steps of a delayed run, as a multiple. On CPUs with 1.1, one seed of three ended 0.0002 above 1F1B's final loss."""
NUM_EVALUATIONS = 25
STEPS = {"cpu": 5000, "cuda": 10_000}
SEEDS = {"cpu": [0, 1, 2], "cuda": [0, 1]}
TURN_SECONDS = 5.0
TAKEN = 0.03
"""Share of the machine that others may take in a turn. With more, the turn is disturbed."""
NEAREST_TURNS = 10
"""Undisturbed turns that a disturbed one is compared with. If a run has fewer, all its turns count as they are."""
SHARE = 12
"""Percent of the GPU for each process: with more of it the clock falls where all are busy."""
SETTINGS = {
    "cpu": {
        "model.dim": 64,
        "model.hidden-dim": 128,
        "model.sequence-length": 128,
        "train.device": "cpu",
        "train.microbatch-size": 6,
        "optimizer.learning-rate": 0.01,
        "optimizer.final-fraction": 0,
        "pipeline.stages": 2,
        "pipeline.microbatches": 2,
        "evaluation.batches": 64,
    },
    "cuda": {
        "model.vocab-size": 16384,
        "model.dim": 1024,
        "model.num-layers": 7,
        "model.num-heads": 8,
        "model.num-kv-heads": 8,
        "model.hidden-dim": 2816,
        "model.sequence-length": 512,
        "train.device": "cuda",
        "train.compute-dtype": "bfloat16",
        "train.microbatch-size": 4,
        "optimizer.learning-rate": 0.005,
        "optimizer.adamw-learning-rate": 0.001,
        "optimizer.final-fraction": 0,
        "optimizer.newton-schulz-dtype": "bfloat16",
        "pipeline.stages": 4,
        "pipeline.microbatches": 4,
        "evaluation.batches": 16,
    },
}
DELAYED_OPTIONS = ["--pipeline.schedule", "two_bw", "--optimizer.error-feedback", "1"]
SYNCHRONOUS_OPTIONS = ["--pipeline.schedule", "one_f_one_b", "--optimizer.error-feedback", "0"]
COMPILED = "--train.compile"


@dataclass(frozen=True)
class Run:
    contender: str
    seed: int
    steps: int
    seconds: list[float]
    """At each evaluation, from the start of the run."""
    losses: list[float]
    taken: float = 0.0
    """The share of this machine's time that went to other processes and other guests meanwhile, as Linux counts it."""
    disturbed: float = 0.0
    """Share of its turns that count with the time per step of the others."""


@dataclass(frozen=True)
class Turn:
    """A time in which a run computed."""

    begin: float
    end: float
    taken: float
    """Share of the machine that went to others."""


def contenders(device: str, num_steps: int) -> dict[str, tuple[list[str], list[str], int]]:
    """By name: what runs it, its options, and its steps."""
    own = ["-m", "slipstream", "train"]
    torchs = str(Path(__file__).with_name("torch_training.py"))
    more = round(MORE_STEPS[device] * num_steps)
    if device == "cpu":
        return {SYNCHRONOUS: (own, SYNCHRONOUS_OPTIONS, num_steps), DELAYED: (own, DELAYED_OPTIONS, more)}
    return {
        SYNCHRONOUS: ([torchs, "Schedule1F1B"], [*SYNCHRONOUS_OPTIONS, COMPILED], num_steps),
        INTERLEAVED: ([torchs, "ScheduleInterleaved1F1B"], [*SYNCHRONOUS_OPTIONS, COMPILED], num_steps),
        ZERO_BUBBLE: ([torchs, "ScheduleZBVZeroBubble"], SYNCHRONOUS_OPTIONS, num_steps),
        DELAYED: (own, [*DELAYED_OPTIONS, COMPILED], more),
    }


def settings(device: str, data: str | None) -> list[str]:
    words = [str(word) for name, value in SETTINGS[device].items() for word in (f"--{name}", value)]
    words += ["--train.no-track-alignment", "--checkpoint.every-steps", "0"]
    if data is not None:
        words += ["--data.sources", f"{data}.train.*.bin", "--data.validation-sources", f"{data}.validation.*.bin"]
    return words + (["--pipeline.share-gpu"] if device == "cuda" else [])


class Process:
    """One training, and the intervals in which it was allowed to compute."""

    def __init__(
        self, seed: int, contender: str, runner: list[str], options: list[str], num_steps: int, on_cpu: bool
    ) -> None:
        self.seed, self.contender, self.num_steps, self.on_cpu = seed, contender, num_steps, on_cpu
        self._folder = tempfile.TemporaryDirectory()
        self.rows_at = Path(self._folder.name) / "run" / "metrics.jsonl"
        command = [sys.executable, *runner, "--run.folder", self._folder.name, "--run.name", "run", *options]
        command += ["--train.seed", str(seed), "--train.steps", str(num_steps)]
        command += ["--evaluation.every-steps", str(max(1, num_steps // NUM_EVALUATIONS))]
        self._said = (Path(self._folder.name) / "said.txt").open("w+", encoding="utf-8")
        self._turns: list[Turn] = []
        self._process = subprocess.Popen(command, stdout=self._said, stderr=self._said, start_new_session=True)
        self._began, self._before = time.time(), _ticks(self._process.pid)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def compute(self, seconds: float) -> None:
        """Lets it compute for so long, or until it has ended."""
        if self._turns:  # it is stopped
            os.killpg(self._process.pid, signal.SIGCONT)
            self._began, self._before = time.time(), _ticks(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        ended, taken, total = time.time(), 0, 1
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGSTOP)
            after = _ticks(self._process.pid)
            taken, total = (later - earlier for earlier, later in zip(self._before, after, strict=True))
        self._turns.append(Turn(self._began, ended, taken / max(1, total)))
        _tell_progress(self.contender, self.seed, self.num_steps, self.rows_at)

    def result(self) -> Run:
        """The run, once it has ended; its clock starts with the end of its first step."""
        self._said.seek(0)
        if self._process.returncode:
            raise RunFailure(f"{self.contender}, seed {self.seed}: {self._said.read()[-1000:]}")
        rows = [json.loads(line) for line in self.rows_at.read_text(encoding="utf-8").splitlines()]
        self._said.close()
        self._folder.cleanup()
        seconds, losses, weights = [], [], [1.0] * len(self._turns)
        if "time" in rows[0]:
            moments = [row["time"] for row in rows]
            if self.on_cpu:  # the run may have been stopped in the middle of an evaluation
                weights, evaluation = weights_of(self._turns, moments), evaluation_seconds(rows, statistics.median)
            else:  # the first one compiles
                evaluation = evaluation_seconds(rows, statistics.fmean)
            computed = [computed_until(moment, self._turns, weights) for moment in moments]
            counts = accumulate("val_loss" in row for row in rows)
            clocks = [clock - computed[0] - n * evaluation for clock, n in zip(computed, counts, strict=True)]
        else:  # torch's rows have the seconds since the one before
            clocks = list(accumulate(row["seconds"] for row in rows))
        for clock, row in zip(clocks, rows, strict=True):
            if "val_loss" in row:
                seconds.append(clock)
                losses.append(row["val_loss"])
        lengths = [turn.end - turn.begin for turn in self._turns]
        taken = sum(turn.taken * length for turn, length in zip(self._turns, lengths, strict=True)) / sum(lengths)
        disturbed = statistics.fmean(weight != 1 for weight in weights)
        run = Run(self.contender, self.seed, self.num_steps, seconds, losses, taken, disturbed)
        print(
            f"{self.contender}, seed {self.seed}: {self.num_steps} steps, {seconds[-1]:.0f} s of {sum(lengths):.0f} s, "
            f"loss {losses[-1]:.4f}, {100 * taken:.0f} % of the machine taken by others, "
            f"{100 * disturbed:.0f} % of the turns count as the others",
            flush=True,
        )
        return run

    def kill(self) -> None:
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)


def weights_of(turns: list[Turn], moments: list[float]) -> list[float]:
    """Returns what a second of each turn counts: 1, or in a disturbed turn as much as its steps take in the nearest
    undisturbed ones. `moments` are the ends of the steps."""
    first, last = moments[0], moments[-1]
    lengths = [max(0.0, min(turn.end, last) - max(turn.begin, first)) for turn in turns]
    counts = [bisect(moments, turn.end) - bisect(moments, max(turn.begin, first)) for turn in turns]
    clean = [i for i, turn in enumerate(turns) if turn.taken <= TAKEN and counts[i]]

    def weight(i: int) -> float:
        if turns[i].taken <= TAKEN or not lengths[i] or len(clean) < NEAREST_TURNS:
            return 1.0
        nearest = sorted(clean, key=lambda other: abs(other - i))[:NEAREST_TURNS]
        step = sum(lengths[near] for near in nearest) / sum(counts[near] for near in nearest)
        return step * counts[i] / lengths[i]

    return [weight(i) for i in range(len(turns))]


def computed_until(moment: float, turns: list[Turn], weights: list[float]) -> float:
    return sum(
        weight * max(0.0, min(turn.end, moment) - turn.begin) for turn, weight in zip(turns, weights, strict=True)
    )


def evaluation_seconds(rows: list[dict[str, Any]], average: Callable[[Iterable[float]], float]) -> float:
    """What an evaluation computes on its slowest stage. A stage's seconds are in one of the rows around the evaluation.
    Those of the last one come after all rows."""
    ends = [index for index, row in enumerate(rows) if "val_loss" in row]
    middles = [(before + after) // 2 for before, after in pairwise([-1, *ends])]
    sums = []
    for start, end in pairwise(middles):
        splits = [row["stage_seconds"] for row in rows[start:end] if "stage_seconds" in row]
        sums.append([sum(stage["evaluation"] for stage in column) for column in zip(*splits, strict=True)])
    return max((average(column) for column in zip(*sums, strict=True)), default=0.0)


def train_in_turns(processes: list[Process]) -> list[Run]:
    try:
        while running := [process for process in processes if process.is_running]:
            for process in running:
                process.compute(TURN_SECONDS if process.on_cpu else 60.0)
        return [process.result() for process in processes]
    finally:
        for process in processes:
            process.kill()


def train(seed: int, contender: str, runner: list[str], options: list[str], num_steps: int) -> Run:
    (run,) = train_in_turns([Process(seed, contender, runner, options, num_steps, on_cpu=False)])
    return run


def _ticks(group: int) -> tuple[int, int]:
    """Returns the time of the machine that went to others than this group of processes, and all of its time."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").split("\n")[0]
        user, nice, system, idle, waiting, *rest = map(int, first.split()[1:9])
    except OSError:
        return 0, 0
    used = user + nice + system + sum(rest)  # interrupts, and what other guests took
    own = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            own += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return used - own, used + idle + waiting


def _tell_progress(contender: str, seed: int, num_steps: int, rows: Path) -> None:
    if not (sys.stderr.isatty() and rows.exists()):
        return
    lines = rows.read_bytes().rstrip().rsplit(b"\n", 1)
    step = json.loads(lines[-1])["step"] if lines[-1].endswith(b"}") else 0
    print(f"{contender}, seed {seed}: step {step}/{num_steps} ", end="\r", file=sys.stderr)


def time_to(loss: float, run: Run) -> float | None:
    """Seconds until the held-out loss first was that low."""
    points = list(zip(run.seconds, run.losses, strict=True))
    for (earlier, higher), (later, lower) in pairwise(points):
        if lower <= loss:
            return earlier + (later - earlier) * max(0.0, higher - loss) / max(higher - lower, 1e-12)
    return None


def table(runs: list[Run]) -> str:
    finals = {run.seed: run.losses[-1] for run in runs if run.contender == SYNCHRONOUS}
    firsts = {run.seed: time_to(run.losses[-1], run) for run in runs if run.contender == SYNCHRONOUS}
    lines = [
        "| schedule | steps | seconds | final held-out loss | to 1F1B's final loss, s | as soon as 1F1B, times |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for contender in dict.fromkeys(run.contender for run in runs if run.seed in finals):
        own = [run for run in runs if run.contender == contender and run.seed in finals]
        reached = [(seconds, firsts[run.seed]) for run in own if (seconds := time_to(finals[run.seed], run))]
        never = f", never for {len(own) - len(reached)} of {len(own)} seeds" if len(reached) < len(own) else ""
        lines.append(
            f"| {contender} | {own[0].steps:,} | {_spread([run.seconds[-1] for run in own], '.0f')} | "
            f"{_spread([run.losses[-1] for run in own], '.4f')} | "
            f"{_spread([seconds for seconds, _ in reached], '.0f')}{never} | "
            f"{_spread([first / seconds for seconds, first in reached if first], '.2f')} |"
        )
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    if not values:
        return ""
    middle = format(statistics.median(values), form)
    return f"{middle} ({min(values):{form}} - {max(values):{form}})" if len(values) > 1 else middle


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for contender in dict.fromkeys(run.contender for run in runs):
        for i, run in enumerate(run for run in runs if run.contender == contender):
            axes.plot(
                run.seconds, run.losses, color=COLOURS[contender], marker=".", label=None if i else contender, alpha=0.8
            )
    for run in runs:
        if run.contender == SYNCHRONOUS:
            axes.axhline(run.losses[-1], color=COLOURS[SYNCHRONOUS], linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out loss, nats per token")
    lowest = min(min(run.losses) for run in runs)
    axes.set_ylim(lowest - 0.02 * lowest, 1.5 * lowest)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("The same loss, sooner. Dotted: where the runs of 1F1B end")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def earlier_runs(output: Path | None) -> list[Run]:
    """What a command before this one, with the same output, has left: it is not made again."""
    path = output and output.with_suffix(".json")
    if path is None or not path.exists():
        return []
    try:
        return [Run(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise RunFailure(
            f"{path} was not written by this script as it is now ({error}): give another --output"
        ) from error


def leave_behind(runs: list[Run], output: Path | None) -> None:
    if output is None:
        return
    output.with_suffix(".json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    output.with_suffix(".md").write_text(table(runs) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:  # the same command draws later, where it is installed
        draw(runs, output.with_suffix(".png"))


def measure(given: argparse.Namespace) -> list[Run]:
    seeds, fixed = given.seeds or SEEDS[given.device], settings(given.device, given.data)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    turns = contenders(given.device, given.steps or STEPS[given.device])
    runs = earlier_runs(given.output)
    if others := {run.steps for run in runs} - {num_steps for _, _, num_steps in turns.values()}:
        raise RunFailure(f"{given.output}.json has runs of {min(others)} steps: give --steps, or another --output")
    wanted = [name for name in turns if given.contenders is None or name in given.contenders]
    done = {(run.contender, run.seed) for run in runs}
    batches = [seeds] if given.together else [[seed] for seed in seeds]
    pairs = [(name, [seed for seed in batch if (name, seed) not in done]) for batch in batches for name in wanted]
    jobs = [(name, left) for name, left in pairs if left]
    if not jobs:
        leave_behind(runs, given.output)
        return runs
    if given.device == "cpu":
        for seed in seeds:
            contenders_left = [name for name, left in jobs if seed in left]
            processes = []
            for name in contenders_left:
                runner, options, num_steps = turns[name]
                processes.append(Process(seed, name, runner, [*fixed, *options], num_steps, on_cpu=True))
                processes[-1].compute(TURN_SECONDS)
            runs += train_in_turns(processes)
            leave_behind(runs, given.output)
        return runs
    at_a_time = len(seeds) if given.together else 1
    with sliced(SHARE), ThreadPoolExecutor(at_a_time) as pool:
        for contender, left in jobs:
            runner, options, num_steps = turns[contender]
            job = partial(train, contender=contender, runner=runner, options=[*fixed, *options], num_steps=num_steps)
            runs += pool.map(job, left)
            leave_behind(runs, given.output)  # after every turn: whoever stops it keeps what there is
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SETTINGS), default="cpu")
    parser.add_argument("--data", help="beginning of the names of token shards; on CPUs, the built-in text if left out")
    parser.add_argument("--steps", type=int, help="of a synchronous run")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--together", action="store_true", help="all seeds of a contender at a time")
    parser.add_argument(
        "--output", type=Path, help="beginning of the names of a .json, a .md and a .png; what is there is gone on with"
    )
    given = parser.parse_args()
    if given.device == "cuda" and given.data is None:
        parser.error("--data is missing: give the PREFIX of shards that slipstream prepare wrote")
    known = contenders(given.device, 1)
    if unknown := set(given.contenders or ()) - set(known):
        parser.error(f"--contenders {min(unknown)!r} is unknown: choose among {', '.join(map(repr, known))}")
    try:
        print(table(measure(given)))
    except RunFailure as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    main()
