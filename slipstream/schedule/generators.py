"""Generates schedules. Each is a small pure function that yields the actions of one stage, forever or for `num_steps`
steps.

Microbatches and steps are counted from the start of the run, with m microbatches in a step. The update of step t writes
version t + 1. `first_step` starts a schedule in the middle of a run, so that one schedule can follow another at a step
boundary and a run can be resumed. `oldest` is a lower bound of the versions that are read. It is `first_step` itself
after a synchronous step, and smaller if the same schedule was running before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from .action import Action, Op


def gpipe(
    stage: int, num_stages: int, num_microbatches: int, num_steps: int | None, first_step: int
) -> Iterator[Action]:
    """Yields all forwards of a batch, then all backwards, then the update (arXiv:1811.06965)."""
    yield from _flushing(stage, num_microbatches, num_steps, first_step, warmup=num_microbatches)


def one_f_one_b(
    stage: int, num_stages: int, num_microbatches: int, num_steps: int | None, first_step: int
) -> Iterator[Action]:
    """Yields one forward and one backward in turn, and flushes at the end of every batch (PipeDream-Flush,
    arXiv:2006.09503)."""
    yield from _flushing(stage, num_microbatches, num_steps, first_step, warmup=num_stages - 1 - stage)


def _flushing(
    stage: int, num_microbatches: int, num_steps: int | None, first_step: int, warmup: int
) -> Iterator[Action]:
    for step in _steps(first_step, num_steps):
        first, last = step * num_microbatches, (step + 1) * num_microbatches - 1
        for op, microbatch in _alternate(first, num_microbatches, min(warmup, num_microbatches)):
            yield Action(stage, op, microbatch, step)
        yield Action(stage, Op.UPDATE, last, step + 1)


def two_bw(
    stage: int, num_stages: int, num_microbatches: int, num_steps: int | None, first_step: int, oldest: int, warmup: int
) -> Iterator[Action]:
    """Yields the actions of PipeDream-2BW (arXiv:2006.09503): one forward and one backward in turn, never flushed.

    Every batch is one version late: batch t runs on version t - 1 on every stage. Its gradient is complete after its
    last backward, and its update is not needed before the first forward of batch t + 2. This slack hides everything
    that is summed over stages. So the update is placed as late as possible. On a stage without warm-up forwards that is
    before the last backward of batch t + 1, because a stage holds only one finished gradient at a time.
    """
    m = num_microbatches
    next_update = first_step

    def update() -> Action:
        return Action(stage, Op.UPDATE, (next_update + 1) * m - 1, next_update + 1)

    for op, microbatch in _alternate(first_step * m, None if num_steps is None else num_steps * m, warmup):
        step = microbatch // m
        needed = step - 2 if op is Op.FORWARD else step - 1 if microbatch == (step + 1) * m - 1 else first_step - 1
        if next_update <= needed:
            yield update()
            next_update += 1
        yield Action(stage, op, microbatch, max(oldest, step - 1))
    yield update()


def pipedream(
    stage: int, num_stages: int, num_microbatches: int, num_steps: int | None, first_step: int, oldest: int
) -> Iterator[Action]:
    """Yields the actions of PipeDream (SOSP 2019): weight stashing, one update per batch, and a delay of P - 1 - s on
    stage s.

    The unit of work of PipeDream is the batch. Here a batch passes through in m microbatches, so a stage with a delay
    of d batches has d * m forwards in flight, and d + 1 versions.
    """
    m, delay = num_microbatches, num_stages - 1 - stage
    for op, microbatch in _alternate(first_step * m, None if num_steps is None else num_steps * m, delay * m):
        step = microbatch // m
        yield Action(stage, op, microbatch, max(oldest, step - delay))
        if op is Op.BACKWARD and microbatch == (step + 1) * m - 1:
            yield Action(stage, Op.UPDATE, microbatch, step + 1)


def paci(
    stage: int, num_stages: int, num_microbatches: int, num_steps: int | None, first_step: int
) -> Iterator[Action]:
    """Yields the actions of PACI (arXiv:2606.07881): one forward and one backward in turn. Each stage updates its
    weights in place after m backwards of its own.

    There is no weight stashing: a backward reads the newest weights, which may be newer than those its forward read.
    """
    m, version = num_microbatches, first_step
    warmup = num_stages - 1 - stage
    for op, microbatch in _alternate(first_step * m, None if num_steps is None else num_steps * m, warmup):
        yield Action(stage, op, microbatch, version)
        if op is Op.BACKWARD and (microbatch + 1) % m == 0:
            version += 1
            yield Action(stage, Op.UPDATE, microbatch, version)


def _steps(first_step: int, num_steps: int | None) -> Iterator[int]:
    return count(first_step) if num_steps is None else iter(range(first_step, first_step + num_steps))


def _alternate(first: int, num_microbatches: int | None, warmup: int) -> Iterator[tuple[Op, int]]:
    """Yields `warmup` forwards, then one forward and one backward in turn, and finally the remaining backwards."""
    forwards = count(first) if num_microbatches is None else iter(range(first, first + num_microbatches))
    next_backward = first
    for microbatch in forwards:
        yield Op.FORWARD, microbatch
        if microbatch - first >= warmup:
            yield Op.BACKWARD, next_backward
            next_backward += 1
    if num_microbatches is not None:
        for microbatch in range(next_backward, first + num_microbatches):
            yield Op.BACKWARD, microbatch
