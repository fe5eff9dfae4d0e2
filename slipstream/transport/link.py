"""Defines a link: one direction of the edge between two stages, a FIFO with one sender and one receiver."""

from __future__ import annotations

import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Message = tuple[Tensor, ...]
Waiting = Callable[[], str]
"""Function that describes what a stage waits for. It is called only when the wait fails."""

_NOT_USERS = [Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib"))]
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class PeerLost(RuntimeError):
    """Raised when another stage is gone, or has been silent for too long."""

    is_silent: bool = False


def peer_lost(stage: int, peer: int | None, silent_seconds: float | None, waiting: Waiting) -> PeerLost:
    """Makes a PeerLost error. `silent_seconds` is how long the peer has been silent. None means that it is gone."""
    other = "another stage" if peer is None else f"stage {peer}"
    reason = f"{other} is gone" if silent_seconds is None else f"{other} has been silent for {silent_seconds:g} s"
    lost = PeerLost(f"{reason}: stage {stage} was waiting for {waiting()}")
    lost.is_silent = silent_seconds is not None
    return lost


def place_of(error: BaseException) -> str:
    """Describes where in the user's code an error occurred: the innermost frame that belongs neither to slipstream nor
    to a library."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(Path(frame.filename))]
    return f", at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _is_users(file: Path) -> bool:
    is_library = "site-packages" in file.parts or "dist-packages" in file.parts or file.name.startswith("<")
    return not (is_library or any(file.is_relative_to(folder) for folder in _NOT_USERS))


class Link(ABC):
    """One end of a link. `kind` names a stream of messages of one shape: training or evaluation."""

    @abstractmethod
    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        """Starts to send a message. Returns at once, unless too many messages are in progress."""

    @abstractmethod
    def expect(self, kind: str) -> None:
        """Announces the kind of one more message. Messages arrive in the order in which they are announced. The
        announcement lets the link receive the message while the stage computes."""

    @abstractmethod
    def take(self, waiting: Waiting) -> Message:
        """Waits for the next message and returns it, in tensors that nothing else refers to."""


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of every tensor of a message. It is sent before the first message of a kind, or over NCCL
    before every message."""

    tensors: tuple[tuple[torch.dtype, torch.Size], ...]

    @classmethod
    def of(cls, message: Message) -> Spec:
        return cls(tuple((t.dtype, t.shape) for t in message))

    def check(self, kind: str, message: Message) -> None:
        if tuple((t.dtype, t.shape) for t in message) != self.tensors:
            raise ValueError(
                f"{kind} messages between two stages keep one shape: {Spec.of(message)} comes after {self}; "
                "make all microbatches the same size"
            )

    def __str__(self) -> str:
        return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for dtype, shape in self.tensors)

    def encode(self) -> list[int]:
        numbers = [len(self.tensors)]
        for dtype, shape in self.tensors:
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        return numbers

    @classmethod
    def decode(cls, encoded: Iterable[int]) -> Spec:
        numbers = iter(encoded)
        tensors = []
        for _ in range(next(numbers)):
            dtype, num_dims = _DTYPES[next(numbers)], next(numbers)
            tensors.append((dtype, torch.Size(next(numbers) for _ in range(num_dims))))
        return cls(tuple(tensors))
