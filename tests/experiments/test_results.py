"""docs/results/delay.md and continued.md say what the logged records say."""

from pathlib import Path

import mismatch
import pytest
import results
from page import with_table

from slipstream.tools.study.grid import load_grid
from slipstream.tools.study.record import read_records

ROOT = results.ROOT
PAGE = (Path(results.DOCS) / "delay.md").read_text(encoding="utf-8")


def test_the_page_has_every_table_that_there_are_records_for_and_each_is_up_to_date() -> None:
    tables = results.tables()
    assert {"sweep table", "main table", "comparison table"} <= set(tables)
    for name, table in tables.items():
        assert with_table(PAGE, name, results.SCRIPT, table) == PAGE, f"{name}: run make results"


def test_every_figure_on_the_page_is_there() -> None:
    figures = [line.split("](")[1].rstrip(")") for line in PAGE.splitlines() if line.startswith("![")]
    assert figures
    for name in figures:
        assert (results.DOCS / name).stat().st_size > 5_000, name


@pytest.mark.parametrize("logged", sorted(ROOT.glob("benchmarks/study_*/*.jsonl")), ids=lambda path: path.stem)
def test_whoever_runs_a_logged_study_again_finds_its_cells_done(logged: Path) -> None:
    cells = {cell.id: cell for cell in load_grid(ROOT / "configs" / "studies" / f"{logged.stem}.toml").cells}
    for record in read_records(logged):
        assert record.id in cells, f"{record.mode}, seed {record.seed}, {record.setting}"
        assert record.baseline == cells[record.id].synchronous().id


def test_the_page_on_continued_training_says_what_its_records_say() -> None:
    page = mismatch.PAGE.read_text(encoding="utf-8")
    table = mismatch.table(mismatch.compared(read_records(mismatch.RECORDS)))
    assert with_table(page, "mismatch table", mismatch.SCRIPT, table) == page
