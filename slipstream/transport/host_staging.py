"""Links between GPUs that go through host memory, over gloo, where NCCL is not available.

A message is copied to pinned memory while the GPU continues to compute. When the copy is done, a thread of the link
sends it. So the stage itself never waits for its device.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from .link import Link, Message, Waiting


class HostLink(Protocol):
    """A link whose messages are in host memory."""

    def send(self, kind: str, message: Message, waiting: Waiting) -> None: ...
    def expect(self, kind: str) -> None: ...
    def take(self, waiting: Waiting) -> Message: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class StagedLink(Link):
    """One end of a link between GPUs, whose messages go through host memory."""

    def __init__(self, link: HostLink, device: torch.device) -> None:
        """`link` connects the two hosts. `device` is the GPU of this end."""
        self._link, self._device = link, device
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sends what a device computed")
        self._latest: Future[None] | None = None

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        if self._latest is not None and self._latest.done():
            self._latest.result()  # raises the error of the sending thread, if it had one
        staged = tuple(map(to_host, message))
        ready = torch.cuda.Event() if self._device.type == "cuda" else None
        if ready is not None:
            ready.record()

        def send() -> None:
            if ready is not None:
                ready.synchronize()
            self._link.send(kind, staged, waiting)

        self._latest = self._sender.submit(send)

    def expect(self, kind: str) -> None:
        self._link.expect(kind)

    def take(self, waiting: Waiting) -> Message:
        # The source may be freed before the copy is done: the caching allocator of pinned memory does not reuse memory
        # that a copy in progress still reads.
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in self._link.take(waiting))

    def flush(self) -> None:
        if self._latest is not None:
            self._latest.result()
        self._link.flush()

    def close(self) -> None:
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._link.close()


def to_host(tensor: Tensor) -> Tensor:
    """Copies a tensor to pinned memory. The copy is complete only when the device has executed it. The result is
    contiguous in index order, because a file has no strides, and some optimizers keep transposed matrices."""
    if not tensor.is_cuda:
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def copy_to_host(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """Does the same as `to_host`, but reuses the memory of an earlier copy, `kept`, if it fits. Fresh memory costs a
    CPU several times as much as the copy itself, because the system provides it page by page and zeroes it."""
    if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        return to_host(tensor)
    return kept.copy_(tensor, non_blocking=True)
