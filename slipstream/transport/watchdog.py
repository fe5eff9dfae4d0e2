"""Ends a process that cannot end itself, because its main thread waits inside a driver or a library for a device.

Everything else that waits has a time-out of its own, and raises. A call into CUDA or NCCL cannot be interrupted: when
the device never answers, because a peer was killed in the middle of a transfer, the call never returns. So a thread
looks from outside, and leaves the same kind of message behind that the stage would have left.
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
"""How long a process may live on after another has failed. It is meant to notice by itself, and to say what it waited
for."""


class Watchdog:
    def __init__(self, name: Callable[[], str], failure: Callable[[], str | None], fail: Callable[[str], str]) -> None:
        """name: of this process, for messages. failure: the first failure of any process. fail: leaves one, and returns
        the first."""
        self._name, self._failure, self._fail = name, failure, fail
        self._watched: tuple[float, float, Waiting] | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    @contextmanager
    def limit(self, seconds: float, what: Waiting) -> Iterator[None]:
        """Ends the process if what is done within takes longer. Of the main thread only."""
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
