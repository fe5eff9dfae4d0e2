"""Links between GPUs that reach each other through their hosts' memory: over gloo, where NCCL is not to be had.

A message is copied to pinned memory beside the computing, and a thread of the link sends it when it has arrived there,
so that the stage itself never waits for its device.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from .link import Link, Message, Waiting


class HostLink(Protocol):
    """A link whose messages lie in the hosts' memory."""

    def send(self, kind: str, message: Message, waiting: Waiting) -> None: ...
    def expect(self, kind: str) -> None: ...
    def take(self, waiting: Waiting) -> Message: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class StagedLink(Link):
    def __init__(self, link: HostLink, device: torch.device) -> None:
        """link: between the hosts. device: this end's."""
        self._link, self._device = link, device
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sends what a device computed")
        self._latest: Future[None] | None = None

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        if self._latest is not None and self._latest.done():
            self._latest.result()  # raises what the sender met
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
        # The caching allocator of pinned memory knows of copies under way.
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in self._link.take(waiting))

    def flush(self) -> None:
        if self._latest is not None:
            self._latest.result()
        self._link.flush()

    def close(self) -> None:
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._link.close()


def to_host(tensor: Tensor) -> Tensor:
    """In pinned memory, once the device has come so far. In order of its indices: a file has no strides, and some
    optimizers keep transposed matrices."""
    if not tensor.is_cuda:
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def copy_to_host(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """Likewise, into an earlier copy if there is one that fits: fresh memory costs a CPU several times what copying
    does, for the system hands it out page by page, and zeroed."""
    if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        return to_host(tensor)
    return kept.copy_(tensor, non_blocking=True)
