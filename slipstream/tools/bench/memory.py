"""Measures the memory of a contender on a CPU. Each contender runs in separate processes and is not timed, because a
process keeps memory that an earlier contender has freed.

The result is the peak resident size of a process minus its resident size before anything was created. So it includes
weights and their versions, gradients, optimizer state, activations and messages. It works only on Linux.
"""

from __future__ import annotations

import platform
import re
from functools import partial
from pathlib import Path

from ...errors import StageFailure
from ...transport.base import Transport
from ...transport.launch import launch
from .contenders import Contender, Refused, World, run
from .turns import TIMEOUT_SECONDS, settle_stage

NUM_STEPS = 3


def peak_memory(contender: Contender, world: World) -> int | None:
    """Returns the bytes of the process that uses the most. None means that they cannot be measured."""
    if platform.system() != "Linux":
        return None
    worker = partial(_grow, contender=contender, world=world)
    try:
        grown = launch(worker, world.num_stages, timeout_seconds=TIMEOUT_SECONDS, start_method="fork")
    except StageFailure:
        return None
    return None if None in grown else max(each for each in grown if each is not None)


def _grow(transport: Transport, contender: Contender, world: World) -> int | None:
    settle_stage(transport.stage, transport.num_stages)
    before = _kibibytes("VmRSS")
    try:
        run(contender, world, transport, NUM_STEPS)
    except Refused:
        return None
    peak = _kibibytes("VmHWM")
    return None if before is None or peak is None else 1024 * (peak - before)


def _kibibytes(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else None
