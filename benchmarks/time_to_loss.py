"""Held-out loss against the clock: a synchronous pipeline beside an asynchronous one with error feedback.

    .venv/bin/python benchmarks/time_to_loss.py --output benchmarks/time_to_loss    about 20 minutes on two cores

The rules, fixed before the first full run; a trial of 12 steps had been seen when the fourth rival came:
- `slipstream train` with its built-in default (P = 2, m = 4, Muon, the standard library's source as bytes), one core
  per stage; the rivals differ in the schedule, in optimizer.error_feedback, and in train.steps where that is said.
- The learning rate is the default, which was not tuned for either; its warm-up and cosine span each run's own steps.
- The rivals take turns, seed by seed, so that noise hits all of them. Evaluations are a part of every run, and of its
  time; starting the processes is not.
- A delayed run needs more tokens to the same loss. So it is also given as many steps as fit into the synchronous run's
  time by the schedules' ideal ratio, (m + P - 1) / m = 1.25: equal time, the question that matters. A fourth makes
  the first sixth of its steps synchronously, and 1.2 times as many of them, which comes to the same time.
- Time to loss: when a run's held-out loss first comes down to the final loss of the synchronous run of its seed,
  between evaluations in a straight line; "never" is an answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

SYNCHRONOUS, EQUAL_STEPS = "1F1B", "2BW + EF"
EQUAL_TIME, SYNC_START = "2BW + EF, 1.25 x steps", "2BW + EF, synchronous start, 1.2 x steps"
COLOURS = {SYNCHRONOUS: "#6b7280", EQUAL_STEPS: "#3a84c4", EQUAL_TIME: "#e8952c", SYNC_START: "#c2185b"}


@dataclass(frozen=True)
class Run:
    rival: str
    seed: int
    steps: int
    seconds: list[float]
    """At each evaluation, from the start of the run."""
    losses: list[float]
    utilisation: float
    tokens_per_second: float


def rivals(num_steps: int) -> dict[str, list[str]]:
    late = ["--pipeline.schedule", "two_bw", "--optimizer.error-feedback", "1"]
    return {
        SYNCHRONOUS: ["--pipeline.schedule", "one_f_one_b", "--optimizer.error-feedback", "0", *_steps(num_steps)],
        EQUAL_STEPS: [*late, *_steps(num_steps)],
        EQUAL_TIME: [*late, *_steps(round(1.25 * num_steps))],
        SYNC_START: [*late, *_steps(round(1.2 * num_steps)), "--pipeline.sync-start-steps", str(num_steps // 5)],
    }


def _steps(count: int) -> list[str]:
    return ["--train.steps", str(count)]


def train(rival: str, seed: int, options: list[str], num_steps: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "slipstream", "train", "--run.folder", folder, "--run.name", "run"]
        evaluation = ["--evaluation.every-steps", str(max(1, num_steps // 20))]
        subprocess.run([*command, *options, *evaluation, "--train.seed", str(seed)], check=True, capture_output=True)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    clock, seconds, losses = 0.0, [], []
    for row in rows:
        clock += row.get("seconds", 0.0)
        if "val_loss" in row:
            seconds.append(clock)
            losses.append(row["val_loss"])
    return Run(
        rival,
        seed,
        summary["steps"],
        seconds,
        losses,
        summary["utilisation"]["mean"],
        summary["tokens_per_second"],
    )


def time_to(loss: float, run: Run) -> float | None:
    """Seconds until the held-out loss first was that low."""
    points = list(zip(run.seconds, run.losses, strict=True))
    for (earlier, higher), (later, lower) in pairwise(points):
        if lower <= loss:
            return earlier + (later - earlier) * max(0.0, higher - loss) / max(higher - lower, 1e-12)
    return None


def table(runs: list[Run]) -> str:
    finals = {run.seed: run.losses[-1] for run in runs if run.rival == SYNCHRONOUS}
    ends = {run.seed: run.seconds[-1] for run in runs if run.rival == SYNCHRONOUS}
    lines = [
        "| schedule | steps | seconds | final held-out loss | to 1F1B's final loss, of 1F1B's time | utilisation |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for rival in dict.fromkeys(run.rival for run in runs):
        own = [run for run in runs if run.rival == rival]
        shares = [(time_to(finals[run.seed], run), ends[run.seed]) for run in own]
        reached = [seconds / end for seconds, end in shares if seconds is not None]
        never = len(shares) - len(reached)
        told = [_spread(reached, ".2f")] if reached else []
        told += [f"never for {never} of {len(shares)} seeds"] if never else []
        lines.append(
            f"| {rival} | {own[0].steps} | {_spread([run.seconds[-1] for run in own], '.0f')} | "
            f"{_spread([run.losses[-1] for run in own], '.3f')} | {', '.join(told)} | "
            f"{_spread([run.utilisation for run in own], '.2f')} |"
        )
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    middle = format(statistics.median(values), form)
    return f"{middle} ({min(values):{form}} - {max(values):{form}})" if len(values) > 1 else middle


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for rival in dict.fromkeys(run.rival for run in runs):
        for i, run in enumerate(run for run in runs if run.rival == rival):
            axes.plot(run.seconds, run.losses, color=COLOURS[rival], marker=".", label=None if i else rival, alpha=0.8)
    for run in runs:
        if run.rival == SYNCHRONOUS:
            axes.axhline(run.losses[-1], color=COLOURS[SYNCHRONOUS], linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out nats per byte")
    axes.set_ylim(top=min(max(run.losses[0] for run in runs), 3.5))
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("P = 2, m = 4, one core per stage; dotted: the synchronous runs' final loss")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def leave_behind(runs: list[Run], output: Path) -> None:
    output.with_suffix(".json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    output.with_suffix(".md").write_text(table(runs) + "\n")
    draw(runs, output.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output", type=Path, help="beginning of the names of a .json, a .md and a .png")
    arguments = parser.parse_args()
    runs: list[Run] = []
    for seed in arguments.seeds:
        for rival, options in rivals(arguments.steps).items():
            runs.append(train(rival, seed, options, arguments.steps))
            done = runs[-1]
            print(f"seed {seed}, {rival}: {done.steps} steps, {done.seconds[-1]:.0f} s, loss {done.losses[-1]:.4f}")
            if arguments.output:  # after every run: whoever stops it keeps what there is
                leave_behind(runs, arguments.output)
    print(table(runs))


if __name__ == "__main__":
    main()
