"""A small study in a folder of its own, for the tests of `slipstream study`."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import cli
from slipstream.tools.study import runner as command
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.grid import load_grid
from slipstream.tools.study.record import Record

STEPS = 6
CONFIG = f"""
[config.model]
dim = 16
num_layers = 2
num_heads = 2
num_kv_heads = 1
hidden_dim = 32
sequence_length = 16
[config.data]
sources = ["TEXT"]
[config.pipeline]
stages = 2
microbatches = 2
[config.train]
steps = {STEPS}
microbatch_size = 2
[config.evaluation]
every_steps = 3
batches = 2
"""
GRID = """
[[grid]]
mode = ["sync", "async", "ef"]
optimizer.name = "adamw"
optimizer.learning_rate = 0.003
"""


class Study:
    """A folder with a grid to edit."""

    def __init__(self, here: Path, text_file: Path) -> None:
        self.path, self.folder = here / "grid.toml", here / "out"
        self._config = CONFIG.replace("TEXT", str(text_file))

    def write(self, grid: str = GRID, top: str = "") -> None:
        self.path.write_text(top + self._config + grid)

    def run(self, *arguments: str) -> int:
        return cli.run(["study", str(self.path), "--output", str(self.folder), *arguments])

    @property
    def cells(self) -> list[Cell]:
        return load_grid(self.path).cells

    def path_of(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name / "record.json"

    def record(self, cell: Cell) -> Record:
        return Record.from_json(self.path_of(cell).read_text())

    def times(self) -> dict[str, int]:
        """When each record was written."""
        return {path.parent.name: path.stat().st_mtime_ns for path in self.folder.glob("cells/*/record.json")}

    @property
    def table(self) -> str:
        return (self.folder / "table.md").read_text()


@pytest.fixture
def study(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    result = Study(here, text_file)
    result.write()
    return result


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than these cells."""
    for name in ("draw_losses", "draw_gaps", "draw_cosines"):
        monkeypatch.setattr(command, name, lambda records, path: None)
