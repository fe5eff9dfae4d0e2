"""The interface through which a stage communicates with the other stages.

A `Transport` has four links to the stage's neighbours (forward and backward, in and out), a gather over stages, sums
over the replicas of the stage, and a place to record a failure. process.py implements it over torch.distributed, with
shared memory on one machine and NCCL between GPUs. thread.py implements it over queues within one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .link import Link, Waiting

_PIECE_ELEMENTS = 2**22
"""Number of elements of a tied gradient that are sent at a time. It is enough to keep a link busy, and 16 MiB in
float32."""


class Gathering(ABC):
    """A gather that has been started and may not be complete yet."""

    @abstractmethod
    def wait(self, waiting: Waiting) -> list[Tensor]:
        """Waits for the gather and returns one tensor per stage, in the order of the stages."""


class Exchange(ABC):
    """A sum over replicas, or a broadcast between them, that has been started and may not be complete yet."""

    @abstractmethod
    def wait(self, waiting: Waiting) -> None:
        """Returns when the tensors hold the result."""


class Transport(ABC):
    """The connections of one stage to the other stages and to the other replicas."""

    stage: int
    num_stages: int
    replica: int = 0
    num_replicas: int = 1
    """Number of copies of the whole pipeline. The links and gathers of a stage stay within its own replica."""
    device: torch.device = torch.device("cpu")
    """Device of the tensors that processes exchange. Threads exchange tensors of any device."""
    shares_objects: bool = False
    """Whether stages are threads of one process, which are given the same model."""
    timeout_seconds: float
    max_under_way: int = 1
    """Number of messages per link that may be sent but not yet taken. The sender waits if there are more."""
    forward_in: Link
    forward_out: Link
    backward_in: Link
    backward_out: Link

    @abstractmethod
    def open_group(self, stages: tuple[int, ...]) -> None:
        """Makes a gather over `stages` possible. All stages call it, members or not. A gather over all stages needs no
        call."""

    @abstractmethod
    def gather(self, tensor: Tensor, stages: tuple[int, ...]) -> Gathering:
        """Starts to collect a tensor of the same shape from each of `stages`. All of them call it, and wait for the
        results, in the same order."""

    def add_stages(
        self, tensor: Tensor, stages: tuple[int, ...], waiting: Waiting, dtype: torch.dtype | None = None
    ) -> None:
        """Adds up the tensors of `stages`, in place and in the order of the stages. All of them call it, in the same
        order. The tensors are sent in pieces, so that little memory is needed. `dtype` is the type in which the pieces
        are sent. None means the tensor's own."""
        flat = tensor.view(-1)
        for piece in flat.split(_PIECE_ELEMENTS):
            first, *others = self.gather(piece.to(dtype or piece.dtype, copy=True), stages).wait(waiting)
            piece.copy_(first)
            for other in others:
                piece += other

    @abstractmethod
    def add_replicas(self, tensors: Sequence[Tensor], owners: Sequence[int] | None = None) -> Exchange:
        """Starts to add up the tensors of the replicas of this stage, in place. All replicas call it, in the same
        order. The sum has the same bits on all replicas. With `owners`, only the owner of each tensor gets its sum, and
        the contents of that tensor on the other replicas are undefined."""

    @abstractmethod
    def open_sharing(self) -> None:
        """Makes `share` with `aside=True` possible. All stages of all replicas call it."""

    @abstractmethod
    def share(self, tensors: Sequence[Tensor], owners: Sequence[int], aside: bool = False) -> Exchange:
        """Starts to overwrite every tensor with the copy that its owner among the replicas of this stage has. All
        replicas call it, in the same order. With `aside`, these calls have an order of their own, independent of sums
        that are in progress."""

    @abstractmethod
    def tell_first(self, numbers: Sequence[int]) -> None:
        """Sends a few numbers from the last stage to the first one of this replica. Returns at once. They are
        independent of the order of gathers and of messages on the links."""

    @abstractmethod
    def hear_last(self, waiting: Waiting) -> list[int]:
        """Waits, on the first stage, for the next numbers that the last stage tells, and returns them."""

    @abstractmethod
    def fail(self, message: str) -> str:
        """Records a failure for all stages to see. Only the first failure is recorded. Returns the first failure."""

    def limit(self, what: Waiting) -> AbstractContextManager[None]:
        """Returns a context manager for the work of a stage between two waits. Where such work may never return, a
        watchdog ends the process after a time limit."""
        return nullcontext()

    @abstractmethod
    def flush(self) -> None:
        """Returns when everything sent has been taken. Later messages may have other shapes."""

    @abstractmethod
    def close(self) -> None: ...


def gather_objects(transport: Transport, value: bytes, waiting: Waiting) -> list[bytes]:
    """Gathers bytes of any length. Returns the bytes of every stage, on every stage."""
    stages = tuple(range(transport.num_stages))
    length = torch.tensor([len(value)], dtype=torch.int64)
    lengths = [int(part) for part in transport.gather(length, stages).wait(waiting)]
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else padded[:0]
    parts: Sequence[Tensor] = transport.gather(padded, stages).wait(waiting)
    return [bytes(part[:size].tolist()) for part, size in zip(parts, lengths, strict=True)]
