"""Reads a checkpoint as a state to resume from, or as the weights of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from .files import CheckpointError
from .stage_state import StageState, merge_facts
from .store import Checkpoint, Store

FOLDER_NAME = "checkpoints"
"""Name of the folder of checkpoints in the folder of a run."""
MASTER, BUFFER = "master/", "buffer/"
"""Beginnings of the names of masters and buffers in a checkpoint."""


def state_of(found: Checkpoint) -> StageState:
    """Returns the state of all stages together. Each stage reads the tensors it needs."""
    return StageState(found.step, found, merge_facts(part["state"] for part in found.facts.values()))


def open_checkpoint(folder: Path, step: int | None = None, on_damage: Callable[[str], None] = print) -> Checkpoint:
    """Opens a checkpoint in the folder of a run. step: None means the newest that is intact; `on_damage` is called with
    a sentence about each that is not. Raises CheckpointError if there is none."""
    store = Store(folder / FOLDER_NAME)
    found = store.newest(on_damage) if step is None else store.open(step)
    if found is None:
        raise CheckpointError(f"{str(folder)!r} has no complete checkpoint: train longer, or save at the end")
    return found


def load_weights(folder: Path | str, step: int | None = None) -> dict[str, Tensor]:
    """Returns the masters and buffers of the whole model from a checkpoint, as `load_state_dict` takes them. No
    pipeline is needed.

    folder   the folder of the run, of `Checkpoints` or of `slipstream train`
    step     number of updates; None means the newest checkpoint

    A tied weight has one name, that of its first layer. Load it with `strict=False`.
    """
    found = open_checkpoint(Path(folder), step)
    names = [name for name in found.names() if name.startswith((MASTER, BUFFER))]
    return {name.partition("/")[2]: tensor for name, tensor in found.read(names).items()}
