"""How stages reach each other; with shared_memory.py, all that sends or receives.

A `Transport` is what one stage sees of the others: four links to its neighbours (forward and backward, in and out), a
gather over stages, and a place to leave word of a failure. Two kinds: `ProcessTransport` over torch.distributed (gloo
on CPU, with shared memory between processes of one machine; NCCL on CUDA) and `ThreadTransport` over in-process queues
(tests, several stages on one GPU).

A link over torch.distributed has a process group of its own: NCCL ignores message tags, so order within a group is all
there is, and a receive posted early in a shared group could stand before a send it depends on.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .link import Link, Message, PeerLost, Spec, Waiting, peer_lost
from .shared_memory import Ends, SharedMemoryLink, connect

_HEADER_LENGTH = 256


class Gathering(ABC):
    """A gather under way."""

    @abstractmethod
    def wait(self, waiting: Waiting) -> list[Tensor]:
        """One tensor per stage, in the order of the stages."""


class Transport(ABC):
    stage: int
    num_stages: int
    timeout_seconds: float
    max_under_way: int = 1
    """Messages that may be sent and not yet taken, on each link; more than that, and the sender waits."""
    forward_in: Link
    forward_out: Link
    backward_in: Link
    backward_out: Link

    @abstractmethod
    def open_group(self, stages: tuple[int, ...]) -> None:
        """Makes a gather over `stages` possible. All stages call it, members or not; all together are one already."""

    @abstractmethod
    def gather(self, tensor: Tensor, stages: tuple[int, ...]) -> Gathering:
        """Starts to collect a tensor of one shape from each of `stages`. All of them call it, in the same order."""

    @abstractmethod
    def fail(self, message: str) -> str:
        """Leaves word of a failure for all stages. The first word stands: it is returned."""

    @abstractmethod
    def flush(self) -> None:
        """Returns when everything sent has been taken; what follows may have other shapes."""

    @abstractmethod
    def close(self) -> None: ...


# ---- between processes: torch.distributed --------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokenWork:
    """A send or receive that could not even be started."""

    error: RuntimeError

    def wait(self, timeout: timedelta | None = None) -> None:
        raise self.error


class ProcessLink(Link):
    def __init__(self, transport: ProcessTransport, peer: int, group: dist.ProcessGroup) -> None:
        self._transport, self._peer, self._group = transport, peer, group
        self._specs: dict[str, Spec] = {}
        self._sending: deque[tuple[list[dist.Work | BrokenWork], Message, Waiting]] = deque()
        self._expected: deque[str] = deque()
        self._posted: deque[tuple[list[dist.Work | BrokenWork], Message]] = deque()

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        message = tuple(tensor.contiguous() for tensor in message)
        if kind not in self._specs:
            self._specs[kind] = Spec.of(message)
            self._send((self._header(self._specs[kind]),), waiting)
        else:
            self._specs[kind].check(kind, message)
        self._send(message, waiting)
        while len(self._sending) > self._transport.max_under_way:
            self._finish_oldest()

    def _header(self, spec: Spec) -> Tensor:
        numbers = spec.encode()
        if len(numbers) > _HEADER_LENGTH:
            raise ValueError(f"{len(spec.tensors)} tensors are too many to pass between two layers: pass fewer")
        return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)), device=self._transport.device)

    def _send(self, message: Message, waiting: Waiting) -> None:
        works = [self._start(dist.isend, tensor) for tensor in message]
        self._sending.append((works, message, waiting))  # a work dropped too early takes its message with it

    def _finish_oldest(self) -> None:
        """Only a wait tells that a gloo send is done: so it is asked when the message must have been taken long ago."""
        works, _, waiting = self._sending.popleft()
        for work in works:
            self._transport.wait(work, waiting, self._peer)

    def _start(self, operation: Callable[..., Any], tensor: Tensor) -> dist.Work | BrokenWork:
        """A peer that is gone is no error yet: it is one for whoever waits, who can say what for."""
        try:
            return operation(tensor, self._peer, group=self._group)
        except RuntimeError as error:
            return BrokenWork(error)

    def expect(self, kind: str) -> None:
        self._expected.append(kind)
        self._post()

    def _post(self) -> None:
        """Posts what is expected, in order, as far as its shape is known: into fresh tensors, because a receive does
        not bump a tensor's version counter, and an older microbatch's graph may hold the last one."""
        while self._expected and (spec := self._specs.get(self._expected[0])) is not None:
            self._expected.popleft()
            message = tuple(
                torch.empty(shape, dtype=dtype, device=self._transport.device) for dtype, shape in spec.tensors
            )
            works = [self._start(dist.irecv, tensor) for tensor in message]
            self._posted.append((works, message))

    def take(self, waiting: Waiting) -> Message:
        if not self._posted:
            header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._transport.device)
            self._transport.wait(self._start(dist.irecv, header), waiting, self._peer)
            self._specs[self._expected[0]] = Spec.decode(header.tolist())
            self._post()
        works, message = self._posted.popleft()
        for work in works:
            self._transport.wait(work, waiting, self._peer)
        return message

    def flush(self) -> None:
        while self._sending:
            self._finish_oldest()
        self._specs.clear()

    def close(self) -> None:
        """Its group goes with all others."""


class ProcessGathering(Gathering):
    def __init__(self, transport: ProcessTransport, work: dist.Work, tensor: Tensor, gathered: list[Tensor]) -> None:
        self._transport, self._work, self._tensor, self._gathered = transport, work, tensor, gathered

    def wait(self, waiting: Waiting) -> list[Tensor]:
        self._transport.wait(self._work, waiting, None)
        return self._gathered


class ProcessTransport(Transport):
    """One stage per rank of the default process group; rank = stage."""

    def __init__(
        self, store: dist.Store, device: torch.device, timeout_seconds: float, shared_memory: bool = True
    ) -> None:
        self.stage, self.num_stages = dist.get_rank(), dist.get_world_size()
        self.device, self.timeout_seconds = device, timeout_seconds
        self._store = store
        self._timeout = timedelta(seconds=timeout_seconds)
        self._links: list[ProcessLink | SharedMemoryLink] = []
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        ends: dict[int, Ends] = {}
        is_shared = [False] * (self.num_stages - 1)
        if shared_memory and device.type == "cpu":
            ends, is_shared = connect(store, self.stage, self.num_stages, timeout_seconds)
        for edge in range(self.num_stages - 1):
            groups = [] if is_shared[edge] else [self._new_group((edge, edge + 1), self._backend) for _ in range(2)]
            if self.stage not in (edge, edge + 1):
                continue
            peer = 2 * edge + 1 - self.stage
            forward, backward = (
                [SharedMemoryLink(end, self.stage, peer, timeout_seconds, self._max_under_way) for end in ends[edge]]
                if is_shared[edge]
                else [ProcessLink(self, peer, group) for group in groups]
            )
            self._links += [forward, backward]
            if self.stage == edge:
                self.forward_out, self.backward_in = forward, backward
            else:
                self.forward_in, self.backward_out = forward, backward
        everyone = tuple(range(self.num_stages))
        self._groups[everyone, "gloo"] = self._new_group(everyone, "gloo")

    @property
    def _backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def _max_under_way(self) -> int:
        return self.max_under_way

    def _new_group(self, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        """Every rank makes every group, in the same order, whether or not it is a member: torch asks for that."""
        return dist.new_group(list(ranks), backend=backend, timeout=self._timeout)

    def open_group(self, stages: tuple[int, ...]) -> None:
        self._groups[stages, self._backend] = self._new_group(stages, self._backend)

    def gather(self, tensor: Tensor, stages: tuple[int, ...]) -> Gathering:
        group = self._groups[stages, "nccl" if tensor.is_cuda else "gloo"]
        gathered = [torch.empty_like(tensor) for _ in stages]
        work = _present(dist.all_gather(gathered, tensor, group=group, async_op=True))
        return ProcessGathering(self, work, tensor, gathered)

    def wait(self, work: dist.Work | BrokenWork, waiting: Waiting, peer: int | None) -> None:
        """Blocks until `work` is done: on the host for gloo, on the current stream for NCCL, which then keeps the time
        itself (the groups' time-out)."""
        started = time.monotonic()
        try:
            if self.device.type == "cuda":
                work.wait()
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            is_silent = time.monotonic() - started >= self.timeout_seconds
            raise peer_lost(self.stage, peer, self.timeout_seconds if is_silent else None, waiting) from error

    def fail(self, message: str) -> str:
        try:
            return self._store.compare_set("slipstream/failure", "", message).decode()
        except (RuntimeError, ValueError):  # the store went down with its host
            return message

    def flush(self) -> None:
        for link in self._links:
            link.flush()

    def close(self) -> None:
        for link in self._links:
            link.close()
        dist.destroy_process_group()


def _present(value: Any) -> Any:
    """torch types these calls as returning None for ranks outside the group; ours are always inside."""
    assert value is not None
    return value


# ---- between threads: queues ---------------------------------------------------------------------------------------


class ThreadWorld:
    """What the stages of one process share: a condition, and everything that is guarded by it."""

    def __init__(self, num_stages: int, timeout_seconds: float = 60.0) -> None:
        self.num_stages, self.timeout_seconds = num_stages, timeout_seconds
        self.changed = threading.Condition()
        self.failure: str | None = None
        self.queues: dict[tuple[str, int], deque[Message]] = {}
        self.gathers: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = {}
        for edge in range(num_stages - 1):
            self.queues["forward", edge] = deque()
            self.queues["backward", edge] = deque()

    def transport(self, stage: int) -> ThreadTransport:
        return ThreadTransport(self, stage)

    def wait_for(self, ready: Callable[[], bool], stage: int, waiting: Waiting) -> None:
        """Call with the condition held."""
        if not self.changed.wait_for(lambda: ready() or self.failure is not None, self.timeout_seconds):
            raise PeerLost(
                f"the others have been silent for {self.timeout_seconds:g} s: stage {stage} was waiting for {waiting()}"
            )
        if not ready():
            raise PeerLost(f"{self.failure}: stage {stage} was waiting for {waiting()}")


class QueueLink(Link):
    def __init__(self, world: ThreadWorld, stage: int, queue: deque[Message]) -> None:
        self._world, self._stage, self._queue = world, stage, queue

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        with self._world.changed:
            self._queue.append(message)
            self._world.changed.notify_all()

    def expect(self, kind: str) -> None:
        pass

    def take(self, waiting: Waiting) -> Message:
        with self._world.changed:
            self._world.wait_for(lambda: len(self._queue) > 0, self._stage, waiting)
            return self._queue.popleft()


class ThreadGathering(Gathering):
    def __init__(self, world: ThreadWorld, stage: int, key: tuple[tuple[int, ...], int]) -> None:
        self._world, self._stage, self._key = world, stage, key
        self._parts = world.gathers[key]

    def wait(self, waiting: Waiting) -> list[Tensor]:
        with self._world.changed:
            self._world.wait_for(lambda: len(self._parts) == len(self._key[0]), self._stage, waiting)
            self._world.gathers.pop(self._key, None)
        return [self._parts[stage] for stage in self._key[0]]


class ThreadTransport(Transport):
    def __init__(self, world: ThreadWorld, stage: int) -> None:
        self.stage, self.num_stages, self.timeout_seconds = stage, world.num_stages, world.timeout_seconds
        self._world = world
        self._num_gathers: dict[tuple[int, ...], int] = {}
        if stage > 0:
            self.forward_in = QueueLink(world, stage, world.queues["forward", stage - 1])
            self.backward_out = QueueLink(world, stage, world.queues["backward", stage - 1])
        if stage < world.num_stages - 1:
            self.forward_out = QueueLink(world, stage, world.queues["forward", stage])
            self.backward_in = QueueLink(world, stage, world.queues["backward", stage])

    def open_group(self, stages: tuple[int, ...]) -> None:
        pass

    def gather(self, tensor: Tensor, stages: tuple[int, ...]) -> Gathering:
        index = self._num_gathers.get(stages, 0)
        self._num_gathers[stages] = index + 1
        with self._world.changed:
            parts = self._world.gathers.setdefault((stages, index), {})
            gathering = ThreadGathering(self._world, self.stage, (stages, index))
            parts[self.stage] = tensor
            self._world.changed.notify_all()
        return gathering

    def fail(self, message: str) -> str:
        with self._world.changed:
            self._world.failure = self._world.failure or message
            self._world.changed.notify_all()
            return self._world.failure

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def gather_objects(transport: Transport, value: bytes, waiting: Waiting) -> list[bytes]:
    """Every stage's bytes, of any length, on every stage."""
    stages = tuple(range(transport.num_stages))
    length = torch.tensor([len(value)], dtype=torch.int64)
    lengths = [int(part) for part in transport.gather(length, stages).wait(waiting)]
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else padded[:0]
    parts: Sequence[Tensor] = transport.gather(padded, stages).wait(waiting)
    return [bytes(part[:size].tolist()) for part, size in zip(parts, lengths, strict=True)]
