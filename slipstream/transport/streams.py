"""A stage's CUDA streams: one computes, another makes updates beside it. On a CPU there is nothing to order.

What one stream is to find finished by another is said with events, so the host never waits: an update begins when the
batch's last backward is through, and the first forward of the new version when the update is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from .link import Waiting, peer_lost

Event = torch.cuda.Event | None
LOOK_SECONDS = 0.00005
"""Between two looks at the device."""


_free_streams: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}
_lock = threading.Lock()


def borrow_stream(borrower: object, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Until the borrower is gone. A stream that has been used holds memory: of cuBLAS, 32 MiB for every thread, and of
    the allocator. A run that changes its shape again and again would have more of them every time."""
    with _lock:
        free = _free_streams.setdefault((device, priority), [])
        stream = free.pop() if free else torch.cuda.Stream(device, priority=priority)
    weakref.finalize(borrower, free.append, stream).atexit = False
    return stream


class Streams:
    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._compute = borrow_stream(self, device) if is_cuda else None
        self._update = borrow_stream(self, device) if is_cuda else None
        self._copy = borrow_stream(self, device) if is_cuda else None
        self._copied: Event = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a whole run, which begins with what was made on the caller's stream and leaves its own work there."""
        if self._compute is None or self._update is None:
            yield
            return
        self._compute.wait_stream(torch.cuda.current_stream())
        try:
            yield
        finally:
            torch.cuda.current_stream().wait_stream(self._compute)
            torch.cuda.current_stream().wait_stream(self._update)

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext() if self._compute is None else torch.cuda.stream(self._compute)

    @contextmanager
    def updating(self, after: Event, tensors: Iterable[Tensor]) -> Iterator[None]:
        """after: of the computing stream. tensors: that were made on it, are used here, and may then be dropped."""
        if self._update is None or after is None:
            yield
            return
        with torch.cuda.stream(self._update):
            self._update.wait_event(after)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._update)  # so that its memory is not handed out too early
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Beside both, after what has been computed so far."""
        if self._compute is None or self._copy is None:
            yield
            return
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            yield

    def mark_copies(self) -> Event:
        """The end of the copies made so far; called within `copying`."""
        self._copied = self.now()
        return self._copied

    def wait_for_copies(self) -> None:
        """Makes the current stream wait for the latest copies; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def now(self) -> Event:
        """A point of the current stream."""
        if self._compute is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def compute_after(self, event: Event) -> None:
        if self._compute is not None and event is not None:
            self._compute.wait_event(event)


def look_until(event: torch.cuda.Event) -> None:
    """Returns when a device has come to this event. For threads of the host: to wait inside CUDA would either occupy a
    core or, asleep, take a millisecond to wake up."""
    while not event.query():
        time.sleep(LOOK_SECONDS)


def await_device(stage: int, timeout_seconds: float, waiting: Waiting) -> None:
    """Returns when the current stream of the device has come to this point. The host looks again and again instead of
    waiting inside CUDA, so that signals are handled meanwhile and the wait has an end."""
    passed = torch.cuda.Event()
    passed.record()
    deadline = time.monotonic() + timeout_seconds
    while not passed.query():
        if time.monotonic() > deadline:
            raise peer_lost(stage, None, timeout_seconds, lambda: f"its device to get to {waiting()}")
        time.sleep(LOOK_SECONDS)


def fetch(tensor: Tensor, stage: int, timeout_seconds: float, waiting: Waiting) -> Tensor:
    """Copies a tensor to the host. Waits for this copy alone: what has been enqueued on the device since runs on."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    await_device(stage, timeout_seconds, waiting)
    return host
