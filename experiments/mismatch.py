"""The table and the figure of docs/results/continued.md, from the records of configs/studies/mismatch.toml.

    python experiments/mismatch.py         # or make results

For every start (from the beginning, continued, continued with LoRA), optimizer and mode: the loss on the new and on the
old text, and what the delay adds, in pairs of the same seed. Only cells at the rate of the delayed ones count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from page import with_table

from slipstream.tools.study import figures
from slipstream.tools.study.record import Record, read_records
from slipstream.tools.study.results import MODES, Estimate

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "study_2cpu_2026-11-18" / "mismatch.jsonl"
PAGE = ROOT / "docs" / "results" / "continued.md"
SCRIPT = "experiments/mismatch.py"
STARTS = ("from the beginning", "continued", "continued, LoRA")
Key = tuple[str, str, str]
"""Start, optimizer and mode."""


def start_of(record: Record) -> str:
    if "model.initial" not in record.setting:
        return STARTS[0]
    return STARTS[2] if "adapter.rank" in record.setting else STARTS[1]


def compared(records: Iterable[Record]) -> dict[Key, dict[int, Record]]:
    """Returns the cells by seed, at the rate at which there are delayed cells."""
    records = list(records)
    rates = {(start_of(r), r.optimizer): r.learning_rate for r in records if r.mode != "sync"}
    found: dict[Key, dict[int, Record]] = defaultdict(dict)
    for record in records:
        start = start_of(record)
        if record.learning_rate == rates.get((start, record.optimizer)):
            found[start, record.optimizer, record.mode][record.seed] = record
    order = [(s, o, m) for s in STARTS for o in ("adamw", "muon") for m in MODES]
    return {key: found[key] for key in order if key in found}


def text_loss(record: Record, index: int) -> float:
    """Returns the loss on the new text (0) or on the old one (1)."""
    return list(record.source_losses.values())[index]


def said(estimate: Estimate | None, form: str = ".4f") -> str:
    if estimate is None:
        return ""
    return f"{estimate.mean:{form}}" + ("" if estimate.spread is None else f" ± {estimate.spread:.4f}")


def gap(cells: dict[Key, dict[int, Record]], key: Key) -> Estimate | None:
    baseline = cells[(*key[:2], "sync")]
    pairs = [text_loss(r, 0) - text_loss(baseline[seed], 0) for seed, r in cells[key].items() if seed in baseline]
    return None if key[2] == "sync" else Estimate.over(pairs)


def table(cells: dict[Key, dict[int, Record]]) -> str:
    lines = [
        "| start | optimizer | rate | mode | seeds | loss on the new text | the delay adds | loss on the old text |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for key, by_seed in cells.items():
        new, old = (Estimate.over(text_loss(r, i) for r in by_seed.values()) for i in (0, 1))
        start, optimizer, mode = key
        rate = next(iter(by_seed.values())).learning_rate
        row = [
            start,
            optimizer,
            f"{rate:g}",
            mode,
            str(len(by_seed)),
            said(new),
            said(gap(cells, key), "+.4f"),
            said(old),
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def draw(cells: dict[Key, dict[int, Record]], path: Path) -> None:
    if not figures.start():
        return
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, index, name in zip(grid, (0, 1), ("new text", "old text"), strict=True):
        for column, start in enumerate(STARTS):
            for offset, (optimizer, colour) in enumerate((("adamw", figures.BLUE), ("muon", figures.VERMILLION))):
                for place, (mode, marker) in enumerate(zip(MODES, "osD", strict=True)):
                    losses = [text_loss(r, index) for r in cells.get((start, optimizer, mode), {}).values()]
                    x = column + (3 * offset + place - 2.5) * 0.12
                    label = f"{optimizer}, {mode}" if column == 0 else None
                    axes.plot(
                        [x] * len(losses), losses, marker, color=colour, mfc="white" if place else colour, label=label
                    )
        axes.set(title=name, ylabel="held-out loss (nats per byte)")
        axes.set_xticks(range(len(STARTS)), STARTS)
    grid[0].legend(fontsize=8)
    figures.save(figure, path)


def main() -> None:
    cells = compared(read_records(RECORDS))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "mismatch table", SCRIPT, table(cells)), "utf-8")
    draw(cells, PAGE.with_suffix(".png"))


if __name__ == "__main__":
    main()
