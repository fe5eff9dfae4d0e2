"""What one cell of a study leaves behind: a line of JSON, from which every table and figure is drawn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...observe.metrics import finite


@dataclass(frozen=True)
class Evaluation:
    step: int
    """Updates made."""
    tokens: int
    """Trained on so far."""
    loss: float
    """On held-out text, in nats per token."""


@dataclass(frozen=True)
class Record:
    id: str
    """Of the cell: a digest of everything that decides its numbers."""
    study: str
    """The grid's name."""
    optimizer: str
    """As in optimizer.name."""
    mode: str
    """sync, async, ef, or a mode that the grid defines."""
    seed: int
    setting: dict[str, Any]
    """Every other axis of the grid by its dotted field, such as optimizer.learning_rate or train.steps, where it
    touches this cell: what only matters under delay is left out of a synchronous one."""
    baseline: str
    """id of the synchronous cell that this one is measured against; its own, if it is synchronous."""
    learning_rate: float
    """Peak rate."""
    steps: int
    """To be made; of a run that diverged, not all were."""
    tokens: int
    """Of that many steps."""
    parameters: int
    final_loss: float | None
    """Held-out loss at the end; None if it diverged."""
    seconds: float
    tokens_per_second: float
    optimizer_share: float
    """Of a step's time, from the end of the backward to the next weights."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """In order; the first before any update."""
    cosines: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By parameter group: (step, cosine of its update and the one before)."""
    machine: str = ""
    """Device and torch version."""

    def to_json(self) -> str:
        return json.dumps(finite(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, line: str) -> Record:
        values = json.loads(line)
        values["evaluations"] = [Evaluation(**item) for item in values["evaluations"]]
        values["cosines"] = {name: [tuple(item) for item in items] for name, items in values["cosines"].items()}
        return cls(**values)


def read_records(path: Path) -> list[Record]:
    return [Record.from_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def write_records(path: Path, records: Iterable[Record]) -> None:
    path.write_text("".join(f"{record.to_json()}\n" for record in records), encoding="utf-8")
