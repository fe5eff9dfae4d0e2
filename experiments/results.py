"""The tables and figures of docs/results/delay.md, from the records in benchmarks/study_*/.

    python experiments/results.py          # or make results

Every record is one run of `slipstream study`: NAME.jsonl holds what configs/studies/NAME.toml came to, wherever and
whenever it was run. Studies that have not been run yet have no place on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from figures import courses, draw_axis, draw_course
from page import with_table

from slipstream.tools.study.figures import draw_cosines, draw_gaps, draw_losses
from slipstream.tools.study.record import Record, read_records
from slipstream.tools.study.results import markdown_table, overhead_by_curve, rows, sweep_table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "results"
SCRIPT = "experiments/results.py"

PAPER = {
    # arXiv:2606.30634, 360M parameters, 20 tokens a parameter, FineWeb-Edu: sync, async, async + EF
    "muon": (2.578, 2.590, 2.583),
    "soap": (2.581, 2.608, 2.590),
    "adan": (2.641, 2.651, None),
    "adamw": (2.612, 2.890, 2.640),
}


DEFAULTS: dict[str, Any] = {
    # What the ablations vary, where they do not.
    "optimizer.momentum": 0.95,
    "optimizer.beta1": 0.9,
    "train.microbatch_size": 64,
    "train.steps": 1000,
    "pipeline.sync_start_steps": 0,
}
RATES = {"muon": 0.02, "adamw": 0.001}
COURSES = {
    "length": (600, 1200, 1300, 1800, 2400, 4800, 7200, 9600, 12207),
    "small_batch": (600, 1200, 2400, 4800, 9600, 14400, 19200, 24414),
}
"""By study, steps of its longest runs: in the warm-up, about its end at a tenth, and later."""


@dataclass(frozen=True)
class Ablation:
    """What happens to the gap along one axis, everything else at its default."""

    name: str
    axis: str
    """As it is called on the page."""
    fields: dict[str, str]
    """By optimizer, the configuration's field."""
    along: tuple[str, ...] = ()
    """Fields that change with it."""

    def records(self, records: Sequence[Record]) -> list[Record]:
        found = []
        for record in records:
            field = self.fields.get(record.optimizer)
            defaults = DEFAULTS | {"optimizer.learning_rate": RATES[record.optimizer]}
            others = {key: value for key, value in record.setting.items() if key != field and key not in self.along}
            if field is not None and all(defaults[key] == value for key, value in others.items()):
                found.append(replace(record, setting={self.axis: record.setting.get(field, defaults[field])}))
        order = list(self.fields)
        return sorted(found, key=lambda record: (order.index(record.optimizer), record.setting[self.axis]))


ABLATIONS = (
    Ablation("momentum", "momentum or beta1", {"muon": "optimizer.momentum", "adamw": "optimizer.beta1"}),
    Ablation("rate", "optimizer.learning_rate", {"muon": "optimizer.learning_rate"}),
    Ablation("batch", "train.microbatch_size", {"muon": "train.microbatch_size"}, along=("train.steps",)),
    Ablation("start", "pipeline.sync_start_steps", {"muon": "pipeline.sync_start_steps"}),
)


def read_study(name: str) -> list[Record]:
    """Of every machine and date; the same cell twice counts once, and the latest wins. How many batches the held-out
    text comes to has no place on the page: it is all of it."""
    paths = sorted((ROOT / "benchmarks").glob(f"study_*/{name}.jsonl"))
    return [
        replace(record, setting={axis: v for axis, v in record.setting.items() if not axis.startswith("evaluation.")})
        for path in paths
        for record in read_records(path)
    ]


def beyond(optimizer: str) -> list[Record]:
    return [record for record in read_study("beyond") if record.optimizer == optimizer]


