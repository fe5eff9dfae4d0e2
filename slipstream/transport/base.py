"""What a stage sees of the other stages.

A `Transport` has four links to the stage's neighbours (forward and backward, in and out), a gather over stages, sums
over the replicas of the stage, and a place to record a failure. process.py implements it over torch.distributed, with
shared memory on one machine and NCCL between GPUs; thread.py implements it over queues within one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .link import Link, Waiting

_PIECE_ELEMENTS = 2**22
"""Of a tied gradient: enough to keep a link busy, and 16 MiB in float32."""


class Gathering(ABC):
    """A gather under way."""

    @abstractmethod
    def wait(self, waiting: Waiting) -> list[Tensor]:
        """One tensor per stage, in the order of the stages."""


class Exchange(ABC):
    """A sum over replicas, or what one hands to the others, under way."""

    @abstractmethod
    def wait(self, waiting: Waiting) -> None:
        """The tensors hold it."""


class Transport(ABC):
    stage: int
    num_stages: int
    replica: int = 0
    num_replicas: int = 1
    """Copies of the whole pipeline. A stage's links and gathers stay within its own."""
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
        """Starts to collect a tensor of one shape from each of `stages`. All of them call it, and wait for what comes
        of it, in the same order."""

    def add_stages(
        self, tensor: Tensor, stages: tuple[int, ...], waiting: Waiting, dtype: torch.dtype | None = None
    ) -> None:
        """Adds up, in place and in the order of the stages, what each of `stages` has, in pieces, so that little memory
        is needed. All of them call it, in the same order. dtype: that the pieces travel in; None: the tensor's own."""
        flat = tensor.view(-1)
        for piece in flat.split(_PIECE_ELEMENTS):
            first, *others = self.gather(piece.to(dtype or piece.dtype, copy=True), stages).wait(waiting)
            piece.copy_(first)
            for other in others:
                piece += other

    @abstractmethod
    def add_replicas(self, tensors: Sequence[Tensor], owners: Sequence[int] | None = None) -> Exchange:
        """Starts to add up, in place, what the replicas of this stage have. All of them call it, in the same order. The
        sum has the same bits on all replicas; with `owners` only one of them gets it, and what the others are left with
        means nothing."""

    @abstractmethod
    def open_sharing(self) -> None:
        """Makes it possible to share aside. All stages of all replicas call it."""

    @abstractmethod
    def share(self, tensors: Sequence[Tensor], owners: Sequence[int], aside: bool = False) -> Exchange:
        """Starts to overwrite every tensor with what its owner among the replicas of this stage has. All of them call
        it, in the same order. aside: in an order of its own, whatever sums are under way."""

    @abstractmethod
    def fail(self, message: str) -> str:
        """Leaves word of a failure for all stages. The first word stands: it is returned."""

    def limit(self, what: Waiting) -> AbstractContextManager[None]:
        """Around what a stage does between two waits: where that may never return, somebody looks after it."""
        return nullcontext()

    @abstractmethod
    def flush(self) -> None:
        """Returns when everything sent has been taken; what follows may have other shapes."""

    @abstractmethod
    def close(self) -> None: ...


def gather_objects(transport: Transport, value: bytes, waiting: Waiting) -> list[bytes]:
    """Every stage's bytes, of any length, on every stage."""
    stages = tuple(range(transport.num_stages))
    length = torch.tensor([len(value)], dtype=torch.int64)
    lengths = [int(part) for part in transport.gather(length, stages).wait(waiting)]
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else padded[:0]
    parts: Sequence[Tensor] = transport.gather(padded, stages).wait(waiting)
    return [bytes(part[:size].tolist()) for part, size in zip(parts, lengths, strict=True)]
