"""What it costs to change the layout of a run, and whether training stays where it was going.

    .venv/bin/python benchmarks/reshape.py                            about ten minutes; nothing else should run
    .venv/bin/python benchmarks/reshape.py --oracle                   the second question alone, in float64
    .venv/bin/python benchmarks/reshape.py --layers 2 --rounds 1      to see that it works

1. The pause. `slipstream train` in four processes, 2 -> 4 -> 2 stages, 50 million parameters in float32, Muon with
   error feedback, clipping: so two weight versions, masters and momentum move, 16 bytes a parameter. Several rounds;
   the pause is what the run itself reports: while nobody computes, from when the last stage of one layout has made its
   last update until all stages of the next are there. The time that a pipeline takes to drain and to fill is apart: it
   is in the steps before and after.
2. The trajectory. The same in float64 beside slipstream.reference_run, which knows no stages: the largest difference of
   a parameter, relative to its largest entry.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.config.schema import (
    CheckpointSection,
    Config,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunSection,
    TrainSection,
)
from slipstream.config.toml import to_toml
from slipstream.train.build import build_components

STEPS, RESHAPE = 6, ("2=4", "4=2")


def configuration(layers: int, folder: Path) -> Config:
    return Config(
        model=ModelSection(preset="small", num_layers=layers, sequence_length=64),
        pipeline=PipelineSection(stages=2, microbatches=4, reshape=RESHAPE),
        train=TrainSection(steps=STEPS, microbatch_size=1, device="cpu"),
        evaluation=EvaluationSection(batches=0),
        checkpoint=CheckpointSection(at_end=False),
        run=RunSection(folder=str(folder), overwrite=True, log_every_steps=1),
    )


def run(config: Config) -> dict[str, Any]:
    """As a user runs it; returns the summary."""
    path = Path(config.run.folder, "run.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(config), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "slipstream", "train", str(path)], check=True)
    summary: dict[str, Any] = json.loads(Path(config.run.folder, config.run.name, "summary.json").read_text())
    return summary


def measure_pauses(config: Config, num_rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(num_rounds):
        print(f"round {number + 1} of {num_rounds}", flush=True)
        summary = run(config)
        metrics = Path(config.run.folder, config.run.name, "metrics.jsonl").read_text().splitlines()
        step_seconds = statistics.median(json.loads(row)["seconds"] for row in metrics)
        rows += [{**reshape, "step_seconds": step_seconds} for reshape in summary["reshapes"]]
    return rows


def run_in_float64(config: Config) -> str:
    """Returns what experiments/oracle.py says of it."""
    config = replace(
        config,
        train=replace(config.train, dtype="float64"),
        optimizer=OptimizerSection(newton_schulz_dtype="float64"),
        checkpoint=CheckpointSection(at_end=True),
    )
    run(config)
    print("the oracle makes the same steps in one process", flush=True)
    script, folder = Path(__file__).parent.parent / "experiments" / "oracle.py", Path(config.run.folder)
    said = subprocess.run([sys.executable, script, folder / config.run.name], check=True, stdout=subprocess.PIPE)
    return said.stdout.decode().split(": ")[-1].strip()


def table(rows: list[dict[str, Any]], machine: str) -> str:
    lines = [
        f"{machine}, float32",
        "",
        "| from | to | MB moved | moving, s | pause, s: median | of all rounds | a step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for before, after in dict.fromkeys((row["before"], row["after"]) for row in rows):
        those = [row for row in rows if (row["before"], row["after"]) == (before, after)]
        pauses = sorted(row["pause_seconds"] for row in those)
        lines.append(
            f"| {before} | {after} | {those[0]['bytes_moved'] / 1e6:,.0f} "
            f"| {statistics.median(row['exchange_seconds'] for row in those):.2f} | {statistics.median(pauses):.2f} "
            f"| {', '.join(f'{pause:.2f}' for pause in pauses)} "
            f"| {statistics.median(row['step_seconds'] for row in those):.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=17, help="blocks of 3.1 million parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--oracle", action="store_true", help="compare with the oracle in float64, and measure nothing")
    parser.add_argument("--output", type=Path, help="a .json file; the table goes beside it, as .md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(arguments.layers, Path(folder))
        parameters = build_components(config).model.num_parameters()
        machine = f"{parameters:,} parameters, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
        if arguments.oracle:
            found: dict[str, Any] = {"difference": run_in_float64(config)}
            text = f"{machine}\n\nLargest difference from the oracle in float64, relative: {found['difference']}\n"
        else:
            found = {"rows": measure_pauses(config, arguments.rounds)}
            text = table(found["rows"], machine)
    print(text)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")
        arguments.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
