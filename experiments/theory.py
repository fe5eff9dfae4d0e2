"""One step of gradient delay on problems small enough to know the answer: for docs/research/theory.md.

How large a rate is stable on a quadratic is in stability.py, how delayed LMO descent converges in lmo.py. Both use the
update of slipstream/optim/correction.py.

It needs numpy and matplotlib, and about half a minute. It rewrites theory.json, the two figures and the tables
of docs/research/theory.md, with the same bytes every time on one machine:

    python experiments/theory.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import lmo
import stability
from page import with_table

DOCS = Path(__file__).resolve().parent.parent / "docs" / "research"
SCRIPT = "experiments/theory.py"


def tables(rows: Sequence[lmo.Row]) -> dict[str, str]:
    """All tables of docs/research/theory.md, by the name in their marker."""
    return {
        "stability table": stability.stability_table(),
        "delay table": stability.delay_table(),
        "trend table": stability.trend_table(),
        "rate table": lmo.rate_table(rows),
        "excess table": lmo.excess_table(rows),
        "final loss table": lmo.final_loss_table(rows),
    }


def main() -> None:
    rows: list[lmo.Row] = []
    for problem in (lmo.sign_problem(lmo.SEEDS), lmo.spectral_problem(lmo.SEEDS)):
        rows += lmo.rate_study(problem) + lmo.sweep_study(problem)
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    (DOCS / "theory.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    stability.draw_stability(DOCS / "theory_stability.svg")
    lmo.draw_lmo(rows, DOCS / "theory_lmo.svg")
    page = (DOCS / "theory.md").read_text(encoding="utf-8")
    for name, table in tables(rows).items():
        page = with_table(page, name, SCRIPT, table)
    (DOCS / "theory.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
