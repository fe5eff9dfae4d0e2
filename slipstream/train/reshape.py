"""Changes the layout of a run while it runs.

After a common update the pipeline drains. Every process then learns the next layout from the first process, sends its
state to the processes that will hold those layers, and a new pipeline starts where the old one stopped. A run is told
to do so by `pipeline.reshape` or by a file in its folder, which `slipstream reshape` writes.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.stage_state import StageState
from ..config.layout import Layout, check_changeable, layout_changes, next_layout_change, num_processes
from ..config.schema import Config
from ..errors import ConfigError
from ..observe.console import Screen
from ..pipeline.partition import cut, tied_parameters
from ..transport.base import Transport
from ..transport.mesh import Mesh
from ..transport.world import MovedState, World
from .build import Components, build_components, in_layout_of

COMMAND_NAME = "reshape.txt"
"""The file in a run's folder by which it is told to change its layout."""


class Commands:
    """What the run is told while it runs, by a file in its folder. Of the first process."""

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        self._config, self._path, self._say = config, folder / COMMAND_NAME, say
        self._layout: Layout | None = None

    def look(self) -> bool:
        """Whether there is one to be followed."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
            self._path.unlink()
        except OSError:
            return self._layout is not None
        try:
            self._layout = Layout.parse(text)
            check_layout(self._config, self._layout)
        except ConfigError as error:  # of somebody who is not there to be told by an exit code
            self._layout = None
            self._say(f"{self._path.name} changes nothing: {error}")
        return self._layout is not None

    def take(self) -> Layout | None:
        layout, self._layout = self._layout, None
        return layout


def check_layout(config: Config, layout: Layout) -> Components:
    """Whether a run of this configuration can take it on, with the processes that it was started with."""
    check_changeable(config)
    if layout.size > num_processes(config):
        raise ConfigError(
            f"{layout} takes {layout.size} processes and the run was started with {num_processes(config)}: use fewer, "
            f"or start it with pipeline.processes = {layout.size}"
        )
    return build_components(layout.applied(config))


def check_layout_changes(config: Config) -> None:
    """Whether the model can be cut into all the layouts that are planned."""
    for text, change in zip(config.pipeline.reshape, layout_changes(config), strict=True):
        try:
            check_layout(config, change.layout)
        except ConfigError as error:
            raise ConfigError(f"pipeline.reshape = {text!r} cannot be: {error}") from error


@dataclass(frozen=True)
class Transition:
    """From one layout to the next."""

    step: int
    """Updates made."""
    before: Layout
    layout: Layout
    components: Components
    """In the layout that follows."""


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
    """Until all stages of the next layout have started. Both are counted from the last update of the layout before, so
    no stage computes during them."""


@dataclass
class Phase:
    """The part of a run that has one layout, as one process sees it."""

    layout: Layout
    components: Components
    transport: Transport | None
    """None: this process is idle in this layout."""
    start: StageState | None
    """The state to start from; None: the beginning of the run, or this process is idle."""
    transition: Transition | None = None
    """How the run came to this layout; None: it started with it."""
    end: StageState | None = None
    """Set by the caller: the state after the last update in this layout; None: the run is over, or the process was
    idle."""

    def take_start(self) -> StageState | None:
        """Hands over the state to start from; the phase keeps no reference to its tensors."""
        start, self.start = self.start, None
        return start


class Reshaping:
    """Takes one process of a run from layout to layout."""

    def __init__(self, world: World, config: Config, commands: Commands | None) -> None:
        self._world, self._config, self._commands = world, config, commands
        self._num_transitions = 0
        self._moved_at = 0.0

    def phases(self, layout: Layout, start: StageState | None) -> Iterator[Phase]:
        """Yields one phase after the other until the run is over. The caller trains, and sets `end`, before it asks for
        the next."""
        components = build_components(layout.applied(self._config))
        phase = Phase(layout, components, self._world.take_places(layout.mesh(self._config)), start)
        while True:
            yield phase
            transition = self._next_transition(phase)
            if transition is None:
                return
            moved = self._move(transition, phase.end)
            transport = self._world.take_places(transition.layout.mesh(self._config), moved.order)
            phase = Phase(transition.layout, transition.components, transport, moved.state, transition)
            del moved

    def _next_transition(self, phase: Phase) -> Transition | None:
        """None: the run is over."""
        state = phase.end
        self._num_transitions += 1
        key = f"transition {self._num_transitions}"
        if self._world.place is not None:  # by a clock that all processes share, more or less
            self._world.store.set(f"{key}/ended/{self._world.place}", repr(time.time()))
        if self._world.rank == 0:
            following = None if state is None else self._following(state.step)
            self._world.as_first(key, json.dumps(None if state is None else [state.step, str(following)]))
        waiting = lambda: "the first process to say how the run goes on"  # noqa: E731
        # Of a run that is over, the first process may still be writing its last checkpoint, however long that takes.
        word = json.loads(self._world.hear(f"said/{key}", waiting, is_working=state is not None))
        if word is None:
            return None
        step, text = word
        following = Layout.parse(text)
        components = in_layout_of(following.applied(self._config), phase.components)
        return Transition(step, phase.layout, following, components)

    def _following(self, step: int) -> Layout:
        told = self._commands.take() if self._commands is not None else None
        change = next_layout_change(self._config, step - 1)
        if told is not None:
            return told
        assert change is not None and change.step == step, "nobody asked for another layout"
        return change.layout

    def _move(self, transition: Transition, state: StageState | None) -> MovedState:
        """What this process needs of everyone's state, and who takes which place."""
        self._world.leave()
        with torch.device("meta"):
            model = transition.components.model.layers()
        sizes = transition.components.layers_per_stage
        tied = tied_parameters(model, sizes)
        holders = [
            {tied[name].name if name in tied else name for name, _ in cut(model, sizes, stage).named_parameters()}
            for stage in range(transition.layout.stages)
        ]
        moved = self._world.exchange(state, partial(destinations, holders, transition.layout.mesh(self._config)))
        self._world.store.add(f"transition {self._num_transitions}/bytes", moved.num_bytes)
        self._moved_at = time.time()
        return moved

    def settle(self, phase: Phase) -> list[dict[str, Any]]:
        """Waits until all stages of a new layout have started, and returns what the summary says about the change: one
        entry, or none for the first layout."""
        if (transition := phase.transition) is None:
            return []
        self._world.settle()
        word = None
        if self._world.rank == 0:
            reshape = self._reshape(transition, settled_at=time.time())
            Screen().print(
                f"after step {transition.step}: from {transition.before} to {transition.layout} (stages x replicas), "
                f"{reshape.bytes_moved / 1e6:,.1f} MB moved, {reshape.pause_seconds:.2f} s of pause"
            )
            word = json.dumps(asdict(reshape))
        said: dict[str, Any] = json.loads(self._world.as_first(f"reshape {self._num_transitions}", word))
        gc.collect()  # the old pipeline refers to itself
        return [said]

    def _reshape(self, transition: Transition, settled_at: float) -> Reshape:
        store, key = self._world.store, f"transition {self._num_transitions}"
        ended_at = max(float(store.get(f"{key}/ended/{place}")) for place in range(transition.before.size))
        return Reshape(
            transition.step,
            str(transition.before),
            str(transition.layout),
            store.add(f"{key}/bytes", 0),
            self._moved_at - ended_at,
            settled_at - ended_at,
        )


def write_command(folder: Path, layout: Layout) -> None:
    draft = folder / f"{COMMAND_NAME}.draft"
    draft.write_text(f"{layout}\n", encoding="utf-8")
    draft.replace(folder / COMMAND_NAME)


def parameter_of(name: str) -> str | None:
    """Whose part of the state a tensor is; None: of no parameter. See slipstream/checkpoint/stage_state.py."""
    kind, _, rest = name.partition("/")
    if kind == "products":
        return None
    return rest.split("/")[1 if kind == "working" else 0]


def destinations(holders: Sequence[Collection[str]], mesh: Mesh, name: str) -> list[int]:
    """The ranks that need a tensor of the state. holders: by stage, the parameters it holds."""
    parameter = parameter_of(name)
    stages = [0] if parameter is None else [s for s, held in enumerate(holders) if parameter in held]
    return [mesh.rank(replica, stage) for stage in stages for replica in range(mesh.num_replicas)]
