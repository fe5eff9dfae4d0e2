"""Ends a process whose store no longer answers.

Ranks that are started by hand find each other through a store that rank 0 keeps. A call of the store waits for its
answer without a time-out: if rank 0 is stopped (SIGSTOP), or if another program listens at its port, the call never
returns. So two threads watch the store: one asks it, over a connection of its own, and the other sees whether it
answers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from . import failures
from .environment import first_address

LOOK_SECONDS = 0.25
GRACE_SECONDS = 2.0
"""Number of seconds after the time-out in which the main thread may say what it waits for."""


class StoreWatch:
    def __init__(self, rank: int, timeout: timedelta) -> None:
        self._rank, self._timeout = rank, timeout
        self.ask: Callable[[dist.Store], object] = lambda store: store.check(["any"])
        """What is asked again and again."""
        self.before_end: Callable[[], None] = lambda: None
        """Called if rank 0 answered once and then no more."""
        self._answers = 0
        self._is_over = threading.Event()
        for work in (self._ask, self._look):
            threading.Thread(target=work, name="watches the store", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()

    def _ask(self) -> None:
        host, port = first_address()
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
            while not self._is_over.wait(LOOK_SECONDS):
                self.ask(store)
                self._answers += 1
        except (RuntimeError, ValueError):  # rank 0 is gone: who waits for it notices
            self._is_over.set()

    def _look(self) -> None:
        seconds = self._timeout.total_seconds()
        answers, silent = 0, 0.0
        while not self._is_over.wait(LOOK_SECONDS):
            silent = silent + LOOK_SECONDS if self._answers == answers else 0.0
            answers = self._answers
            if silent > seconds + GRACE_SECONDS and not self._is_over.is_set():
                host, port = first_address()
                message = (
                    f"rank 0 does not answer stage {self._rank} at MASTER_ADDR:MASTER_PORT = {host}:{port} within "
                    f"{seconds:g} s: start it there, or choose a port that nothing else uses"
                )
                if answers:
                    message = f"stage 0 has been silent for {seconds:g} s: stage {self._rank} waits for its store"
                    message = failures.last_message or message
                    self.before_end()
                print(f"slipstream: {message}", file=sys.stderr, flush=True)
                os._exit(1)
