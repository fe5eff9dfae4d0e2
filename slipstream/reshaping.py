"""A run changes its shape: who says so, and the moment between two shapes.

At a common update the pipeline has drained. Then every process learns the next shape from the first, its part of the
state goes to whoever holds those layers from now on, and a new pipeline begins where the old one ended.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from .arguments import UsageError, find_run, parse
from .config import Config, ConfigError, load_toml
from .metrics import Screen
from .model import decoder
from .parts import Parts, check, in_shape_of
from .pipeline import Crew, StageState
from .pipeline.crew import Moved
from .pipeline.partition import cut, tied_parameters
from .shape import (
    COMMAND_NAME,
    Shape,
    check_changeable,
    destinations,
    moments,
    next_moment,
    num_processes,
    write_command,
)


@dataclass(frozen=True)
class ReshapeArguments:
    """Tells a run to change its shape: 4 is four stages, 2x2 two stages in each of two replicas, 2/5,5 two stages of
    five layers. It does so within a few steps, from memory to memory, and says how long it paused. A run needs as many
    processes as its largest shape: start it with --pipeline.processes N."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, such as runs/default, or its name below runs."""
    shape: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SHAPE")]
    """STAGES, STAGESxREPLICAS, or either of them with /LAYERS,LAYERS,..."""


def reshape(arguments: list[str]) -> None:
    """`slipstream reshape`."""
    given = parse(ReshapeArguments, arguments, "slipstream reshape", inspect.getdoc(ReshapeArguments) or "")
    folder = find_run(given.run)
    path = folder / "config.toml"
    if not os.path.isfile(path):
        raise UsageError(f"run = '{given.run}' has no config.toml and is no run: name the folder of one")
    try:
        shape = Shape.parse(given.shape)
        check_shape(load_toml(path), shape)
        if (folder / "summary.json").is_file():
            raise UsageError(f"run = '{given.run}' has ended, and has a summary.json: name one that runs")
        write_command(folder, shape)
    except ConfigError as error:
        raise UsageError(f"shape = {given.shape!r} cannot be: {error}") from error
    except OSError as error:
        raise UsageError(
            f"run = '{given.run}' cannot be written to ({error.strerror}): are you who runs it?"
        ) from error
    Screen().print(f"{folder} is told to take on {shape}: it does so within a few steps, if it runs")


