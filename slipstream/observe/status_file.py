"""Writes what a stage is doing now to a file that remains when the process ends.

Tests that kill stages use it, and people who want to know why a stage hangs.

    SLIPSTREAM_STATUS_FOLDER=/tmp/status slipstream train ...
    strings /tmp/status/stage-0.replica-0

The file is mapped into memory. So an entry costs no system call, and the last entry is in the file no matter how the
process ended.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from ..pipeline.clock import Activity
from ..schedule import Action

FOLDER_VARIABLE = "SLIPSTREAM_STATUS_FOLDER"
LINE_BYTES = 64
"""Number of bytes of each of the three lines: the process id, the current activity, and whether an update runs in the
background."""


class StatusFile:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(3 * LINE_BYTES)
            self._memory = mmap.mmap(file.fileno(), 3 * LINE_BYTES)
        self._put(1, "starting")
        self._put(2, "")
        self._put(0, str(os.getpid()))

    def at(self, activity: Activity, action: Action | None) -> None:
        self._put(1, activity.name.lower() if action is None else f"{activity.name.lower()} {action}")

    def beside(self, is_updating: bool) -> None:
        self._put(2, "update" if is_updating else "")

    def _put(self, line: int, text: str) -> None:
        padded = text.encode()[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"
        self._memory[line * LINE_BYTES : (line + 1) * LINE_BYTES] = padded


def status_file(stage: int, replica: int) -> StatusFile | None:
    """Creates the status file of a stage, or returns None if the environment variable is not set."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return StatusFile(Path(folder) / f"stage-{stage}.replica-{replica}") if folder else None
