"""Writes the rows of a run's metrics to sinks. metrics.jsonl is always written; `run.sinks` adds others.

A sink is a class with the methods of `Sink`. To add one for all users, add it to SINKS. To use your own, give its
import path:

    slipstream train --run.sinks mypackage.logging.MySink
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..config.imports import find
from ..errors import ConfigError, in_one_line
from .loggers import TensorBoard, Trackio, WeightsAndBiases, check_library

Row = Mapping[str, Any]
"""One row of metrics. After an update it has step, loss and everything else that docs/reference/files.md lists. After
an evaluation it has step and val_loss."""


class Sink(Protocol):
    """Receives the metrics of a run, in the process of its last stage."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """folder: folder of the run. config: the run's configuration, by section and field."""

    def write(self, row: Row) -> None:
        """Receives a row. Called after every update and every evaluation, in the order of the steps."""

    def close(self) -> None:
        """Closes the sink. Called once, when the run ends or fails."""


SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}
"""Sinks by the name that `run.sinks` uses."""


def sink_classes(names: Sequence[str]) -> list[type[Sink]]:
    """Returns the classes of `run.sinks`. Raises a ConfigError for one that cannot be used."""
    classes = [find("run.sinks", name, SINKS) for name in names]
    for name, cls in zip(names, classes, strict=True):
        check_library(name)
        if not isinstance(cls, type):
            raise ConfigError(f"run.sinks = {name!r} is no class: give the import path of one with write and close")
    return classes


class JsonLines:
    """Writes metrics.jsonl. Rows that cannot be written, for example because the disk is full, are kept and retried."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._file, self._say = path.open("ab", buffering=0), say
        self._unwritten = b""
        self._is_behind = False

    def write(self, row: Row) -> None:
        self._unwritten += (json.dumps(row) + "\n").encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                self._say(f"{self._file.name} cannot be written ({error.strerror}): rows are kept until it can")
            self._is_behind = True

    def close(self) -> None:
        if self._unwritten:
            self._say(f"{self._file.name} lacks its last rows: {len(self._unwritten):,} bytes")
        self._file.close()


class Guarded:
    """A sink whose errors do not end the run: after the first one it is closed, and the run continues without it."""

    def __init__(self, cls: type[Sink], folder: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._name, self._say = cls.__name__, say
        self._sink: Sink | None = None
        try:
            self._sink = cls(folder, config)
        except BaseException as error:  # of a network, a full disk, or somebody else's code, which may even exit
            self._give_up(error)

    def write(self, row: Row) -> None:
        try:
            if self._sink is not None:
                self._sink.write(row)
        except BaseException as error:
            self._give_up(error)

    def close(self) -> None:
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close()
        except BaseException as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        sink, self._sink = self._sink, None
        self._say(f"the sink {self._name} failed and is left out ({in_one_line(error)})")
        with suppress(Exception, SystemExit):
            if sink is not None:
                sink.close()
        if isinstance(error, KeyboardInterrupt):  # perhaps that of a person
            raise error
