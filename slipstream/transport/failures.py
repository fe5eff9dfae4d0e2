"""Records the first failure of a run in the store that all processes share."""

from __future__ import annotations

import torch.distributed as dist

FAILURE = "failure"
"""Key of the first failure in the store."""

last_message: str | None = None
"""What this process recorded last, or wants to: the store may not answer any more."""


def leave_failure(store: dist.Store, message: str) -> str:
    """Records a failure unless there is one already. Returns the first failure."""
    global last_message
    last_message = message
    try:
        return store.compare_set(FAILURE, "", message).decode()
    except (RuntimeError, ValueError):  # the store is gone, with the process that hosted it
        return message


def read_failure(store: dist.Store) -> str | None:
    try:
        return store.get(FAILURE).decode() if store.check([FAILURE]) else None
    except (RuntimeError, ValueError):
        return "the process that keeps the store is gone"
