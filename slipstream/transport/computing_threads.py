"""Threads that compute: how they begin, and how a fork waits for those that have just ended.

`Thread.join` returns when Python has finished with a thread. The system thread ends a little later, and meanwhile MKL
takes it off a table of its memory. A process that is forked in this moment inherits a broken table, and its first
product of matrices never returns.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

RUNNING_SECONDS, ENDING_SECONDS = 0.2, 5.0
"""Longest wait for threads that still run Python, and for those that do not."""
_begun: set[int] = set()
"""System's numbers of the threads that have begun and may still exist."""


def begin_computing_thread(num_threads: int) -> None:
    """Call it first in every thread that computes. `num_threads` is the limit for its operations: OpenMP has a separate
    limit for every thread."""
    torch.set_num_threads(num_threads)
    _begun.add(threading.get_native_id())


def await_ended_threads() -> None:
    """Waits until computing threads have ended. Call it before a fork. A thread that still runs Python may be about to
    end, but need not: it gets less time."""
    start = time.monotonic()
    while _begun:
        _begun.intersection_update([number for number in _begun if Path(f"/proc/self/task/{number}").exists()])
        seconds, running = time.monotonic() - start, {thread.native_id for thread in threading.enumerate()}
        if seconds > (RUNNING_SECONDS if _begun <= running else ENDING_SECONDS):
            return
        time.sleep(0.001)
