"""Builds the page: the data of every tab, and the HTML, style and script that show it.

Nothing that comes from a file can act as markup. The data is JSON without any `<`, and the script turns it into text
nodes. A Content-Security-Policy in the page allows only our own script to run and allows no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import string
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from .charts import charts
from .figures import figures, number
from .read import Run
from .series import MAX_POINTS, evenly, short
from .stages import memory, stage_table, time_split, timeline

CHANGED = r"config\.until-step-(\d{1,15})\.toml"
"""Name of the file in which a run keeps its earlier configuration when it is resumed with a different one."""
SCRIPTS = ("charts.js", "timeline.js", "page.js")
CLOCK_POINTS = 400
"""Number of points that convert steps into tokens and seconds. A few are enough, because both grow steadily."""


def page(runs: Sequence[Run]) -> str:
    """Returns the HTML document."""
    folder = files(__package__)
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    template = string.Template((folder / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(", ".join(run.name for run in runs)),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=as_json(page_data(runs)),
    )


def _hash(text: str) -> str:
    """Returns the hash of a script or style in the format of a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def as_json(data: Any) -> str:
    """Returns JSON that cannot close the HTML element that contains it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    charts_by_tab = charts(runs)
    lines = [line for tab in charts_by_tab.values() for chart in tab for line in chart["series"]]
    return {
        "runs": [_run(run) for run in runs],
        "figures": figures(runs),
        "charts": charts_by_tab,
        "maxPoints": MAX_POINTS if any(line["means"] for line in lines) else None,
        "splits": [time_split(run) for run in runs],
        "stages": [stage_table(run) for run in runs],
        "timelines": [timeline(run) for run in runs],
        "memory": [memory(run) for run in runs],
        "config": _config(runs),
    }


def _run(run: Run) -> dict[str, Any]:
    summary, config = run.summary, run.config
    stages, microbatches = (number(config, f"pipeline.{name}") for name in ("stages", "microbatches"))
    parameters, turns = number(summary, "parameters"), _turns(run)
    facts = [
        config.get("pipeline.schedule"),
        f"{stages:g} stages of {microbatches:g} microbatches a step" if stages and microbatches else None,
        *(f"{turn['text']} after step {turn['step']:,.0f}" for turn in turns),
        f"{parameters:,.0f} parameters" if parameters else None,
        config.get("optimizer.name"),
        config.get("train.device"),
        f"torch {summary['torch']}" if "torch" in summary else None,
        None if summary else "not finished",
    ]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "facts": [str(fact) for fact in facts if fact],
        "notes": list(run.notes),
        "clock": _clock(run),
        "turns": turns,
    }


def _turns(run: Run) -> list[dict[str, Any]]:
    """Returns the steps after which the run changed its layout or was resumed. Every chart marks them."""
    reshapes = run.summary.get("reshapes")
    found = [
        (number(turn, "step"), f"{turn.get('before')} -> {turn.get('after')} (stages x replicas)")
        for turn in (reshapes if isinstance(reshapes, list) else [])
        if isinstance(turn, dict)
    ]
    changed = [re.fullmatch(CHANGED, path.name) for path in run.folder.glob("config.until-step-*.toml")]
    resumed = {float(match[1]) for match in changed if match} | {number(run.summary, "resumed_at") or 0.0}
    found += [(step, "resumed") for step in resumed if step]
    return [{"step": step, "text": text} for step, text in sorted((at, text) for at, text in found if at is not None)]


def _clock(run: Run) -> dict[str, list[float | None]]:
    """Returns steps, tokens and seconds since the start of the run, as parallel lists."""
    metrics = run.metrics
    kept = evenly(len(metrics.steps), CLOCK_POINTS)
    seconds = np.cumsum(np.nan_to_num(metrics.column("seconds")))
    tokens = np.maximum.accumulate(np.nan_to_num(metrics.column("tokens")))
    columns = {"steps": metrics.steps, "tokens": tokens, "seconds": seconds}
    return {name: [0, *map(short, column[kept])] for name, column in columns.items()}


def _config(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns every setting that any run has. null means that a run has no value for it."""
    rows = []
    for path in dict.fromkeys(path for run in runs for path in run.config):
        values = [_value(run.config.get(path)) for run in runs]
        rows.append({"path": path, "values": values, "differs": len(set(values)) > 1})
    return rows


def _value(value: Any) -> str | None:
    if isinstance(value, (bool, list)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return None if value is None else str(value)
