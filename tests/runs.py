"""Reads what a run left in its folder, and makes reports of steps."""

import json
import math
from pathlib import Path
from typing import Any

from slipstream.config.schema import Config
from slipstream.optim.correction import Alignment
from slipstream.pipeline import StepReport
from slipstream.pipeline.clock import TimeSplit


def folder_of(config: Config) -> Path:
    return Path(config.run.folder, config.run.name)


def summary_of(config: Config) -> dict[str, Any]:
    return json.loads((folder_of(config) / "summary.json").read_text())


def rows_of(config: Config) -> list[dict[str, Any]]:
    """Without what the clock said."""
    rows = [json.loads(line) for line in (folder_of(config) / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "val_loss", "gradient_norms", "learning_rates", "update_cosines", "tokens", "delay")
    return [{key: row[key] for key in kept if key in row} for row in rows]


def step_report(step: int, loss: float = 2.5) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        utilisations=(math.nan, 0.75),
        memory=(2**30, 3 * 2**29),
        splits=(TimeSplit(forward=1.0), TimeSplit(backward=2.0)),
        gradient_norms={"all": math.inf},
        alignments={"all": Alignment(math.nan, math.nan)},
        skipped=False,
        save=False,
        busy=False,
        delay=1,
    )
