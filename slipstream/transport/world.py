"""The processes (or threads) of a run, which form one pipeline layout (stages x replicas) after another.

    transport = world.take_places(Mesh(num_stages=2))      a run with one layout needs no more
    ...
    moved = world.exchange(pipeline.state(), destinations)  after the last update in that layout
    transport = world.take_places(Mesh(num_stages=4), moved.order)
    pipeline = Pipeline(transport, ..., start=moved.state)
    world.settle()

A process without a place in the current layout is idle. Messages between members go through a store. Pipeline state is
sent over gloo, each tensor directly from the process that has it to the processes that need it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.stage_state import StageState, merge_facts
from .base import Transport
from .buckets import on_host
from .failures import leave_failure, read_failure
from .link import PeerLost, Waiting
from .mesh import Mesh
from .process import ProcessTransport, present
from .thread import ThreadMesh, ThreadTransport
from .watchdog import Watchdog

LOOK_SECONDS, IDLE_LOOK_SECONDS = 0.001, 0.03
"""Number of seconds between two checks for a message, of processes that work and of idle ones."""

Destinations = Callable[[str], Sequence[int]]
"""Function from the name of a tensor of the state to the places in the next layout that need it."""


@dataclass(frozen=True)
class MovedState:
    """The result of an exchange for one member."""

    state: StageState
    """State that this member needs, collected from all members."""
    num_bytes: int
    """Number of bytes that came from other members."""
    order: list[int]
    """Ranks of the members by place in the next layout. The state was distributed in this order."""


@dataclass(frozen=True)
class TensorLocation:
    """The rank that has a tensor of the state, and what is needed to receive it."""

    rank: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


class World(ABC):
    """The world as one of its members sees it. All members make the same calls, in the same order."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_seconds: float, is_close: bool) -> None:
        """`is_close` says that all members are on one machine, so that communication is equally fast between any two of
        them."""
        self.store, self.rank, self.size, self.timeout_seconds = store, rank, size, timeout_seconds
        self.place: int | None = None
        """Place of this member in the current layout. None means that it is idle."""
        self.transport: Transport | None = None
        """Transport of this member in the current layout. None means that it is idle."""
        self._is_close = is_close
        self._num_layouts = self._num_exchanges = 0

    @property
    def name(self) -> str:
        return f"process {self.rank}" if self.transport is None else f"stage {self.transport.stage}"

    # ---- layouts

    def take_places(self, mesh: Mesh, order: Sequence[int] | None = None) -> Transport | None:
        """Leaves the previous layout and joins this one. Members without a place are idle. `order` lists the members by
        place. None means by rank."""
        if mesh.size > self.size:
            raise ValueError(f"{mesh.num_stages} x {mesh.num_replicas} stages need more than {self.size} processes")
        self.leave()
        self._num_layouts += 1
        # Links are made by waits that do not notice a failure, so whoever fails before must do so before they begin.
        self.meet(f"layout {self._num_layouts}", lambda: "the others to take their places")
        members = list(range(mesh.size)) if order is None else list(order[: mesh.size])
        if self.rank in members:
            self.place = members.index(self.rank)
            self.transport = self._transport(mesh, self.place, f"layout {self._num_layouts}")
        return self.transport

    @abstractmethod
    def _transport(self, mesh: Mesh, place: int, name: str) -> Transport: ...

    def leave(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self.transport = self.place = None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the next layout needs tensors of other sizes, and an idle process needs none

    # ---- messages

    def as_first(self, key: str, value: str | None = None, waiting: Waiting | None = None) -> str:
        """Returns the value that the first member gives for this key. The values of the others are ignored."""
        if self.rank == 0:
            assert value is not None
            self.store.set(f"said/{key}", value)
            return value
        return self.hear(f"said/{key}", waiting or (lambda: f"the first process to say {key}"))

    def hear(self, key: str, waiting: Waiting, is_working: bool = True) -> str:
        """Waits until the store has a value for a key, and returns it. With `is_working`, another member is expected to
        set it soon, and a long silence is a failure. Without it, the wait has no time limit."""
        deadline = time.monotonic() + self.timeout_seconds
        while not self.store.check([key]):
            if (failure := self.failure()) is not None:
                raise PeerLost(f"{failure}: {self.name} was waiting for {waiting()}")
            if is_working and time.monotonic() > deadline:
                raise PeerLost(
                    f"the others have been silent for {self.timeout_seconds:g} s: {self.name} was waiting for "
                    f"{waiting()}"
                )
            time.sleep(LOOK_SECONDS if is_working else IDLE_LOOK_SECONDS)
        return self.store.get(key).decode()

    def meet(self, key: str, waiting: Waiting) -> None:
        """Returns when all members have called it with this key."""
        if self.store.add(f"came/{key}", 1) == self.size:
            self.store.set(f"all/{key}", "here")
        self.hear(f"all/{key}", waiting)

    @abstractmethod
    def failure(self) -> str | None:
        """Returns the first failure of any member. None means that there is none."""

    @abstractmethod
    def fail(self, message: str) -> str:
        """Records a failure for all members to see. Only the first failure is recorded. Returns the first failure."""

    # ---- exchange of state

    def exchange(self, state: StageState | None, destinations: Destinations) -> MovedState:
        """Redistributes the states of the current stages to those of the next layout. All members call it. `state` is
        None for a member that was idle. The caller must not use `state` afterwards."""
        self._num_exchanges += 1
        key = f"exchange {self._num_exchanges}"
        step, places, facts = self._gather_inventories(key, state)
        order = choose_members(places, destinations, self.size) if self._is_close else list(range(self.size))
        kept = {} if state is None else state.tensors
        tensors: dict[str, Tensor] = {}
        num_bytes = 0
        with self._moving(key):
            for name, place in sorted(places.items()):
                targets = [order[target] for target in destinations(name)]
                if place.rank == self.rank:
                    if others := [target for target in targets if target != self.rank]:
                        self._send(name, kept[name], others)
                    if self.rank in targets:
                        tensors[name] = kept[name]
                elif self.rank in targets:
                    tensors[name] = self._receive(name, place)
                    num_bytes += tensors[name].nbytes
        return MovedState(StageState(step, tensors, facts, is_given_away=True), num_bytes, order)

    def settle(self) -> None:
        """Returns when all members have loaded their part of the state, after an exchange."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.meet(f"settled {self._num_exchanges}", lambda: "the others to take up their part of the state")

    def _gather_inventories(
        self, key: str, state: StageState | None
    ) -> tuple[int, dict[str, TensorLocation], dict[str, dict[str, Any]]]:
        """Returns the step, the location of every tensor of the state, and the merged facts. The first member combines
        the inventories of all members, so that every other member has only one message to read."""
        own = state or StageState(-1)
        tensors = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.tensors.items()}
        self.store.set(f"{key}/{self.rank}", json.dumps([own.step, tensors, own.facts]))
        together = None
        if self.rank == 0:
            found = [json.loads(self._hear_inventory(key, rank)) for rank in range(self.size)]
            places = {name: [r, *spec] for r, (_, specs, _) in enumerate(found) for name, spec in specs.items()}
            together = json.dumps([max(step for step, *_ in found), places, merge_facts(facts for *_, facts in found)])
        step, specs, facts = json.loads(self.as_first(key, together))
        return (
            step,
            {name: TensorLocation(rank, dtype, tuple(shape)) for name, (rank, dtype, shape) in specs.items()},
            facts,
        )

    def _hear_inventory(self, key: str, rank: int) -> str:
        return self.hear(f"{key}/{rank}", lambda: f"the inventory of process {rank}")

    @abstractmethod
    @contextmanager
    def _moving(self, key: str) -> Iterator[None]:
        """Wraps the sends and receives of an exchange. They are complete at its end."""

    @abstractmethod
    def _send(self, name: str, tensor: Tensor, targets: Sequence[int]) -> None: ...

    @abstractmethod
    def _receive(self, name: str, place: TensorLocation) -> Tensor: ...


def choose_members(places: Mapping[str, TensorLocation], destinations: Destinations, size: int) -> list[int]:
    """Returns the ranks of the members by place: for each place preferably the one that already has most of the bytes
    needed there. The first member keeps the first place, because it acts for all."""
    held: Counter[tuple[int, int]] = Counter()
    for name, place in places.items():
        for target in destinations(name):
            held[target, place.rank] += place.num_bytes
    chosen = {0: 0}
    for target, rank in sorted(held, key=lambda pair: (-held[pair], pair)):
        if target not in chosen and rank not in chosen.values():
            chosen[target] = rank
    free = iter([rank for rank in range(size) if rank not in chosen.values()])
    return [chosen[target] if target in chosen else next(free) for target in range(size)]


class ProcessWorld(World):
    """A world whose members are processes."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_seconds: float,
        shared_memory: bool = True,
        backend: str = "auto",
        is_close: bool = False,
    ) -> None:
        super().__init__(dist.PrefixStore("world", store), rank, size, timeout_seconds, is_close)
        self._common_store, self._device = store, device
        is_watched = device.type == "cuda" and size > 1
        self._watchdog = Watchdog(lambda: self.name, self.failure, self.fail) if is_watched else None
        self._shared_memory, self._backend = shared_memory, backend
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def _transport(self, mesh: Mesh, place: int, name: str) -> Transport:
        return ProcessTransport(
            dist.PrefixStore(name, self._common_store),
            place,
            mesh,
            self._device,
            self.timeout_seconds,
            self._shared_memory,
            self._backend,
            failures=self._common_store,
            watchdog=self._watchdog,
        )

    def close(self) -> None:
        """Stops the watchdog. Call it after the last layout."""
        if self._watchdog is not None:
            self._watchdog.close()

    def failure(self) -> str | None:
        return read_failure(self._common_store)

    def fail(self, message: str) -> str:
        return leave_failure(self._common_store, message)

    @contextmanager
    def _moving(self, key: str) -> Iterator[None]:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(key, self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_seconds),
        )
        try:
            yield
            for work, _ in self._under_way:
                work.wait()
            self._under_way.clear()
            self.meet(key, lambda: "the others to move their state")
        except RuntimeError as error:
            if isinstance(error, PeerLost):
                raise
            raise PeerLost(f"{self.name} lost another while their state was moved: {error}") from error
        finally:
            dist.destroy_process_group()

    def _send(self, name: str, tensor: Tensor, targets: Sequence[int]) -> None:
        flat = _as_bytes(on_host(tensor.detach()) if tensor.is_cuda else tensor.detach())
        self._under_way += [(present(dist.isend(flat, target)), flat) for target in targets]

    def _receive(self, name: str, place: TensorLocation) -> Tensor:
        tensor = place.empty()
        flat = _as_bytes(tensor)
        self._under_way.append((present(dist.irecv(flat, place.rank)), flat))
        return tensor


