"""Stages as threads of one process, which communicate through queues. It is for tests, and for several stages on one
GPU."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .base import Exchange, Gathering, Transport
from .link import Link, Message, PeerLost, Waiting

Meeting = tuple[str, tuple[int, ...], int]
"""Key of a meeting of threads: its purpose, its members, and its index among the meetings with this purpose and
members."""


class Handed(NamedTuple):
    """Tensors that one thread passes to another. On CUDA each thread has streams of its own. So the receiver must wait
    until the tensors are computed, and the allocator must not reuse their memory while the receiver's stream reads
    them."""

    tensors: tuple[Tensor, ...]
    ready: torch.cuda.Event | None

    @classmethod
    def over(cls, tensors: Sequence[Tensor]) -> Handed:
        ready = None
        if any(tensor.is_cuda for tensor in tensors):
            ready = torch.cuda.Event()
            ready.record()
        return cls(tuple(tensors), ready)

    def take(self) -> tuple[Tensor, ...]:
        if self.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.ready)
            for tensor in self.tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.tensors


class ThreadMesh:
    """The state that the stages of one process share: a condition variable, and everything that it guards."""

    def __init__(self, num_stages: int, timeout_seconds: float = 60.0, num_replicas: int = 1) -> None:
        self.num_stages, self.num_replicas, self.timeout_seconds = num_stages, num_replicas, timeout_seconds
        self.changed = threading.Condition()
        self.failure: str | None = None
        self.queues: defaultdict[tuple[str, int, int], deque[Handed]] = defaultdict(deque)
        """Queues of messages by direction, replica and edge."""
        self.gathers: dict[Meeting, dict[int, Handed]] = {}
        self.told: defaultdict[int, deque[list[int]]] = defaultdict(deque)
        """Numbers that the last stage told the first one, by replica."""

    def transport(self, stage: int, replica: int = 0) -> ThreadTransport:
        with self.changed:
            return ThreadTransport(self, stage, replica)

    def wait_for(self, ready: Callable[[], bool], stage: int, waiting: Waiting) -> None:
        """Waits until `ready()`. Raises PeerLost if that takes too long or if a stage has failed. Call it with the
        condition's lock held."""
        if not self.changed.wait_for(lambda: ready() or self.failure is not None, self.timeout_seconds):
            raise PeerLost(
                f"the others have been silent for {self.timeout_seconds:g} s: stage {stage} was waiting for {waiting()}"
            )
        if not ready():
            raise PeerLost(f"{self.failure}: stage {stage} was waiting for {waiting()}")


class QueueLink(Link):
    """One end of a link between two threads."""

    def __init__(self, world: ThreadMesh, stage: int, queue: deque[Handed]) -> None:
        self._world, self._stage, self._queue = world, stage, queue

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        handed = Handed.over(message)
        with self._world.changed:
            self._queue.append(handed)
            self._world.changed.notify_all()

    def expect(self, kind: str) -> None:
        pass

    def take(self, waiting: Waiting) -> Message:
        with self._world.changed:
            self._world.wait_for(lambda: len(self._queue) > 0, self._stage, waiting)
            handed = self._queue.popleft()
        return handed.take()


class ThreadMeeting:
    """One member's view of a meeting, in which every member contributes tensors and gets those of all."""

    def __init__(self, world: ThreadMesh, stage: int, meeting: Meeting) -> None:
        self._world, self._stage, self._meeting = world, stage, meeting
        self._parts = world.gathers[meeting]

    def wait(self, waiting: Waiting) -> list[tuple[Tensor, ...]]:
        """Waits for all members and returns the tensors of each of them."""
        members = self._meeting[1]
        with self._world.changed:
            self._world.wait_for(lambda: len(self._parts) == len(members), self._stage, waiting)
            self._world.gathers.pop(self._meeting, None)
        return [self._parts[member].take() for member in members]


class ThreadGathering(Gathering):
    """A gather between threads."""

    def __init__(self, meeting: ThreadMeeting) -> None:
        self._meeting = meeting

    def wait(self, waiting: Waiting) -> list[Tensor]:
        return [tensor for (tensor,) in self._meeting.wait(waiting)]


