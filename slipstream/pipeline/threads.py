"""Stages as threads of one process, which reach each other through queues: tests, and several stages on one GPU."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .comm import Gathering, Summing, Transport
from .link import Link, Message, PeerLost, Waiting

Meeting = tuple[str, tuple[int, ...], int]
"""Of threads: which they are, who comes, and the how manieth it is."""


class ThreadWorld:
    """What the stages of one process share: a condition, and everything that is guarded by it."""

    def __init__(self, num_stages: int, timeout_seconds: float = 60.0, num_replicas: int = 1) -> None:
        self.num_stages, self.num_replicas, self.timeout_seconds = num_stages, num_replicas, timeout_seconds
        self.changed = threading.Condition()
        self.failure: str | None = None
        self.queues: defaultdict[tuple[str, int, int], deque[Message]] = defaultdict(deque)
        """By direction, replica and edge."""
        self.gathers: dict[Meeting, dict[int, Any]] = {}

    def transport(self, stage: int, replica: int = 0) -> ThreadTransport:
        with self.changed:
            return ThreadTransport(self, stage, replica)

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
    def __init__(self, world: ThreadWorld, stage: int, meeting: Meeting) -> None:
        self._world, self._stage, self._meeting = world, stage, meeting
        self._parts = world.gathers[meeting]

    def wait(self, waiting: Waiting) -> list[Any]:
        members = self._meeting[1]
        with self._world.changed:
            self._world.wait_for(lambda: len(self._parts) == len(members), self._stage, waiting)
            self._world.gathers.pop(self._meeting, None)
        return [self._parts[member] for member in members]


class ThreadSumming(Summing):
    def __init__(self, gathering: ThreadGathering, tensors: Sequence[Tensor]) -> None:
        self._gathering, self._tensors = gathering, tensors

    @torch.no_grad()
    def wait(self, waiting: Waiting) -> None:
        for tensor, *parts in zip(self._tensors, *self._gathering.wait(waiting), strict=True):
            tensor.copy_(functools.reduce(torch.add, parts))  # in the order of the replicas, on all of them


class ThreadTransport(Transport):
    def __init__(self, world: ThreadWorld, stage: int, replica: int) -> None:
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
        return self._meet(f"stages of replica {self.replica}", stages, self.stage, tensor)

    def add_replicas(self, tensors: Sequence[Tensor]) -> Summing:
        own = [tensor.clone() for tensor in tensors]  # the sum is written into the others while they are still read
        replicas = tuple(range(self.num_replicas))
        return ThreadSumming(self._meet(f"replicas of stage {self.stage}", replicas, self.replica, own), tensors)

    def _meet(self, what: str, members: tuple[int, ...], member: int, value: Any) -> ThreadGathering:
        index = self._num_meetings[what, members]
        self._num_meetings[what, members] = index + 1
        with self._world.changed:
            parts = self._world.gathers.setdefault((what, members, index), {})
            gathering = ThreadGathering(self._world, self.stage, (what, members, index))
            parts[member] = value
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
