"""Reads and writes profiles: the measured cost of every layer, in a file that `slipstream profile` writes.

`slipstream train` uses a profile to balance its stages (pipeline.profile). `slipstream plan` uses it to predict step
times.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..config.files import read_plain_file
from ..config.toml import build
from ..errors import UsageError
from ..model.spec import ModelSpec


@dataclass(frozen=True)
class LayerCost:
    """The time in seconds that one microbatch takes in one layer, and that the update of the layer takes."""

    name: str
    forward: float
    backward_input: float
    backward_weight: float
    update: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


def layer_kinds(model: ModelSpec) -> list[str]:
    """Returns the kind of every layer.

    A block is a "dense_block" only in a model whose other blocks have experts.
    """
    num_dense = model.num_dense_layers if model.num_sparse_layers else 0
    blocks = ["dense_block"] * num_dense + ["block"] * (model.num_layers - num_dense)
    return ["embedding", *blocks, "head"]


@dataclass(frozen=True)
class Row:
    """The measurements of one kind of layer."""

    kind: str
    num_layers: int
    parameters: int
    forward: float
    """Seconds for one microbatch. The next three fields are in seconds too; `update` is the time of one update."""
    backward_input: float
    backward_weight: float
    update: float
    activations: int
    """Number of bytes kept from forward to backward."""


@dataclass(frozen=True)
class Profile:
    device: str
    torch: str
    threads: int
    optimizer: str
    dtype: str
    microbatch_size: int
    model: dict[str, float]
    """Fields of the model that was measured, as `ModelSpec.facts` returns them."""
    message: int
    """Number of bytes of the activations that one stage sends to the next, for one microbatch."""
    rows: tuple[Row, ...]
    loss_chunk_tokens: int = 0
    compute_dtype: str | None = None
    """Dtype of the measured computation. None means the same as `dtype`, which is the dtype of the master weights."""
    compile: bool = False

    def layer_costs(self, model: ModelSpec, path: Path) -> tuple[LayerCost, ...]:
        """Returns the cost of each layer of a model.

        The model must have the same fields as the measured one, but may have another number of layers. A field that
        the profile does not name is newer than it, and must be off. path: file of this profile, for error messages.
        """
        for name, value in model.facts().items():
            is_free = name in ("num_layers", "initial", "document_separator") or (name not in self.model and not value)
            if not is_free and self.model.get(name) != value:
                raise UsageError(
                    f"profile = {str(path)!r} is of another model, {name} is {self.model.get(name)} there and {value} "
                    "here: run slipstream profile with these options"
                )
        rows = {row.kind: row for row in self.rows}
        if missing := set(layer_kinds(model)) - rows.keys():
            raise UsageError(
                f"profile = {str(path)!r} has no {min(missing)}: run slipstream profile with these options"
            )
        return tuple(
            LayerCost(name, row.forward, row.backward_input, row.backward_weight, row.update)
            for name, row in zip(model.layer_names, map(rows.__getitem__, layer_kinds(model)), strict=True)
        )


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Profile:
    try:
        tree = json.loads(read_plain_file(path))
        model = tree.pop("model", None) if isinstance(tree, dict) else None
        if not isinstance(model, dict):
            raise ValueError("it has no model")
        profile: Profile = build(Profile, {**tree, "model": {}}, "")
        for row in profile.rows:
            _check_row(row)
        kinds = [row.kind for row in profile.rows]
        if kinds not in (["embedding", "block", "head"], ["embedding", "dense_block", "block", "head"]):
            raise ValueError(f"its rows are {', '.join(kinds)[:60]}, and not those of a profile")
        return replace(profile, model=model)
    except OSError as error:
        raise UsageError(f"profile = {str(path)!r} cannot be read ({error.strerror}): check the path") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"profile = {str(path)!r} is no profile ({error}): write one with slipstream profile --output {path}"
        ) from error


def _check_row(row: Row) -> None:
    """Raises a ValueError for a number that is negative, infinite or nan: planning adds such numbers up or divides by
    them."""
    for name, value in asdict(row).items():
        if name != "kind" and not 0 <= value < math.inf:
            raise ValueError(f"{name} of {row.kind} is {value}")
