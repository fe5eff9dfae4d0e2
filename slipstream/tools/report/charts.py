"""Defines the line charts of a report and the lines of each chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def groups(key: str) -> list[dict[str, Any]]:
        return _lines(runs, lambda run: run.metrics.group(key))

    loss = _chart("Loss", _loss_lines(runs), "No loss has been recorded yet.", unit="nats per token")
    speed = _lines(runs, lambda run: {f"over {THROUGHPUT_STEPS} steps": throughput(run)})
    is_alone = len(runs) == 1
    busy, waiting = "Utilisation since the pipeline filled", "Waiting, share of each step's time"
    return {
        "overview": [loss],
        "training": [
            loss,
            _chart("Learning rate", groups("learning_rates"), zero=True),
            _chart("Gradient norm before clipping", groups("gradient_norms"), zero=True),
            _chart("Cosine of an update and what was expected of it", groups("update_cosines"), NO_ALIGNMENT),
            _chart(
                "Error feedback that would have fitted best",
                groups("best_error_feedback"),
                NO_ALIGNMENT,
                unit="coefficient",
            ),
            _chart("Throughput", speed, unit="tokens/s", zero=True),
        ],
        "pipeline": [
            *([] if is_alone else [_chart(f"{busy}, mean over stages", _lines(runs, _mean_utilisation), percent=True)]),
            *(_by_stage(runs, index, busy, _utilisation(run, is_alone)) for index, run in enumerate(runs)),
            *(
                _by_stage(runs, index, waiting, shares, zero=True)
                for index, run in enumerate(runs)
                if (shares := _waiting(run))
            ),
        ],
    }


def _chart(
    title: str,
    lines: list[dict[str, Any]],
    missing: str = NONE,
    *,
    unit: str = "",
    zero: bool = False,
    percent: bool = False,
) -> dict[str, Any]:
    """Returns a chart. zero: whether the axis begins at 0. missing: the text to show if there is nothing to draw."""
    drawn = [line for line in lines if any(value is not None for value in line["y"])]
    return {"title": title, "unit": unit, "series": drawn, "missing": missing, "zero": zero, "percent": percent}


def _prefix(runs: Sequence[Run], run: Run) -> str:
    """Returns how the names of a run's lines begin in a chart of all runs."""
    return "" if len(runs) == 1 else f"{run.name}, "


def _lines(runs: Sequence[Run], columns_of: Callable[[Run], Mapping[str, Column]]) -> list[dict[str, Any]]:
    """Returns a line for each of the named columns of every run."""
    return [
        line for index, run in enumerate(runs) for line in _lines_of(run, index, columns_of(run), _prefix(runs, run))
    ]


def _lines_of(run: Run, index: int, columns: Mapping[str, Column], before: str = "") -> list[dict[str, Any]]:
    return [
        series(f"{before}{name}", index, run.metrics.steps, column, variant)
        for variant, (name, column) in enumerate(columns.items())
    ]


def _loss_lines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    lines = []
    for index, run in enumerate(runs):
        metrics, before = run.metrics, _prefix(runs, run)
        lines.append(series(f"{before}training", index, metrics.steps, metrics.column("loss")))
        steps, losses = metrics.validation_steps, metrics.validation_losses
        held_out = {"held out": losses} | {f"held out, {name}": part for name, part in metrics.validation_parts.items()}
        lines += [
            series(f"{before}{name}", index, steps, column, variant, marks=len(steps) <= MAX_MARKS)
            for variant, (name, column) in enumerate(held_out.items(), 1)
        ]
    return lines


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
    return _ratio(made, taken)


def _ratio(part: Column, whole: Column) -> Column:
    """Returns part / whole, and nan where the whole is 0."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


# ---- by stage: with several runs each run has its own chart, because their stages differ


def _mean_utilisation(run: Run) -> dict[str, Column]:
    """Returns the measured utilisation, and the one that the schedule allows with the costs measured up to each
    step."""
    columns = list(run.metrics.group("utilisations").values())
    measured = _known_mean(columns) if columns else run.metrics.column("utilisations")
    return {"measured": measured, "expected": run.metrics.column("expected_utilisation")}


def _known_mean(columns: Sequence[Column]) -> Column:
    """Returns the mean over the stages that exist at each step. A reshape may change their number during a run."""
    known = np.isfinite(columns)
    return _ratio(np.where(known, columns, 0.0).sum(axis=0), known.sum(axis=0))


def _utilisation(run: Run, with_expected: bool) -> dict[str, Column]:
    columns = {f"stage {stage}": column for stage, column in run.metrics.group("utilisations").items()}
    expected = {"expected, mean over stages": run.metrics.column("expected_utilisation")}
    return columns | (expected if with_expected else {})


def _waiting(run: Run) -> dict[str, Column]:
    shares = {}
    for stage, parts in enumerate(seconds_by_stage(run)):
        waits = [column for name, column in parts.items() if name.startswith("wait")]
        shares[f"stage {stage}"] = _ratio(np.sum(waits, axis=0), np.sum(list(parts.values()), axis=0))
    return shares


def _by_stage(
    runs: Sequence[Run], index: int, title: str, columns: Mapping[str, Column], zero: bool = False
) -> dict[str, Any]:
    run = runs[index]
    if len(runs) > 1:
        title = f"{run.name}: {title[0].lower()}{title[1:]}"
    return _chart(title, _lines_of(run, index, columns), zero=zero, percent=True) | {"byStage": True}
