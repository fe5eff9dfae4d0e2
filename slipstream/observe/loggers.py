"""Sinks for TensorBoard, Weights & Biases and trackio, which `run.sinks` knows by name.

    pip install 'slipstream[log]'
    slipstream train --run.sinks tensorboard wandb

Every number of a row becomes a value of its own: `loss/train`, `optimizer/gradient_norms/matrices`,
`stages/utilisations/0`. None is left out. The part before the first slash is the group under which a logger shows it.
The libraries are imported only in the process that writes the metrics. A resumed run continues where it has logged
before.
"""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError

LIBRARIES = {"tensorboard": ("tensorboardX", "tensorboard"), "wandb": ("wandb",), "trackio": ("trackio",)}
"""Libraries of each logger, by its name in `run.sinks`. One of them is enough."""

TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/validation",
    "val_bits_per_byte": "loss/validation_bits_per_byte",
    "val_losses": "loss/validation_of",
    **{
        field: f"{group}/{field}"
        for group, fields in {
            "optimizer": "gradient_norms learning_rates skipped",
            "prediction": "best_error_feedback delay update_cosines",
            "speed": "mfu seconds tokens tokens_per_second",
            "stages": "expected_utilisation memory_bytes utilisations",
        }.items()
        for field in fields.split()
    },
}
"""Names that loggers show for fields of a row. TensorBoard sorts groups by name and opens the first two: these are the
losses and the optimizer. Other fields keep their names."""

PROJECT = "slipstream"
"""Project in which W&B and trackio show all runs."""

FLUSH_SECONDS = 5
"""Number of seconds after which TensorBoard sees a row at the latest."""


def check_library(name: str) -> None:
    """Rejects a logger whose library is not installed. Other sinks are accepted."""
    libraries = LIBRARIES.get(name, ())
    # A folder of that name, such as wandb/, has no origin.
    if libraries and not any(spec is not None and spec.origin is not None for spec in map(find_spec, libraries)):
        raise ConfigError(f"run.sinks = {name!r} needs {libraries[0]}: pip install 'slipstream[log]'")


def numbers(values: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Yields the name and value of every number, also of those in dictionaries and lists. True is 1, and False is 0."""
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        if isinstance(value, (Mapping, list, tuple)):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", int(value) if isinstance(value, bool) else value


def logged(row: Mapping[str, Any]) -> dict[str, int | float]:
    """Returns the numbers of a row that are values. Step and time are left out, because every logger has an axis for
    them."""
    fields = {TAGS.get(field, field): value for field, value in row.items() if field not in ("step", "time")}
    return dict(numbers(fields))


class TensorBoard:
    """Writes event files to RUN_FOLDER/tensorboard."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            from torch.utils.tensorboard import SummaryWriter
        self._make, self._folder = SummaryWriter, folder / "tensorboard"
        self._writer: Any = None

    def write(self, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            # A resumed run makes some steps again. TensorBoard hides their earlier values. A resumed run may begin with
            # an evaluation after a step that it does not make again.
            first = row["step"] + ("val_loss" in row)
            # The name of an event file has the time in seconds. Two layouts of a run may begin within one second.
            self._writer = self._make(
                str(self._folder), purge_step=first, flush_secs=FLUSH_SECONDS, filename_suffix=f".{first:09}"
            )
        for name, value in logged(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=row["time"])
        for number, sample in enumerate(row.get("samples", ())):
            text = f"**{escape(sample['prompt'])}**{escape(sample['text'])}"
            self._writer.add_text(f"samples/{number}", text, row["step"], walltime=row["time"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Logs to W&B, with its files in RUN_FOLDER/wandb.

    WANDB_MODE chooses between online and offline. Without it, W&B is online if this user has an API key.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._library = wandb
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=_identifier(folder),
            dir=str(folder),
            config=dict(config),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(console="off", quiet=True),
        )

    def write(self, row: Mapping[str, Any]) -> None:
        values: dict[str, Any] = dict(logged(row))
        if samples := row.get("samples"):
            values["samples"] = self._library.Table(
                ["prompt", "text"], [[each["prompt"], each["text"]] for each in samples]
            )
        self._run.log(values, step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key() -> bool:
    """Returns whether there is an API key in WANDB_API_KEY, or in the netrc file, where `wandb login` writes it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Trackio:
    """Logs to trackio, on this machine unless TRACKIO_SPACE_ID names a Space."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio

        name = f"{folder.name}-{_identifier(folder)}"
        self._run = trackio.init(project=PROJECT, name=name, config=dict(config), resume="allow")

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log(logged(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _identifier(folder: Path) -> str:
    """Returns the identifier of a run. It is the same after a resume, and another one if the run was overwritten."""
    path = folder / "logger_id.txt"
    if not path.is_file():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
