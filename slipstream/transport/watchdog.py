"""Ends a process that cannot end itself, because its main thread waits for a device inside a driver or a library.

All other waits have a time-out and raise an error. A call into CUDA or NCCL cannot be interrupted: if the device never
answers, because a peer was killed in the middle of a transfer, the call never returns. So a separate thread watches the
main thread, and records the same kind of message that the stage would have recorded.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .link import Waiting

LOOK_SECONDS = 0.5
GRACE_SECONDS = 7.0
"""Number of seconds that a process may run after another has failed. It should notice the failure by itself within this
time and report what it waited for."""


class Watchdog:
    """A thread that ends the process when a block of code takes too long, or when another process has failed."""

    def __init__(self, name: Callable[[], str], failure: Callable[[], str | None], fail: Callable[[str], str]) -> None:
        """`name` returns the name of this process for messages. `failure` returns the first failure of any process, or
        None. `fail` records a failure and returns the first one."""
        self._name, self._failure, self._fail = name, failure, fail
        self._watched: tuple[float, float, Waiting] | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    @contextmanager
    def limit(self, seconds: float, what: Waiting) -> Iterator[None]:
        """Ends the process if the block takes longer than `seconds`. Only the main thread may use it."""
        self._watched = (time.monotonic() + seconds, seconds, what)
        try:
            yield
        finally:
            self._watched = None

    def close(self) -> None:
        self._is_over.set()

    def _look(self) -> None:
        failed_at: float | None = None
        while not self._is_over.wait(LOOK_SECONDS):
            now, watched = time.monotonic(), self._watched
            if watched is not None and now > watched[0]:
                _, seconds, what = watched
                self._end(self._fail(f"{self._name()} has been stuck for {seconds:g} s at {what()}"))
            if failed_at is None and self._failure() is not None:
                failed_at = now
            if failed_at is not None and now - failed_at > GRACE_SECONDS:
                self._end(self._failure() or "another process has failed")

    def _end(self, message: str) -> None:
        if not self._is_over.is_set():
            print(f"slipstream: {message}", file=sys.stderr, flush=True)
            os._exit(1)
