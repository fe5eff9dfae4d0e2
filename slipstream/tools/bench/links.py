"""Adds latency to links, and measures how long a message takes on a link."""

from __future__ import annotations

import pickle
import statistics
import threading
import time
from collections.abc import Sequence
from queue import Queue

import torch
import torch.distributed as dist
from torch import Tensor

from ...transport.base import Transport, gather_objects
from ...transport.link import Link, Message, Waiting
from ...transport.process import ProcessTransport
from .workloads import sleep_precisely

NUM_PINGS = 15
NUM_WARM_UP_PINGS = 3
PAUSE_SECONDS = 0.010
"""Pause between two pings. Every process then sleeps when a ping arrives, as it does while it waits in a pipeline."""


class DelayedLink(Link):
    """A link that delays every message by `seconds` after the send. A background thread sends the messages."""

    def __init__(self, link: Link, seconds: float) -> None:
        self._link, self._seconds = link, seconds
        self._queue: Queue[tuple[float, str, Message, Waiting]] = Queue()
        threading.Thread(target=self._carry, name="slow link", daemon=True).start()

    def _carry(self) -> None:
        sleep_precisely()
        while True:
            leaves_at, kind, message, waiting = self._queue.get()
            time.sleep(max(0.0, leaves_at - time.monotonic()))
            self._link.send(kind, message, waiting)
            self._queue.task_done()

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        self._queue.put((time.monotonic() + self._seconds, kind, message, waiting))

    def expect(self, kind: str) -> None:
        self._link.expect(kind)

    def take(self, waiting: Waiting) -> Message:
        return self._link.take(waiting)

    def empty(self) -> None:
        self._queue.join()


def delay_links(transport: Transport, seconds: float) -> None:
    """Delays all messages to neighbours from now on. 0 leaves the links unchanged."""
    if not seconds:
        return
    slow_links = {
        name: DelayedLink(getattr(transport, name), seconds)
        for name in ("forward_out", "backward_out")
        if hasattr(transport, name)
    }
    flush = transport.flush

    def empty_and_flush() -> None:
        for link in slow_links.values():
            link.empty()
        flush()

    for name, link in {**slow_links, "flush": empty_and_flush}.items():
        setattr(transport, name, link)


def message_seconds(transport: Transport, message: Message) -> float:
    """Returns, on the first stage, the time from a send until the next stage has the message. Returns 0 on the other
    stages. One message at a time passes through all stages and back, so that every hop wakes a sleeping process."""
    if transport.num_stages == 1:
        return 0.0
    is_first, is_last = transport.stage == 0, transport.stage == transport.num_stages - 1
    trips = []
    for _ in range(NUM_PINGS):
        if is_first:
            time.sleep(PAUSE_SECONDS)
            started = time.perf_counter()
        if not is_first:
            transport.forward_in.expect("ping")
            _arrived(transport.forward_in.take(lambda: "a ping"))
        if not is_last:
            transport.forward_out.send("ping", message, lambda: "a ping to be taken")
            transport.backward_in.expect("ping")
            _arrived(transport.backward_in.take(lambda: "the echo of a ping"))
        if not is_first:
            transport.backward_out.send("ping", message, lambda: "the echo of a ping to be taken")
        if is_first:
            trips.append((time.perf_counter() - started) / (2 * (transport.num_stages - 1)))
    transport.flush()
    return statistics.median(trips) if is_first else 0.0


def _arrived(message: Message) -> None:
    """Waits until the message has arrived. On CUDA, `take` may return before that."""
    if message[0].is_cuda:
        torch.cuda.current_stream().synchronize()


def exchange_seconds(transport: ProcessTransport, group: dist.ProcessGroup, message: Tensor) -> tuple[float, float]:
    """Returns, on every stage, the time of a message over NCCL as torch's schedules send it, and the time of two
    messages in opposite directions at once. It is the mean over all pairs of neighbours, one pair at a time: waits of a
    schedule add up, so outliers count."""
    dist.all_reduce(torch.zeros(1, device=message.device), group=group)  # all take part in the first operation
    seconds = [
        [
            _time_of_transfer(transport, group, message, lower, both_ways)
            for lower in range(transport.num_stages - 1)
            for _ in range(NUM_WARM_UP_PINGS + NUM_PINGS)
        ]
        for both_ways in (False, True)
    ]
    of_all = gather_objects(transport, pickle.dumps(seconds), lambda: "the times of messages on the other stages")
    one_way, exchange = (
        [each for of_stage in kind for each in _without_warm_up(of_stage)]
        for kind in zip(*map(pickle.loads, of_all), strict=True)
    )
    return statistics.fmean(one_way), statistics.fmean(exchange)


def _without_warm_up(times: Sequence[float | None]) -> list[float]:
    """Drops the first times of every pair, in which it is connected, and those of pairs without this stage."""
    each = NUM_WARM_UP_PINGS + NUM_PINGS
    return [seconds for index, seconds in enumerate(times) if seconds is not None and index % each >= NUM_WARM_UP_PINGS]


def _time_of_transfer(
    transport: ProcessTransport, group: dist.ProcessGroup, message: Tensor, lower: int, both_ways: bool
) -> float | None:
    """Returns the time in which a message goes from stage `lower` to the next one, in the time of the device. None
    means that this stage is neither of the two."""
    gather_objects(transport, b"", lambda: "the other stages to exchange messages")
    if transport.stage not in (lower, lower + 1):
        return None
    peer = 2 * lower + 1 - transport.stage
    operations = []
    if both_ways or transport.stage == lower:
        operations.append(dist.P2POp(dist.isend, message, group=group, group_peer=peer))
    if both_ways or transport.stage > lower:
        operations.append(dist.P2POp(dist.irecv, torch.empty_like(message), group=group, group_peer=peer))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000
