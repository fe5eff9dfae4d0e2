"""Links that are slow on purpose, and how long a message takes on those there are."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue

import torch

from ...transport.base import Transport
from ...transport.link import Link, Message, Waiting
from .workloads import sleep_precisely

NUM_PINGS = 15
PAUSE_SECONDS = 0.010
"""Between two pings, so that every process sleeps when one comes, as it does while it waits in a pipeline."""


class DelayedLink(Link):
    """A message leaves `seconds` after it was sent, from a thread of the link's own."""

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


@contextmanager
def link_latency(transport: Transport, seconds: float) -> Iterator[None]:
    """Delays everything that passes between neighbours, for a while; 0 leaves the links as they are."""
    if not seconds:
        yield
        return
    links = {name: getattr(transport, name) for name in ("forward_out", "backward_out") if hasattr(transport, name)}
    slow_links = {name: DelayedLink(link, seconds) for name, link in links.items()}
    flush = transport.flush

    def empty_and_flush() -> None:
        for link in slow_links.values():
            link.empty()
        flush()

    for name, link in {**slow_links, "flush": empty_and_flush}.items():
        setattr(transport, name, link)
    try:
        yield
    finally:
        for name, link in {**links, "flush": flush}.items():
            setattr(transport, name, link)


def message_seconds(transport: Transport, message: Message) -> float:
    """From a send until the next stage has the message, on the first stage; elsewhere 0. One message at a time passes
    through all stages and back, so every hop wakes a process that sleeps."""
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
    """Returns when the message is there: on CUDA it may be taken while it is still to come."""
    if message[0].is_cuda:
        torch.cuda.current_stream().synchronize()
