"""Summarises every run in about ten figures, formatted as text. With several runs, it marks the run with the best
value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from .read import Run

Entry = tuple[float | None, str, str]
"""Value of a run for the comparison, the same as text, and details as text, which may be empty. None means unknown."""
UNKNOWN: Entry = (None, "not known", "")
MAX_LISTED = 8
"""Maximum number of stages whose utilisation is listed."""
_DATA = (
    *("data.tokenizer", "data.sources", "data.weights", "data.validation_sources", "data.validation_fraction"),
    "model.vocab_size",
)
_WORK = ("parameters", "model.sequence_length", "train.device")
ALIKE = {
    "Training loss": _DATA,
    "Held-out loss": (*_DATA, "evaluation.batches", "train.microbatch_size"),
    "Throughput": _WORK,
    "Peak memory": _WORK,
}
"""Settings, from the summary or the configuration, that must be equal in all runs before a figure can have a best
run."""


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns the figures in the order in which they are shown."""
    found = []
    for label, meaning, best, of_run in FIGURES:
        values, texts, details = zip(*map(of_run, runs), strict=True)
        differing = next((name for name in ALIKE.get(label, ()) if _differs(runs, name)), None)
        if differing:
            meaning, best = f"{meaning}; not to be compared, {differing} differs", None
        marks = _marks(values, best)
        found.append({"label": label, "meaning": meaning, "values": texts, "details": details, "best": marks})
    return found


def _differs(runs: Sequence[Run], name: str) -> bool:
    """Returns whether two runs have different values of a setting. Runs without a value are ignored."""
    said = [run.summary.get(name, run.config.get(name)) for run in runs]
    return len({str(value) for value in said if value is not None}) > 1


def _marks(values: Sequence[float | None], best: Callable[[set[float]], float] | None) -> tuple[bool, ...]:
    """Returns for every run whether it has the best value. No run is marked if no two known values differ."""
    known = {value for value in values if value is not None}
    return tuple(best is not None and len(known) > 1 and value == best(known) for value in values)


def _training_loss(run: Run) -> Entry:
    losses = run.metrics.known("loss")
    first, last = number(run.summary, "first_loss"), number(run.summary, "last_loss")
    if first is None and len(losses):
        first = float(losses[0])
    if last is None and len(losses):
        last = float(losses[-max(1, len(losses) // 20) :].mean())
    if last is None or first is None:
        return UNKNOWN
    return last, f"{last:.4f}", f"{first:.4f} at the first step"


def _held_out_loss(run: Run) -> Entry:
    steps, losses = run.metrics.validation_steps, run.metrics.validation_losses
    known = np.isfinite(losses)
    steps, losses = steps[known], losses[known]
    loss = number(run.summary, "val_loss")
    if loss is None and len(losses):
        loss = float(losses[-1])
    if loss is None:
        return UNKNOWN
    lowest = f"lowest {losses.min():.4f} at step {steps[losses.argmin()]:,.0f}" if len(losses) > 1 else ""
    return loss, f"{loss:.4f}", lowest


def _throughput(run: Run) -> Entry:
    tokens, rate = run.metrics.known("tokens"), number(run.summary, "tokens_per_second")
    total = number(run.summary, "seconds") or float(run.metrics.known("seconds").sum())
    if rate is None and total > 0 and len(tokens):
        rate = float(tokens.max()) / total
    if rate is None:
        return UNKNOWN
    return rate, f"{rate:,.0f} tokens/s", f"in {duration(total)}"


def _utilisation(run: Run) -> Entry:
    per_stage = numbers(run.summary, "utilisation", "per_stage")
    if not per_stage:  # a run that has not ended: use its latest step
        columns = run.metrics.group("utilisations").values()
        per_stage = [float(column[-1]) if np.isfinite(column[-1]) else None for column in columns]
    known = [value for value in per_stage if value is not None]
    if not known:
        return UNKNOWN
    mean = sum(known) / len(known)
    expected = number(run.summary, "expected_utilisation", "mean")
    some = ", ".join("-" if value is None else f"{100 * value:.1f}" for value in per_stage[:MAX_LISTED])
    stages = f"by stage {some}{', ...' if len(per_stage) > MAX_LISTED else ''}"
    return mean, percent(mean), stages if expected is None else f"{percent(expected)} expected; {stages}"


def _delay(run: Run) -> Entry:
    low, high = number(run.summary, "delay", "min"), number(run.summary, "delay", "max")
    seen = run.metrics.known("delay")
    if (low is None or high is None) and len(seen):
        low = high = float(seen[-1])
    if low is None or high is None:
        return UNKNOWN
    text = f"{high:g}" if low == high else f"{low:g} to {high:g}"
    return high, text, "steps on every stage" if low == high else "steps, by stage"


def _weight_versions(run: Run) -> Entry:
    versions = number(run.summary, "live_weight_versions")
    return UNKNOWN if versions is None else (versions, f"{versions:g}", "at most, on a stage")


def _memory(run: Run) -> Entry:
    per_stage = [value for value in numbers(run.summary, "peak_memory_bytes") if value is not None]
    if not per_stage:
        return UNKNOWN
    about = "one process, all stages" if shares_memory(run) else f"{size(sum(per_stage))} over all stages"
    return max(per_stage), size(max(per_stage)), about


def shares_memory(run: Run) -> bool:
    """Returns whether every stage reports the memory of the same process, because the stages are threads on a CPU."""
    return run.config.get("pipeline.transport") == "thread" and run.config.get("train.device", "cpu") == "cpu"


def _progress(run: Run) -> Entry:
    planned = number(run.config, "train.steps") or number(run.summary, "steps")
    made = int(run.metrics.steps[-1]) if len(run.metrics.steps) else 0
    text = f"{made:,} steps" if planned is None else f"{made:,} of {planned:,.0f} steps"
    tokens = run.metrics.known("tokens")
    return float(made), text, f"{tokens.max():,.0f} tokens" if len(tokens) else ""


FIGURES: tuple[tuple[str, str, Callable[[set[float]], float] | None, Callable[[Run], Entry]], ...] = (
    ("Training loss", "nats per token, mean of the last twentieth of the steps", min, _training_loss),
    ("Held-out loss", "nats per token, at the last evaluation", min, _held_out_loss),
    ("Throughput", "tokens per second, over the whole run", max, _throughput),
    ("Utilisation", "share of the steady window a stage spent on actions, mean over stages", max, _utilisation),
    ("Delay", "updates between the weights a gradient was taken at and those it is applied to", None, _delay),
    ("Weight versions", "most that any stage held at once", None, _weight_versions),
    ("Peak memory", "of the stage that needs most", min, _memory),
    ("Progress", "updates made", None, _progress),
)
"""Label and meaning of every figure, which of several values is best if one is, and the value of a run."""


# ---- read values from trees that may lack them, and format values as text


def number(tree: Any, *path: str) -> float | None:
    return _number(_at(tree, path))


def numbers(tree: Any, *path: str) -> list[float | None]:
    items = _at(tree, path)
    return list(map(_number, items)) if isinstance(items, list) else []


def _at(tree: Any, path: Sequence[str]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def percent(value: float) -> str:
    return f"{100 * value:.1f}\u00a0%"


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