def comparison_table(records: Sequence[Record]) -> str:
    """Our gaps beside the paper's, each also as a multiple of Muon's."""
    found = {(row.optimizer, row.mode): row for row in rows(records)}

    def gap(optimizer: str, mode: str) -> float | None:
        row = found.get((optimizer, mode))
        return row.gap.mean if row is not None and row.gap is not None else None

    lines = [
        "| optimizer | gap, ours | recovered by EF | times Muon's | gap, paper | recovered by EF | times Muon's |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for optimizer in dict.fromkeys(record.optimizer for record in records):
        paper = PAPER.get(optimizer)
        theirs = paper[1] - paper[0] if paper else None
        their_ef = paper[2] - paper[0] if paper and paper[2] is not None else None
        lines.append(
            f"| {optimizer} | "
            + " | ".join(
                [
                    *_gap_columns(gap(optimizer, "async"), gap(optimizer, "ef"), gap("muon", "async")),
                    *_gap_columns(theirs, their_ef, PAPER["muon"][1] - PAPER["muon"][0]),
                ]
            )
            + " |"
        )
    return "\n".join(lines)


def _gap_columns(plain: float | None, corrected: float | None, muon: float | None) -> list[str]:
    return [
        "" if plain is None else f"{plain:.3f}",
        "" if plain is None or corrected is None else f"{1 - corrected / plain:.0%}",
        "" if plain is None or muon is None else f"{plain / muon:.1f}",
    ]


def course_table(records: Sequence[Record], steps: Sequence[int]) -> str:
    """The gap of the longest runs as they went on, and their token overhead, of all by the synchronous run's curve."""
    lines = [
        "| | " + " | ".join(f"{step:,}" for step in steps) + " | token overhead (curve) |",
        "|---|" + "---:|" * (len(steps) + 1),
    ]
    for course in courses(records):
        overhead = overhead_by_curve(course.cell, course.baseline)
        gaps = " | ".join(f"{course.gaps[step]:+.4f}" for step in steps)
        lines.append(f"| {course.name} | {gaps} | {overhead:.3f} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Those that there are records for, by the name in their marker."""
    found: dict[str, str] = {}
    if sweep := read_study("sweep"):
        found["sweep table"] = sweep_table(sweep)
    if main_study := read_study("main"):
        found["main table"] = markdown_table(rows(main_study))
        found["comparison table"] = comparison_table(main_study)
    for name in ("length", "small_batch", "steps", "parts", "pipedream", "trend"):
        if records := read_study(name):
            found[f"{name} table"] = markdown_table(rows(records))
    for name, optimizer in (("beyond", "muon"), ("adamw", "adamw")):
        if records := beyond(optimizer):
            found[f"{name} table"] = markdown_table(rows(records))
    for name, steps in COURSES.items():
        if records := read_study(name):
            found[f"{name} course table"] = course_table(records, steps)
    for ablation in ABLATIONS:
        if records := ablation.records(read_study("ablations")):
            found[f"{ablation.name} table"] = markdown_table(rows(records))
    return found


def draw(folder: Path) -> None:
    if records := read_study("main"):
        draw_losses(records, folder / "delay_loss.png")
        draw_gaps(records, folder / "delay_gap.png")
        draw_cosines(records, folder / "delay_cosine.png")
    if records := read_study("length"):
        draw_axis(records, "train.steps", folder / "delay_length.png")
    if records := read_study("steps"):
        draw_axis(records, "train.steps", folder / "delay_steps.png")
    for name in COURSES:
        draw_course(read_study(name), folder / f"delay_{name}_course.png")
    if records := [record for record in beyond("adamw") if "optimizer.adamw_nesterov" not in record.setting]:
        draw_losses(records, folder / "delay_adamw.png")
    for ablation in ABLATIONS:
        if records := ablation.records(read_study("ablations")):
            draw_axis(records, ablation.axis, folder / f"delay_{ablation.name}.png")


def main() -> None:
    page = (DOCS / "delay.md").read_text(encoding="utf-8")
    for name, table in tables().items():
        page = with_table(page, name, SCRIPT, table)
    (DOCS / "delay.md").write_text(page, encoding="utf-8")
    draw(DOCS)


if __name__ == "__main__":
    main()
