"""Records some steps of one stage with torch's profiler, as a Chrome trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class TorchProfile:
    """Records the time from the report of the update before the first step to the report of the last step."""

    def __init__(self, path: Path, steps: tuple[int, int] | None, say: Callable[[str], None]) -> None:
        """path: file to write. steps: the first and the last step to record, counted from 1. None means no step. say:
        prints a line."""
        self._path, self._steps, self._say = path, steps, say
        self._profile: profile | None = None

    def after(self, num_updates: int) -> None:
        """Starts or stops recording. Called before the first update, and after every update."""
        if self._steps is None:
            return
        first, last = self._steps
        if not first - 1 <= num_updates < last:
            self.close()
        elif self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def close(self) -> None:
        """Writes what has been recorded, if anything was. A file that cannot be written does not end the run."""
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        recorded.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            words = " ".join(str(error).split())
            self._say(f"{self._path} cannot be written ({words}): the run continues without it")
