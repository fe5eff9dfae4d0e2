"""Worker processes for runs that do not depend on each other, which tell the parent how far they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch

from ...transport.stage_processes import die_with_parent

Messages = SimpleQueue[Any]


def default_jobs(uses_cuda: bool) -> int:
    """Returns one job per core. For a GPU it returns one, because runs share a GPU only if the user asks for it."""
    return 1 if uses_cuda else os.cpu_count() or 1


@contextmanager
def worker_pool(num_jobs: int, uses_cuda: bool) -> Iterator[tuple[ProcessPoolExecutor, Messages]]:
    """Starts the workers, and kills them at the end. Yields them and the queue of what they `tell`."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" and not uses_cuda else "spawn")
    messages: Messages = context.SimpleQueue()
    threads = max(1, (os.cpu_count() or 1) // num_jobs)
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(num_jobs, context, initializer=_start, initargs=(messages, threads))
    try:
        yield pool, messages
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()  # SIGKILL, because forked workers inherit the parent's handler of SIGTERM


_messages: Messages | None = None
"""The queue, if this process is a worker."""


def tell(message: Any) -> None:
    """Sends a message from a worker to the parent."""
    assert _messages is not None, "only workers tell"
    _messages.put(message)


def _start(messages: Messages, threads: int) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=die_with_parent, name="watches the parent", daemon=True).start()
    torch.set_num_threads(threads)
