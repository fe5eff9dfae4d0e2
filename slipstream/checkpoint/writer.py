"""Writes checkpoints in the background, while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .store import CheckpointError, Part, Store


@dataclass(frozen=True)
class Written:
    """A part that has been written to disk."""

    step: int
    seconds: float
    num_bytes: int


class Writer:
    """Writes checkpoints in a background thread, at most one at a time.

    Problems with a disk do not reach training: the writer reports them in one sentence, and the step has no checkpoint.
    """

    def __init__(self, store: Store, num_parts: int, say: Callable[[str], None]) -> None:
        self.last_written: Written | None = None
        """Latest part that this process has written. `last_committed` is the latest checkpoint that is committed with
        the parts of all processes."""
        self.num_left_out = 0
        """Number of checkpoints that were skipped because the previous one was still being written."""
        self._store, self._num_parts, self._say = store, num_parts, say
        self._thread: threading.Thread | None = None
        self._step = 0
        self._began = 0.0
        self._closed = False

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def leave_out(self, step: int) -> None:
        """Skips a checkpoint, because this process or another one is still writing the previous one. Reports only the
        first time."""
        self.num_left_out += 1
        if self.num_left_out > 1:
            return
        since = f" has been under way for {time.perf_counter() - self._began:.1f} s" if self.is_busy else " is not done"
        self._say(
            f"step {step} has no checkpoint, for that of step {self._step}{since}: the disk is slower than checkpoints "
            "are asked for, save less often (further ones are left out silently)"
        )

    def submit(self, step: int, make: Callable[[], Part]) -> bool:
        """Starts to write a checkpoint. The background thread calls `make` for the part, because that may, for example,
        wait for a copy from a device. Returns False, and skips this checkpoint, if the previous one is still being
        written."""
        if self._closed:
            raise RuntimeError("this writer is closed: make another")
        if self.is_busy:
            self.leave_out(step)
            return False
        self._step, self._began = step, time.perf_counter()
        # The thread is a daemon: a process that fails must not wait for a copy from a device that is gone.
        self._thread = threading.Thread(target=self._write, args=(step, make), name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def _write(self, step: int, make: Callable[[], Part]) -> None:
        try:
            part = make()
            began = time.perf_counter()
            num_bytes = self._store.needed_bytes(part)
            is_whole = self._store.write(step, part, self._num_parts)
            self.last_written = Written(step, time.perf_counter() - began, num_bytes)
            if is_whole:
                self._say(f"saved step {step} in {time.perf_counter() - self._began:.1f} s")
        except CheckpointError as error:
            self._say(f"step {step} has no checkpoint: {error}")
        except Exception as error:  # an error of `make`, which would otherwise go unnoticed
            self._say(f"step {step} has no checkpoint: {type(error).__name__}: {' '.join(str(error).split())}")

    @property
    def last_committed(self) -> int | None:
        """The newest committed step, up to that of `last_written`. None means that there is none or that the folder
        cannot be read."""
        written = self.last_written
        try:
            return max((step for step in self._store.steps() if written and step <= written.step), default=None)
        except CheckpointError:
            return None

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the submitted checkpoint is on disk or has failed, for at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        self.wait()
        self._closed = True
