"""A stage of a pipeline without the others, for benchmarks of one device.

Its neighbours are played by a transport that hands it random activations and gradients at once, keeps messages as long
as links between processes do, and lets the sums over stages arrive only after the next backward, as they do where the
other stages are later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from slipstream.tools.plan.live import LiveBytes
from slipstream.transport.base import Exchange, Gathering, Transport
from slipstream.transport.link import Link, Message, Waiting


class Alone(Transport):
    """A stage's view of others that are not there."""

    def __init__(
        self,
        stage: int,
        num_stages: int,
        shape: tuple[int, ...],
        device: torch.device,
        num_microbatches: int,
        num_steps: int,
        live: LiveBytes | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """shape, dtype: of the activations between two stages. live: counts what other threads allocate, too."""
        self.stage, self.num_stages, self.timeout_seconds = stage, num_stages, 60.0
        self.backward = threading.Condition()
        self.num_backwards = 0
        self._num_microbatches, self._num_steps, self._live = num_microbatches, num_steps, live
        self._num_gathered = 0
        self._watch: AbstractContextManager[object] | None = None
        self.forward_in = InLink(self, shape, device, dtype, 1.0)
        self.forward_out = OutLink(self)
        self.backward_in = InLink(self, shape, device, dtype, 1e-6, counts=True)
        self.backward_out = OutLink(self, counts=stage == num_stages - 1)

    def count_backward(self) -> None:
        with self.backward:
            self.num_backwards += 1
            self.backward.notify_all()

    def wait_for_next_backward(self) -> None:
        """The update of a batch, in its own thread, waits until the next batch has begun to make gradients."""
        if threading.current_thread() is not threading.main_thread():
            with self.backward:
                self.backward.wait_for(self._is_in_a_batch, timeout=5.0)

    def _is_in_a_batch(self) -> bool:
        """Or past the last of them, after which nothing comes."""
        step, microbatch = divmod(self.num_backwards, self._num_microbatches)
        return microbatch != 0 or step == self._num_steps

    def open_group(self, stages: tuple[int, ...]) -> None:
        pass

    def tell_first(self, numbers: Sequence[int]) -> None:
        raise NotImplementedError("nothing is sampled here")

    def hear_last(self, waiting: Waiting) -> list[int]:
        raise NotImplementedError("nothing is sampled here")

    def gather(self, tensor: Tensor, stages: tuple[int, ...]) -> Gathering:
        self._num_gathered += 1
        if self._live is not None and threading.current_thread() is not threading.main_thread():
            self._watch_updates(self._live)
        return AloneGathering(self, tensor, len(stages))

    def _watch_updates(self, live: LiveBytes) -> None:
        """In their thread, from the sums of the first step to those of the last, whose update has no batch beside it. A
        thread that ended in the middle of a watch could take the process with it."""
        if self._watch is None:
            self._watch = live.watch()
            self._watch.__enter__()
        if self._num_gathered == self._num_steps:
            self._watch.__exit__(None, None, None)

    def add_replicas(self, tensors: Sequence[Tensor], owners: Sequence[int] | None = None) -> Exchange:
        raise NotImplementedError("a stage alone has no replicas")

    def open_sharing(self) -> None:
        raise NotImplementedError("a stage alone has no replicas")

    def share(self, tensors: Sequence[Tensor], owners: Sequence[int], aside: bool = False) -> Exchange:
        raise NotImplementedError("a stage alone has no replicas")

    def fail(self, message: str) -> str:
        return message

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class AloneGathering(Gathering):
    """All stages have what this one has. Room for their tensors is taken at once, as torch.distributed wants it."""

    def __init__(self, transport: Alone, tensor: Tensor, num_stages: int) -> None:
        self._transport, self._tensor = transport, tensor
        self._gathered = [torch.empty_like(tensor) for _ in range(num_stages)]

    def wait(self, waiting: Waiting) -> list[Tensor]:
        self._transport.wait_for_next_backward()
        for copy in self._gathered:
            copy.copy_(self._tensor)
        return self._gathered


class InLink(Link):
    def __init__(
        self,
        transport: Alone,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        scale: float,
        counts: bool = False,
    ) -> None:
        self._transport, self._shape, self._device, self._dtype = transport, shape, device, dtype
        self._scale, self._counts = scale, counts
        self._posted: deque[Tensor] = deque()

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        raise AssertionError("nothing is sent on a link that comes in")

    def expect(self, kind: str) -> None:
        self._posted.append(torch.empty(self._shape, device=self._device, dtype=self._dtype).normal_(0, self._scale))

    def take(self, waiting: Waiting) -> Message:
        if self._counts:
            self._transport.count_backward()
        return (self._posted.popleft(),)


class OutLink(Link):
    def __init__(self, transport: Alone, counts: bool = False) -> None:
        self._transport, self._counts = transport, counts
        self._sending: deque[Message] = deque()

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        self._sending.append(message)
        while len(self._sending) > self._transport.max_under_way:
            self._sending.popleft()
        if self._counts:
            self._transport.count_backward()

    def expect(self, kind: str) -> None:
        raise AssertionError("nothing comes in on a link that goes out")

    def take(self, waiting: Waiting) -> Message:
        raise AssertionError("nothing comes in on a link that goes out")
