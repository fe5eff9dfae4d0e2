"""Tables of a page that a script writes, between a marker and the next `<!-- end -->`."""

from __future__ import annotations

import re


def with_table(page: str, name: str, script: str, table: str) -> str:
    """The page with the table of that name put in its place. script: which one writes it, as its marker says."""
    marker = f"<!-- {name}: written by {script} -->"
    pattern = re.compile(f"({re.escape(marker)}\n).*?(<!-- end -->)", re.DOTALL)
    page, count = pattern.subn(lambda match: f"{match[1]}{table.rstrip()}\n{match[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} places for the {name}, not one")
    return page
