"""The first failure of a run, recorded in the store that all processes share."""

from __future__ import annotations

import torch.distributed as dist

FAILURE = "failure"
"""The key of the first word of one, in the store."""


def leave_failure(store: dist.Store, message: str) -> str:
    """The first word stands: it is returned."""
    try:
        return store.compare_set(FAILURE, "", message).decode()
    except (RuntimeError, ValueError):  # the store went down with its host
        return message


def read_failure(store: dist.Store) -> str | None:
    try:
        return store.get(FAILURE).decode() if store.check([FAILURE]) else None
    except (RuntimeError, ValueError):
        return "the process that keeps the store is gone"
