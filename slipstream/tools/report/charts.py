"""Defines the line charts of a report and the lines of each chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .read import Run
from .series import Column, series
from .stages import seconds_by_stage

MAX_MARKS = 60
"""Maximum number of evaluations that are drawn with a dot each. More dots would overlap."""
THROUGHPUT_STEPS = 20
NONE = "No update has recorded it."
NO_ALIGNMENT = "Not recorded: the run has train.track_alignment = false, or fewer than three updates."


def charts(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Returns the charts of every tab, in order."""
    loss = _chart("Loss", "nats per token", _loss_lines(runs), "No loss has been recorded yet.")
    return {
        "overview": [loss],
        "training": [
            loss,
            _chart("Learning rate", "", _group_lines(runs, "learning_rates"), NONE, zero=True),
            _chart("Gradient norm before clipping", "", _group_lines(runs, "gradient_norms"), NONE, zero=True),
            _chart(
                "Cosine of an update and what was expected of it",
                "",
                _group_lines(runs, "update_cosines"),
                NO_ALIGNMENT,
            ),
            _chart(
                "Error feedback that would have fitted best",
                "coefficient",
                _group_lines(runs, "best_error_feedback"),
                NO_ALIGNMENT,
            ),
            _chart("Throughput", "tokens/s", _throughput_lines(runs), NONE, zero=True),
        ],
        "pipeline": [
            *([_mean_utilisation(runs)] if len(runs) > 1 else []),
            *(_utilisation(runs, index) for index in range(len(runs))),
            *(_waiting(runs, index) for index, run in enumerate(runs) if seconds_by_stage(run)),
        ],
    }


def _chart(
    title: str, unit: str, lines: list[dict[str, Any]], missing: str, zero: bool = False, percent: bool = False
) -> dict[str, Any]:
    """Returns a chart. zero: whether the axis begins at 0. missing: the text to show if there is nothing to draw."""
    drawn = [line for line in lines if any(value is not None for value in line["y"])]
    return {"title": title, "unit": unit, "series": drawn, "missing": missing, "zero": zero, "percent": percent}


def _label(runs: Sequence[Run], run: Run, name: str) -> str:
    return name if len(runs) == 1 else f"{run.name}, {name}"


def _loss_lines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    lines = []
    for index, run in enumerate(runs):
        metrics = run.metrics
        lines.append(series(_label(runs, run, "training"), index, metrics.steps, metrics.column("loss")))
        steps, losses = metrics.validation_steps, metrics.validation_losses
        held_out = {"held out": losses} | {f"held out, {name}": part for name, part in metrics.validation_parts.items()}
        lines += [
            series(_label(runs, run, name), index, steps, column, variant, marks=len(steps) <= MAX_MARKS)
            for variant, (name, column) in enumerate(held_out.items(), 1)
        ]
    return lines


def _throughput_lines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    name = f"over {THROUGHPUT_STEPS} steps"
    return [
        series(_label(runs, run, name), index, run.metrics.steps, throughput(run)) for index, run in enumerate(runs)
    ]


def throughput(run: Run) -> Column:
    """Returns for every step the throughput over the last THROUGHPUT_STEPS steps. A single step would be misleading:
    when a pipeline drains, at the end or before it is resumed or reshaped, several updates follow each other at
    once."""
    seconds = np.nan_to_num(run.metrics.column("seconds"))
    tokens = np.nan_to_num(run.metrics.column("tokens_per_second")) * seconds
    ends = np.arange(1, len(seconds) + 1)
    starts = np.maximum(0, ends - THROUGHPUT_STEPS)
    sums = [np.concatenate([[0.0], np.cumsum(column)]) for column in (tokens, seconds)]
    made, taken = (total[ends] - total[starts] for total in sums)
    rate: Column = np.divide(made, taken, out=np.full(len(ends), np.nan), where=taken > 0)
    return rate


def _group_lines(runs: Sequence[Run], key: str) -> list[dict[str, Any]]:
    """Returns a line for every parameter group of every run."""
    return [
        series(_label(runs, run, name), index, run.metrics.steps, column, variant)
        for index, run in enumerate(runs)
        for variant, (name, column) in enumerate(run.metrics.group(key).items())
    ]


# ---- by stage: with several runs each run has its own chart, because their stages differ


def _mean_utilisation(runs: Sequence[Run]) -> dict[str, Any]:
    lines = []
    for index, run in enumerate(runs):
        columns = list(run.metrics.group("utilisations").values())
        if columns:
            lines.append(series(_label(runs, run, "measured"), index, run.metrics.steps, _known_mean(columns)))
        lines.append(_expected(run, index, _label(runs, run, "expected"), variant=1))
    return _chart("Utilisation since the pipeline filled, mean over stages", "", lines, NONE, percent=True)


def _known_mean(columns: Sequence[Column]) -> Column:
    """Returns the mean over the stages that exist at each step. A reshape may change their number during a run."""
    known = np.isfinite(columns)
    total = np.where(known, columns, 0.0).sum(axis=0)
    mean: Column = np.divide(total, known.sum(axis=0), out=np.full_like(total, np.nan), where=known.any(axis=0))
    return mean


def _expected(run: Run, index: int, name: str, variant: int) -> dict[str, Any]:
    """Returns the line of the utilisation that the schedule allows with the costs measured up to each step."""
    return series(name, index, run.metrics.steps, run.metrics.column("expected_utilisation"), variant)


def _utilisation(runs: Sequence[Run], index: int) -> dict[str, Any]:
    run = runs[index]
    columns = list(run.metrics.group("utilisations").values())
    lines = _stage_lines(run, index, columns)
    if len(runs) == 1:
        lines.append(_expected(run, index, "expected, mean over stages", len(columns)))
    title = _title(runs, run, "Utilisation since the pipeline filled")
    return _chart(title, "", lines, NONE, percent=True) | {"byStage": True}


def _waiting(runs: Sequence[Run], index: int) -> dict[str, Any]:
    run, shares = runs[index], []
    for parts in seconds_by_stage(run):
        total = np.sum(list(parts.values()), axis=0)
        waits = [column for name, column in parts.items() if name.startswith("wait")]
        waited = np.sum(waits, axis=0) if waits else np.zeros_like(total)
        shares.append(np.divide(waited, total, out=np.full_like(total, np.nan), where=total > 0))
    lines = _stage_lines(run, index, shares)
    title = _title(runs, run, "Waiting, share of each step's time")
    return _chart(title, "", lines, NONE, zero=True, percent=True) | {"byStage": True}


def _stage_lines(run: Run, index: int, columns: Sequence[Column]) -> list[dict[str, Any]]:
    return [series(f"stage {stage}", index, run.metrics.steps, column, stage) for stage, column in enumerate(columns)]


def _title(runs: Sequence[Run], run: Run, title: str) -> str:
    return title if len(runs) == 1 else f"{run.name}: {title[0].lower()}{title[1:]}"
