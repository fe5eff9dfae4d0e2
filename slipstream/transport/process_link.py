"""Implements `ProcessLink`: a link between two processes over torch.distributed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .link import Link, Message, Spec, Waiting

HEADER_LENGTH = 256
"""Numbers in the message that describes the shapes of those after it."""


@dataclass(frozen=True)
class BrokenWork:
    """A send or receive that could not be started. It raises its error in `wait`."""

    error: RuntimeError

    def wait(self, timeout: timedelta | None = None) -> None:
        raise self.error


class ProcessLink(Link):
    """One end of a link between two processes, over torch.distributed."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        wait: Callable[[dist.Work | BrokenWork, Waiting], None],
        max_under_way: Callable[[], int],
        device: torch.device,
        pinned: bool,
    ) -> None:
        """`rank` is that of the peer. `wait` blocks until a work is done. `device` is where the messages are. With
        `pinned`, they are received into pinned memory, from which a GPU can copy."""
        self._group, self._rank, self._wait, self._max_under_way = group, rank, wait, max_under_way
        self._device, self._pinned = device, pinned
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
        while len(self._sending) > self._max_under_way():
            self._finish_oldest()

    def _header(self, spec: Spec) -> Tensor:
        numbers = spec.encode()
        if len(numbers) > HEADER_LENGTH:
            raise ValueError(f"{len(spec.tensors)} tensors are too many to pass between two layers: pass fewer")
        return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)), device=self._device)

    def _send(self, message: Message, waiting: Waiting) -> None:
        works = [self._start(dist.isend, tensor) for tensor in message]
        # This keeps the message alive: it would be freed together with a work object that is dropped too early.
        self._sending.append((works, message, waiting))

    def _finish_oldest(self) -> None:
        """Waits for the oldest send. Waiting is the only way to learn that a gloo send is complete. So this is called
        only at a flush, or when the message must have been taken long ago."""
        works, _, waiting = self._sending.popleft()
        for work in works:
            self._wait(work, waiting)

    def _start(self, operation: Callable[..., Any], tensor: Tensor) -> dist.Work | BrokenWork:
        """Starts a send or receive. A peer that is gone does not raise an error here. It raises one in `wait`, where
        the message can say what the stage waited for."""
        try:
            return operation(tensor, self._rank, group=self._group)
        except RuntimeError as error:
            return BrokenWork(error)

    def expect(self, kind: str) -> None:
        self._expected.append(kind)
        self._post()

    def _post(self) -> None:
        """Posts the receives of expected messages, in order, as far as their shapes are known. They go into fresh
        tensors: a receive does not increase a tensor's version counter, and the graph of an older microbatch may still
        hold the previous tensor."""
        while self._expected and (spec := self._specs.get(self._expected[0])) is not None:
            self._expected.popleft()
            message = tuple(
                torch.empty(shape, dtype=dtype, device=self._device, pin_memory=self._pinned)
                for dtype, shape in spec.tensors
            )
            works = [self._start(dist.irecv, tensor) for tensor in message]
            self._posted.append((works, message))

    def take(self, waiting: Waiting) -> Message:
        if not self._posted:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._device)
            self._wait(self._start(dist.irecv, header), waiting)
            self._specs[self._expected[0]] = Spec.decode(header.tolist())
            self._post()
        works, message = self._posted.popleft()
        for work in works:
            self._wait(work, waiting)
        return message

    def flush(self) -> None:
        while self._sending:
            self._finish_oldest()
        self._specs.clear()

    def close(self) -> None:
        """Does nothing: the transport destroys all groups together."""
