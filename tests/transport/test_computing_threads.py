"""A fork waits for threads that have just ended."""

import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.transport.computing_threads import RUNNING_SECONDS, await_ended_threads, begin_computing_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks here")


def test_threads_that_python_has_finished_with_have_ended() -> None:
    numbers: list[int] = []

    def compute() -> None:
        begin_computing_thread(1)
        numbers.append(threading.get_native_id())

    for _ in range(20):
        threads = [threading.Thread(target=compute) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        await_ended_threads()
        assert not [number for number in numbers if Path(f"/proc/self/task/{number}").exists()]


def test_a_thread_that_goes_on_is_not_waited_for_long() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        begin_computing_thread(1)
        begun.set()
        may_end.wait(30)

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    start = time.monotonic()
    await_ended_threads()
    assert RUNNING_SECONDS <= time.monotonic() - start < 3.0
    may_end.set()
    thread.join()
    await_ended_threads()