class Commands:
    """What the run is told while it runs, by a file in its folder. Of the first process."""

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        self._config, self._path, self._say = config, folder / COMMAND_NAME, say
        self._shape: Shape | None = None

    def look(self) -> bool:
        """Whether there is one to be followed."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
            self._path.unlink()
        except OSError:
            return self._shape is not None
        try:
            self._shape = Shape.parse(text)
            check_shape(self._config, self._shape)
        except ConfigError as error:  # of somebody who is not there to be told by an exit code
            self._shape = None
            self._say(f"{self._path.name} changes nothing: {error}")
        return self._shape is not None

    def take(self) -> Shape | None:
        shape, self._shape = self._shape, None
        return shape


def check_shape(config: Config, shape: Shape) -> Parts:
    """Whether a run of this configuration can take it on, with the processes that it was started with."""
    check_changeable(config)
    if shape.size > num_processes(config):
        raise ConfigError(
            f"{shape} takes {shape.size} processes and the run was started with {num_processes(config)}: use fewer, or "
            f"start it with pipeline.processes = {shape.size}"
        )
    return check(shape.applied(config))


def check_moments(config: Config) -> None:
    """Whether the model can be cut into all the shapes that are planned."""
    for text, moment in zip(config.pipeline.reshape, moments(config), strict=True):
        try:
            check_shape(config, moment.shape)
        except ConfigError as error:
            raise ConfigError(f"pipeline.reshape = {text!r} cannot be: {error}") from error


@dataclass(frozen=True)
class Turn:
    """From one shape to the next."""

    step: int
    """Updates made."""
    before: Shape
    shape: Shape
    parts: Parts
    """In the shape that follows."""


@dataclass(frozen=True)
class Reshape:
    """What there is to say of it, in summary.json."""

    step: int
    before: str
    after: str
    bytes_moved: int
    exchange_seconds: float
    """Until the state is where it is needed."""
    pause_seconds: float
    """Until all stages of the next shape are there. Both from when the last stage of the shape before has made its last
    update: while nobody computes."""


class Reshaping:
    """In one process of a run."""

    def __init__(self, crew: Crew, config: Config, commands: Commands | None) -> None:
        self._crew, self._config, self._commands = crew, config, commands
        self._num_turns = 0
        self._moved_at = 0.0

    def next_turn(self, shape: Shape, parts: Parts, state: StageState | None) -> Turn | None:
        """shape, parts: those before. state: None when the run is over, or of a process that stood by. Returns None
        when it is over."""
        self._num_turns += 1
        key = f"turn {self._num_turns}"
        if self._crew.place is not None:  # by a clock that all processes share, more or less
            self._crew.store.set(f"{key}/ended/{self._crew.place}", repr(time.time()))
        if self._crew.rank == 0:
            following = None if state is None else self._following(state.step)
            self._crew.as_first(key, json.dumps(None if state is None else [state.step, str(following)]))
        waiting = lambda: "the first process to say how the run goes on"  # noqa: E731
        # Of a run that is over, the first process may still be writing its last checkpoint, however long that takes.
        word = json.loads(self._crew.hear(f"said/{key}", waiting, is_working=state is not None))
        if word is None:
            return None
        step, text = word
        following = Shape.parse(text)
        return Turn(step, shape, following, in_shape_of(following.applied(self._config), parts))

    def _following(self, step: int) -> Shape:
        told = self._commands.take() if self._commands is not None else None
        moment = next_moment(self._config, step - 1)
        if told is not None:
            return told
        assert moment is not None and moment.step == step, "nobody asked for another shape"
        return moment.shape

    def move(self, turn: Turn, state: StageState | None) -> Moved:
        """What this process needs of everyone's state, and who takes which place."""
        self._crew.leave()
        with torch.device("meta"):
            model = decoder(turn.parts.model)
        sizes = turn.parts.layers_per_stage
        tied = tied_parameters(model, sizes)
        holders = [
            {tied[name].name if name in tied else name for name, _ in cut(model, sizes, stage).named_parameters()}
            for stage in range(turn.shape.stages)
        ]
        moved = self._crew.exchange(state, partial(destinations, holders, turn.shape.mesh(self._config)))
        self._crew.store.add(f"turn {self._num_turns}/bytes", moved.num_bytes)
        self._moved_at = time.time()
        return moved

    def settle(self, turn: Turn) -> dict[str, Any]:
        """When all stages of the new shape are there."""
        self._crew.settle()
        word = None
        if self._crew.rank == 0:
            reshape = self._reshape(turn, settled_at=time.time())
            Screen().print(
                f"after step {turn.step}: from {turn.before} to {turn.shape} (stages x replicas), "
                f"{reshape.bytes_moved / 1e6:,.1f} MB moved, {reshape.pause_seconds:.2f} s of pause"
            )
            word = json.dumps(asdict(reshape))
        said: dict[str, Any] = json.loads(self._crew.as_first(f"reshape {self._num_turns}", word))
        return said

    def _reshape(self, turn: Turn, settled_at: float) -> Reshape:
        store, key = self._crew.store, f"turn {self._num_turns}"
        ended_at = max(float(store.get(f"{key}/ended/{place}")) for place in range(turn.before.size))
        return Reshape(
            turn.step,
            str(turn.before),
            str(turn.shape),
            store.add(f"{key}/bytes", 0),
            self._moved_at - ended_at,
            settled_at - ended_at,
        )
