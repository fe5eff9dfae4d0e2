"""Changes the layout (stages x replicas) of a run while it runs.

All stages stop after the same update, and the pipeline drains. The first process then sends the next layout to all
processes. Every process sends its state to the processes that will hold those layers, and a new pipeline starts where
the old one stopped. A change of layout is requested by `pipeline.reshape`, or by a file in the run's folder that
`slipstream reshape` writes.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.files import write_file
from ..checkpoint.stage_state import StageState
from ..config.layout import Layout, LayoutChange, check_changeable, next_layout_change, num_processes
from ..config.schema import Config
from ..errors import ConfigError
from ..observe.console import Screen
from ..pipeline.partition import cut, tied_parameters
from ..transport.base import Transport
from ..transport.mesh import Mesh
from ..transport.world import MovedState, World
from .build import Components, build_components, in_layout_of

COMMAND_NAME = "reshape.txt"
"""Name of the file in a run's folder that requests another layout."""


class Commands:
    """Reads requests for another layout from a file in the run's folder. Only the first process has an instance."""

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        self._config, self._path, self._say = config, folder / COMMAND_NAME, say
        self._layout: Layout | None = None

    def look(self) -> bool:
        """Returns whether a valid request is pending. Reads and removes the file if there is one."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
            self._path.unlink()
        except OSError:
            return self._layout is not None
        try:
            layout = Layout.parse(text)
            check_layout(self._config, layout)
            self._layout = layout
        except ConfigError as error:  # the author of the file sees no exit code of this process
            self._say(f"{self._path.name} changes nothing: {error}")
        return self._layout is not None

    def take(self) -> Layout | None:
        layout, self._layout = self._layout, None
        return layout


def check_layout(config: Config, layout: Layout) -> None:
    """Raises a ConfigError if a run of this configuration cannot change to the layout with the processes that it was
    launched with."""
    check_changeable(config)
    if layout.size > num_processes(config):
        raise ConfigError(
            f"{layout} takes {layout.size} processes and the run was started with {num_processes(config)}: use fewer, "
            f"or start it with pipeline.processes = {layout.size}"
        )
    build_components(layout.applied(config))


@dataclass
class Phase:
    """The part of a run that has one layout, as one process sees it."""

    layout: Layout
    components: Components
    transport: Transport | None
    """Transport of this process. None means that the process is idle in this layout."""
    start: StageState | None
    """State to start from. None means that the run starts from the beginning."""
    before: Layout | None = None
    """Layout before this one. None means that the run started with this one."""
    step: int = 0
    """Number of updates made before the layout changed to this one."""
    end: StageState | None = None
    """State after the last update in this layout, set by the caller. None means that the run is over, or that the
    process was idle."""


class Reshaping:
    """Leads one process of a run from layout to layout."""

    def __init__(self, world: World, config: Config, commands: Commands | None) -> None:
        self._world, self._config, self._commands = world, config, commands
        self._num_changes = 0
        self._moved_at = 0.0

    def phases(self, layout: Layout, start: StageState | None) -> Iterator[Phase]:
        """Yields one phase after the other until the run is over.

        Before it requests the next phase, the caller trains in this layout and sets `end`.
        """
        components = build_components(layout.applied(self._config))
        phase = Phase(layout, components, self._world.take_places(layout.mesh(self._config)), start)
        while True:
            yield phase
            change = self._next_change(phase)
            if change is None:
                return
            layout = change.layout
            components = in_layout_of(layout.applied(self._config), components)
            moved = self._move(layout, components, phase.end)
            transport = self._world.take_places(layout.mesh(self._config), moved.order)
            phase = Phase(layout, components, transport, moved.state, phase.layout, change.step)
            del moved

    def _next_change(self, phase: Phase) -> LayoutChange | None:
        """Returns the next change of layout, or None if the run is over."""
        state = phase.end
        self._num_changes += 1
        key = f"transition {self._num_changes}"
        if self._world.place is not None:  # wall-clock time, which all processes share approximately
            self._world.store.set(f"{key}/ended/{self._world.place}", repr(time.time()))
        if self._world.rank == 0:
            following = None if state is None else [state.step, str(self._following(state.step))]
            self._world.as_first(key, json.dumps(following))
        waiting = lambda: "the first process to say how the run goes on"  # noqa: E731
        # When a run is over, the first process may still be writing its last checkpoint. There is no limit on that
        # time.
        word = json.loads(self._world.hear(f"said/{key}", waiting, is_working=state is not None))
        return None if word is None else LayoutChange(word[0], Layout.parse(word[1]))

    def _following(self, step: int) -> Layout:
        asked = self._commands.take() if self._commands is not None else None
        if asked is not None:
            return asked
        change = next_layout_change(self._config, step - 1)
        assert change is not None and change.step == step, "nobody asked for another layout"
        return change.layout

    def _move(self, layout: Layout, components: Components, state: StageState | None) -> MovedState:
        """Exchanges the state between all processes.

        Returns the state that this process needs in the next layout, and the order of the processes in it.
        """
        self._world.leave()
        model = components.model.meta_layers()
        sizes = components.layers_per_stage
        tied = tied_parameters(model, sizes)
        held = [cut(model, sizes, stage) for stage in range(layout.stages)]
        holders = [
            {tied[name].name if name in tied else name for name, _ in layers.named_parameters()}
            | {name for name, _ in layers.named_buffers()}
            for layers in held
        ]
        moved = self._world.exchange(state, partial(destinations, holders, layout.mesh(self._config)))
        self._world.store.add(f"transition {self._num_changes}/bytes", moved.num_bytes)
        self._moved_at = time.time()
        return moved

    def settle(self, phase: Phase) -> list[dict[str, Any]]:
        """Waits until all stages of a new layout have started.

        Returns what the summary reports about the change: one entry, or none for the first layout.
        """
        if phase.before is None:
            return []
        self._world.settle()
        word = None
        if self._world.rank == 0:
            store, key, settled_at = self._world.store, f"transition {self._num_changes}", time.time()
            # No stage computes between the last update in the previous layout and the start of all stages.
            ended_at = max(float(store.get(f"{key}/ended/{place}")) for place in range(phase.before.size))
            reshape: dict[str, Any] = {
                "step": phase.step,
                "before": str(phase.before),
                "after": str(phase.layout),
                "bytes_moved": store.add(f"{key}/bytes", 0),
                "exchange_seconds": self._moved_at - ended_at,
                "pause_seconds": settled_at - ended_at,
            }
            Screen().print(
                f"after step {phase.step}: from {phase.before} to {phase.layout} (stages x replicas), "
                f"{reshape['bytes_moved'] / 1e6:,.1f} MB moved, {reshape['pause_seconds']:.2f} s of pause"
            )
            word = json.dumps(reshape)
        said: dict[str, Any] = json.loads(self._world.as_first(f"reshape {self._num_changes}", word))
        gc.collect()  # the old pipeline contains reference cycles
        return [said]


def write_command(folder: Path, layout: Layout) -> None:
    write_file(folder / COMMAND_NAME, [f"{layout}\n".encode()])


def parameter_of(name: str) -> str | None:
    """Returns the parameter or buffer that a tensor of the state belongs to, or None if it belongs to none.

    The names are described in slipstream/checkpoint/stage_state.py.
    """
    kind, _, rest = name.partition("/")
    if kind == "products":
        return None
    return rest.split("/")[1 if kind == "working" else 0]


def destinations(holders: Sequence[Collection[str]], mesh: Mesh, name: str) -> list[int]:
    """Returns the ranks that need a tensor of the state.

    holders: the names of the parameters and buffers that each stage holds.
    """
    parameter = parameter_of(name)
    stages = [0] if parameter is None else [s for s, held in enumerate(holders) if parameter in held]
    return [mesh.rank(replica, stage) for stage in stages for replica in range(mesh.num_replicas)]
