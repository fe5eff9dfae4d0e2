"""The CUDA streams of a stage: one computes, one makes updates in the background, and one copies.

Events order the work of the streams, so that the host never waits: an update begins when the last backward of the batch
is complete, and the first forward of the new version begins when the update is complete. On a CPU there is nothing to
order.
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
"""Number of seconds between two checks of the device."""


_free_streams: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}
_lock = threading.Lock()


def borrow_stream(borrower: object, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Returns a stream that `borrower` may use for its lifetime. When the borrower is deleted, the stream is used again
    for another. A stream that has been used holds memory: 32 MiB of cuBLAS for every thread, and memory of the
    allocator. A run that changes its layout again and again would otherwise hold more and more of it."""
    with _lock:
        free = _free_streams.setdefault((device, priority), [])
        stream = free.pop() if free else torch.cuda.Stream(device, priority=priority)
    weakref.finalize(borrower, free.append, stream).atexit = False
    return stream


class Streams:
    """The streams of one stage. On a CPU there are none, and the methods have no effect."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._compute = borrow_stream(self, device) if is_cuda else None
        self._update = borrow_stream(self, device) if is_cuda else None
        self._copy = borrow_stream(self, device) if is_cuda else None
        self._copied: Event = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wraps a whole run. The run begins after the work on the caller's stream, and the caller's stream continues
        after the work of the run."""
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
        """Runs a block on the update stream, after the event `after` of the compute stream. `tensors` were created on
        the compute stream, are used in the block, and may be deleted after it."""
        if self._update is None or after is None:
            yield
            return
        with torch.cuda.stream(self._update):
            self._update.wait_event(after)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._update)  # so that the allocator does not reuse its memory too early
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Runs a block on the copy stream, in parallel with the other two, after the work computed so far."""
        if self._compute is None or self._copy is None:
            yield
            return
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            yield

    def mark_copies(self) -> Event:
        """Returns an event at the end of the copies so far. Call it within `copying`."""
        self._copied = self.now()
        return self._copied

    def wait_for_copies(self) -> None:
        """Makes the current stream wait for the latest copies. The host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def now(self) -> Event:
        """Returns an event at the current end of the current stream. None means that there are no streams, on a CPU."""
        if self._compute is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def compute_after(self, event: Event) -> None:
        if self._compute is not None and event is not None:
            self._compute.wait_event(event)


def look_until(event: torch.cuda.Event) -> None:
    """Returns when a device has reached this event. It is for threads of the host: a wait inside CUDA would either keep
    a core busy or, with blocking synchronisation, take a millisecond to wake up."""
    while not event.query():
        time.sleep(LOOK_SECONDS)


def await_device(stage: int, timeout_seconds: float, waiting: Waiting) -> None:
    """Returns when the current stream of the device has reached this point. The host polls instead of waiting inside
    CUDA, so that it can handle signals meanwhile and the wait has a time-out."""
    passed = torch.cuda.Event()
    passed.record()
    deadline = time.monotonic() + timeout_seconds
    while not passed.query():
        if time.monotonic() > deadline:
            raise peer_lost(stage, None, timeout_seconds, lambda: f"its device to get to {waiting()}")
        time.sleep(LOOK_SECONDS)


def fetch(tensor: Tensor, stage: int, timeout_seconds: float, waiting: Waiting) -> Tensor:
    """Copies a tensor to the host. Waits only for this copy: work that was enqueued later on the device continues to
    run."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    await_device(stage, timeout_seconds, waiting)
    return host
