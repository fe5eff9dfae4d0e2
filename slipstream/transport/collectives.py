"""Gathers over the stages, and sums and broadcasts between the replicas of a stage, for `ProcessTransport`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Exchange, Gathering
from .buckets import Bucket
from .link import Waiting
from .nccl import Circle, all_gather
from .shared_memory import Assembly

WaitFor = Callable[[Any, Waiting], None]
"""Function that blocks until a work of torch.distributed is done."""


class ProcessGathering(Gathering):
    """A gather over gloo."""

    def __init__(
        self,
        wait: WaitFor,
        work: dist.Work,
        tensor: Tensor,
        gathered: list[Tensor],
        device: torch.device,
    ) -> None:
        self._wait, self._work, self._tensor, self._gathered = wait, work, tensor, gathered
        self._device = device

    def wait(self, waiting: Waiting) -> list[Tensor]:
        self._wait(self._work, waiting)
        return [tensor.to(self._device) for tensor in self._gathered]


@dataclass(frozen=True)
class CircleGathering(Gathering):
    """A gather over NCCL."""

    circle: Circle
    tensor: Tensor
    num_stages: int

    def wait(self, waiting: Waiting) -> list[Tensor]:
        flat = self.tensor.contiguous().view(-1)
        gathered = flat.new_empty(self.num_stages * flat.numel())
        self.circle.run(lambda: [all_gather(gathered, flat, group=self.circle.group, async_op=True)], waiting)
        return [part.view_as(self.tensor) for part in gathered.chunk(self.num_stages)]


@dataclass(frozen=True)
class AssemblyGathering(Gathering):
    """A gather through an Assembly, between processes of one machine."""

    assembly: Assembly
    tensor: Tensor
    num_stages: int

    def wait(self, waiting: Waiting) -> list[Tensor]:
        return self.assembly.gather(self.tensor, self.num_stages, waiting)


class ReplicaExchange(Exchange):
    """A sum or broadcast of buckets between the replicas of a stage."""

    def __init__(
        self,
        wait: WaitFor,
        replica: int,
        buckets: Sequence[Bucket],
        start: Callable[[Bucket], Any],
        receives: bool,
        circle: Circle | None,
    ) -> None:
        """`receives` says who gets a bucket: the replicas that do not own it (True) or its owner (False). `circle` is
        given over NCCL: there nothing starts before all replicas wait for it."""
        self._wait, self._replica, self._buckets, self._receives = wait, replica, buckets, receives
        self._circle, self._start = circle, start
        self._works = [present(start(bucket)) for bucket in buckets] if circle is None else []

    def wait(self, waiting: Waiting) -> None:
        if self._circle is not None:
            self._circle.run(lambda: [self._start(bucket) for bucket in self._buckets], waiting)
        for work in self._works:
            self._wait(work, waiting)
        for bucket in self._buckets:
            if bucket.owner is None or (bucket.owner != self._replica) == self._receives:
                bucket.put_back()


def present(value: Any) -> Any:
    """Returns the value, which must not be None. torch declares that these calls return None for ranks outside the
    group, but here every rank is inside."""
    assert value is not None
    return value
