"""Folders as a run leaves them, written by hand: small, exact, and with whatever is to be missing missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WriteRun = Callable[..., Path]

CONFIG = """
[pipeline]
schedule = "two_bw"
stages = 2
microbatches = 4
transport = "process"
[optimizer]
name = "muon"
learning_rate = {learning_rate}
[train]
steps = {num_steps}
device = "cpu"
"""


@pytest.fixture(scope="session")
def write_run(tmp_path_factory: pytest.TempPathFactory) -> WriteRun:
    def write(name: str = "demo", without: tuple[str, ...] = (), **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("runs") / name
        folder.mkdir()
        settings = {"num_steps": 40, "last_loss": 2.0, "learning_rate": 0.02} | settings
        files = {
            "config.toml": CONFIG.format_map(settings),
            "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows(**settings)),
            "summary.json": json.dumps(summary(**settings)),
            "trace.json": json.dumps(trace()),
        }
        for file, text in files.items():
            if file not in without:
                (folder / file).write_text(text, encoding="utf-8")
        return folder

    return write


def rows(num_steps: int, last_loss: float, learning_rate: float) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for step in range(num_steps):
        loss = 5.0 + (last_loss - 5.0) * step / max(1, num_steps - 1)
        seconds = {"forward": 0.2, "backward": 0.5, "update": 0.0, "data": 0.1}
        result.append(
            {
                "step": step + 1,
                "loss": loss,
                "gradient_norms": {"matrices": 1.5, "rest": 0.5},
                "learning_rates": {"matrices": learning_rate, "rest": learning_rate / 10},
                "update_cosines": {"matrices": None if step < 2 else 0.8, "rest": None if step < 2 else 0.9},
                "best_error_feedback": {"matrices": None, "rest": None},
                "utilisations": [None if step < 1 else 0.9, None if step < 1 else 0.8],
                "stage_seconds": [seconds | {"wait_gradients": 0.2}, seconds | {"wait_gradients": 0.1 * (step % 3)}],
                "delay": min(step, 1),
                "skipped": False,
                "tokens": 4096 * (step + 1),
                "seconds": 0.5,
                "tokens_per_second": 8192.0,
            }
        )
        if (step + 1) % 10 == 0:
            result.append({"step": step + 1, "val_loss": loss + 0.1})
    return result


def summary(num_steps: int, last_loss: float, learning_rate: float) -> dict[str, Any]:
    split = {"forward": 0.3, "backward": 0.6, "wait_gradients": 0.1}
    return {
        "schedule": "two_bw",
        "layers_per_stage": [3, 3],
        "steps": num_steps,
        "parameters": 656512,
        "first_loss": 5.0,
        "last_loss": last_loss,
        "val_loss": last_loss + 0.1,
        "seconds": 0.5 * num_steps,
        "tokens_per_second": 8192.0,
        "utilisation": {"per_stage": [0.9, 0.8], "mean": 0.85},
        "expected_utilisation": {"per_stage": [0.95, 0.93], "mean": 0.94},
        "time_split": [split, split],
        "delay": {"min": 1, "max": 1},
        "live_weight_versions": 2,
        "microbatches_in_flight": [2, 1],
        "peak_memory_bytes": [400 * 2**20, 300 * 2**20],
        "torch": "2.13.0",
    }


def trace() -> dict[str, Any]:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "stage 0"}}]
    for microbatch in range(24):
        for stage in range(2):
            for op, category, start in (("F", "forward", 0), ("B", "backward", 1000)):
                version = microbatch // 4
                events.append(
                    {
                        "ph": "X",
                        "name": f"{stage}{op}{microbatch}@v{version}",
                        "cat": category,
                        "pid": stage,
                        "tid": 0,
                        "ts": 5e6 + 3000 * microbatch + 500 * stage + start,
                        "dur": 900 if op == "F" else 1800,
                        "args": {"stage": stage, "microbatch": microbatch, "version": version},
                    }
                )
    events.append(
        {"ph": "s", "id": "forward 0", "name": "activations", "cat": "message", "pid": 0, "tid": 0, "ts": 5e6}
    )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