@dataclass
class ThreadWorldState:
    """The state that the members of a world of threads share."""

    size: int
    timeout_seconds: float
    store: dist.Store = field(default_factory=dist.HashStore)
    lock: threading.Lock = field(default_factory=threading.Lock)
    worlds: dict[str, ThreadMesh] = field(default_factory=dict)
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """Tensors of states that are being redistributed, by exchange and name."""
    failure: str | None = None

    def world(self, mesh: Mesh, name: str) -> ThreadMesh:
        with self.lock:
            if name not in self.worlds:
                self.worlds[name] = ThreadMesh(mesh.num_stages, self.timeout_seconds, mesh.num_replicas)
            return self.worlds[name]


class ThreadWorld(World):
    """A world whose members are threads of one process."""

    def __init__(self, state: ThreadWorldState, rank: int) -> None:
        super().__init__(state.store, rank, state.size, state.timeout_seconds, is_close=True)
        self._state, self._key = state, ""

    def _transport(self, mesh: Mesh, place: int, name: str) -> Transport:
        replica, stage = mesh.place(place)
        return self._state.world(mesh, name).transport(stage, replica)

    def failure(self) -> str | None:
        with self._state.lock:
            said = [world.failure for world in self._state.worlds.values() if world.failure is not None]
            return self._state.failure or (said[0] if said else None)

    def fail(self, message: str) -> str:
        if isinstance(self.transport, ThreadTransport):
            message = self.transport.fail(message)
        with self._state.lock:
            self._state.failure = self._state.failure or message
            return self._state.failure

    @contextmanager
    def _moving(self, key: str) -> Iterator[None]:
        self._key = key
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the tensors to pass on were computed on streams of their owner
        yield
        self.meet(key, lambda: "the others to move their state")
        if self.rank == 0:
            self._state.tensors.clear()

    def _send(self, name: str, tensor: Tensor, targets: Sequence[int]) -> None:
        self._state.tensors[self._key, name] = tensor
        self.store.set(f"{self._key}/there/{name}", "here")

    def _receive(self, name: str, place: TensorLocation) -> Tensor:
        self.hear(f"{self._key}/there/{name}", lambda: f"{name} of process {place.rank}")
        return self._state.tensors[self._key, name].detach().clone()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor as bytes. The tensor must be contiguous if the bytes are written to: otherwise the
    result is a copy."""
    return tensor.contiguous().view(-1).view(torch.uint8)
