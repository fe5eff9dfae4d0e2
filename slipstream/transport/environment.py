"""Reads from the environment variables how this process was started."""

from __future__ import annotations

import os

from ..errors import UsageError


def under_torchrun() -> bool:
    """Tells whether this process is one of several that a launcher started: torchrun, srun, or the user by hand."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Returns the number of processes that the launcher started."""
    return _number("WORLD_SIZE", 1)


def is_first_process() -> bool:
    """Tells whether this process decides for all: it is the only one, or has rank 0."""
    if not under_torchrun():
        return True
    rank, size = _number("RANK", 0), world_size()
    if rank >= size:
        raise UsageError(f"RANK = {rank} is not one of WORLD_SIZE = {size} processes: use 0 to {size - 1}")
    return rank == 0


def first_address() -> tuple[str, int]:
    """Returns host and port at which the first process is found."""
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)
    if not host:
        raise UsageError("MASTER_ADDR is missing beside RANK and WORLD_SIZE: set it to the host of rank 0")
    if port >= 2**16:
        raise UsageError(f"MASTER_PORT = {port} is no port: use 1 to {2**16 - 1}")
    return host, port


def _number(name: str, least: int) -> int:
    text = os.environ.get(name, "")
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise UsageError(
            f"{name} = {text!r} in the environment is no number from {least} on: correct it, or unset RANK and "
            "WORLD_SIZE to start all stages from here"
        )
    return int(text)
