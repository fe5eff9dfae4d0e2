"""Reads from the environment variables how this process was started."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    """Tells whether this process is one of several that a launcher started: torchrun, srun, or the user by hand."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
