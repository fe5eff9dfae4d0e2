"""What the environment says of how this process was started."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    """Or srun, or by hand: as one of several processes that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
