"""The tables and figures of docs/results.md, from the records in benchmarks/study_*/.

    python experiments/results.py          # or make results

Every record is one run of `slipstream study`: NAME.jsonl holds what configs/studies/NAME.toml came to, wherever and
whenever it was run. Studies that have not been run yet have no place on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from page import with_table

from slipstream.study.figures import draw_axis, draw_cosines, draw_gaps, draw_losses
from slipstream.study.record import Record, read_records
from slipstream.study.results import markdown_table, rows, sweep_table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SCRIPT = "experiments/results.py"

PAPER = {
    # arXiv:2606.30634, 360M parameters, 20 tokens a parameter, FineWeb-Edu: sync, async, async + EF
    "muon": (2.578, 2.590, 2.583),
    "soap": (2.581, 2.608, 2.590),
    "adan": (2.641, 2.651, None),
    "adamw": (2.612, 2.890, 2.640),
}


def read_study(name: str) -> list[Record]:
    """Of every machine and date; the same cell twice counts once, and the latest wins."""
    paths = sorted((ROOT / "benchmarks").glob(f"study_*/{name}.jsonl"))
    return [record for path in paths for record in read_records(path)]


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


def tables() -> dict[str, str]:
    """Those that there are records for, by the name in their marker."""
    found: dict[str, str] = {}
    if sweep := read_study("sweep"):
        found["sweep table"] = sweep_table(sweep)
    if main_study := read_study("main"):
        found["main table"] = markdown_table(rows(main_study))
        found["comparison table"] = comparison_table(main_study)
    for name in ("ablations", "length", "parts", "pipedream", "beyond"):
        if records := read_study(name):
            found[f"{name} table"] = markdown_table(rows(records))
    return found


def draw(folder: Path) -> None:
    if records := read_study("main"):
        draw_losses(records, folder / "results_loss.png")
        draw_gaps(records, folder / "results_gap.png")
        draw_cosines(records, folder / "results_cosine.png")
    if records := read_study("length"):
        draw_axis(records, "train.steps", folder / "results_length.png")
    if records := read_study("ablations"):
        draw_axis(records, "optimizer.momentum", folder / "results_momentum.png")


def main() -> None:
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    for name, table in tables().items():
        page = with_table(page, name, SCRIPT, table)
    (DOCS / "results.md").write_text(page, encoding="utf-8")
    draw(DOCS)


if __name__ == "__main__":
    main()