class ThreadExchange(Exchange):
    """A sum or broadcast between the replicas of a stage, in threads."""

    def __init__(
        self,
        meeting: ThreadMeeting,
        tensors: Sequence[Tensor],
        combine: Callable[[int, tuple[Tensor, ...]], Tensor | None],
    ) -> None:
        """`combine` maps the index of a tensor and that tensor of every replica to the new value. None means that it
        keeps its value."""
        self._meeting, self._tensors, self._combine = meeting, tensors, combine

    @torch.no_grad()
    def wait(self, waiting: Waiting) -> None:
        brought = zip(*self._meeting.wait(waiting), strict=True)
        for index, (tensor, parts) in enumerate(zip(self._tensors, brought, strict=True)):
            if (result := self._combine(index, parts)) is not None:
                tensor.copy_(result)


class ThreadTransport(Transport):
    """The transport of one stage that is a thread."""

    shares_objects = True

    def __init__(self, world: ThreadMesh, stage: int, replica: int) -> None:
        self.stage, self.num_stages, self.timeout_seconds = stage, world.num_stages, world.timeout_seconds
        self.replica, self.num_replicas = replica, world.num_replicas
        self._world = world
        self._num_meetings: defaultdict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        if stage > 0:
            self.forward_in = QueueLink(world, stage, world.queues["forward", replica, stage - 1])
            self.backward_out = QueueLink(world, stage, world.queues["backward", replica, stage - 1])
        if stage < world.num_stages - 1:
            self.forward_out = QueueLink(world, stage, world.queues["forward", replica, stage])
            self.backward_in = QueueLink(world, stage, world.queues["backward", replica, stage])

    def open_group(self, stages: tuple[int, ...]) -> None:
        pass

    def gather(self, tensor: Tensor, stages: tuple[int, ...]) -> Gathering:
        return ThreadGathering(self._meet(f"stages of replica {self.replica}", stages, self.stage, [tensor]))

    def add_replicas(self, tensors: Sequence[Tensor], owners: Sequence[int] | None = None) -> Exchange:
        def combine(index: int, parts: tuple[Tensor, ...]) -> Tensor | None:
            if owners is not None and owners[index] != self.replica:
                return None
            # In the same order on all replicas, so that the sums have the same bits.
            return functools.reduce(torch.add, parts)

        return self._exchange("sum", tensors, combine)

    def open_sharing(self) -> None:
        pass

    def share(self, tensors: Sequence[Tensor], owners: Sequence[int], aside: bool = False) -> Exchange:
        def combine(index: int, parts: tuple[Tensor, ...]) -> Tensor | None:
            return None if owners[index] == self.replica else parts[owners[index]]

        return self._exchange("share aside" if aside else "share", tensors, combine)

    def _exchange(
        self, what: str, tensors: Sequence[Tensor], combine: Callable[[int, tuple[Tensor, ...]], Tensor | None]
    ) -> Exchange:
        # The other threads may read it after this one has overwritten the original.
        own = [tensor.clone() for tensor in tensors]
        replicas = tuple(range(self.num_replicas))
        meeting = self._meet(f"{what}, replicas of stage {self.stage}", replicas, self.replica, own)
        return ThreadExchange(meeting, tensors, combine)

    def _meet(self, what: str, members: tuple[int, ...], member: int, tensors: Sequence[Tensor]) -> ThreadMeeting:
        index = self._num_meetings[what, members]
        self._num_meetings[what, members] = index + 1
        handed = Handed.over(tensors)
        with self._world.changed:
            parts = self._world.gathers.setdefault((what, members, index), {})
            meeting = ThreadMeeting(self._world, self.stage, (what, members, index))
            parts[member] = handed
            self._world.changed.notify_all()
        return meeting

    def tell_first(self, numbers: Sequence[int]) -> None:
        with self._world.changed:
            self._world.told[self.replica].append(list(numbers))
            self._world.changed.notify_all()

    def hear_last(self, waiting: Waiting) -> list[int]:
        with self._world.changed:
            told = self._world.told[self.replica]
            self._world.wait_for(lambda: len(told) > 0, self.stage, waiting)
            return told.popleft()

    def fail(self, message: str) -> str:
        with self._world.changed:
            self._world.failure = self._world.failure or message
            self._world.changed.notify_all()
            return self._world.failure

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
