"""The result of one cell of a study, as a line of JSON. All tables and figures are made from these records."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...observe.metrics import finite


@dataclass(frozen=True)
class Evaluation:
    step: int
    """Number of updates made."""
    tokens: int
    """Number of tokens trained on so far."""
    loss: float | None
    """Loss on held-out text, in nats per token. None if it is not finite."""


@dataclass(frozen=True)
class Record:
    id: str
    """Id of the cell: a digest of everything that determines its numbers."""
    study: str
    """Name of the grid."""
    optimizer: str
    """Name of the optimizer, as in optimizer.name."""
    mode: str
    """Mode: sync, async, ef, or a mode that the grid defines."""
    seed: int
    setting: dict[str, Any]
    """Values of all other axes of the grid, by dotted field, such as optimizer.learning_rate or train.steps. A
    synchronous cell lacks the axes that matter only under delay."""
    baseline: str
    """Id of the synchronous cell with which this one is compared. A synchronous cell has its own id here."""
    learning_rate: float
    """Peak learning rate."""
    steps: int
    """Number of planned updates. A run that diverged made fewer."""
    tokens: int
    """Number of tokens in the planned updates."""
    parameters: int
    final_loss: float | None
    """Held-out loss at the end. None means that the run diverged."""
    seconds: float
    tokens_per_second: float
    optimizer_share: float
    """Share of a step's time from the end of the backward until the next weights are ready."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """Evaluations in order. The first is before any update."""
    cosines: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By parameter group: pairs of a step and the cosine of its update and the update before."""
    machine: str = ""
    """Device and torch version."""
    bits_per_byte: float | None = None
    """`final_loss` in bits per byte of the held-out text. None also means that the bytes of the tokens are unknown, or
    that the record is older than this field."""
    source_losses: dict[str, float] = field(default_factory=dict)
    """By source, with evaluation.per_source: its part of `final_loss`."""

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
