"""What scripts put on a page: tables, between a marker and the next `<!-- end -->`, and the look of figures."""

from __future__ import annotations

import re
from collections.abc import Sequence

# As in benchmarks/draw_convergence.py.
COLOURS = {"sync": "#333333", "delay": "#c8553d", "delay + EF": "#4878a8"}
MARKERS = {"sync": "o", "delay": "s", "delay + EF": "x"}
# With a fixed salt and no date a figure is the same file every time.
SVG_SALT = "slipstream"


def with_table(page: str, name: str, script: str, table: str) -> str:
    """The page with the table of that name put in its place. script: which one writes it, as its marker says."""
    marker = f"<!-- {name}: written by {script} -->"
    pattern = re.compile(f"({re.escape(marker)}\n).*?(<!-- end -->)", re.DOTALL)
    page, count = pattern.subn(lambda match: f"{match[1]}{table.rstrip()}\n{match[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} places for the {name}, not one")
    return page


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")
