"""Generates schedules. Each is a small pure function that yields the actions of one stage, forever or for `num_steps`
steps.

Microbatches and steps are counted from the start of the run, with m microbatches in a step. The update of step t writes
version t + 1. `first_step` starts a schedule in the middle of a run, so that one schedule can follow another at a step
boundary and a run can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from .action import Action, Op


@dataclass(frozen=True)
class Place:
    """A stage, and the properties of the schedule that decide the actions of this stage."""

    stage: int
    num_stages: int
    num_microbatches: int
    warmup: int
    """For two_bw: number of forwards in flight before the first backward. It depends on the depth."""
    first_step: int
    num_steps: int | None
    """Number of steps from `first_step` on. None means forever."""
    oldest: int
    """Lower bound of the versions that are read: `first_step` after a synchronous step, and smaller if the same
    schedule was running before."""


def gpipe(place: Place) -> Iterator[Action]:
    """Yields all forwards of a batch, then all backwards, then the update (arXiv:1811.06965)."""
    return _flushing(place, warmup=place.num_microbatches)


def one_f_one_b(place: Place) -> Iterator[Action]:
    """Yields one forward and one backward in turn, and flushes at the end of every batch (PipeDream-Flush,
    arXiv:2006.09503)."""
    return _flushing(place, warmup=place.num_stages - 1 - place.stage)


def _flushing(place: Place, warmup: int) -> Iterator[Action]:
    m = place.num_microbatches
    for step in _count(place.first_step, place.num_steps):
        for op, microbatch in _alternate(step * m, m, warmup):
            yield Action(place.stage, op, microbatch, step)
        yield Action(place.stage, Op.UPDATE, (step + 1) * m - 1, step + 1)


def two_bw(place: Place) -> Iterator[Action]:
    """Yields the actions of PipeDream-2BW (arXiv:2006.09503): one forward and one backward in turn, never flushed.

    Every batch is one version late: batch t runs on version t - 1 on every stage. Its gradient is complete after its
    last backward, and its update is not needed before the first forward of batch t + 2. This slack hides everything
    that is summed over stages. So the update is placed as late as possible. On a stage without warm-up forwards that is
    before the last backward of batch t + 1, because a stage holds only one finished gradient at a time.
    """
    m = place.num_microbatches
    next_update = place.first_step

    def update() -> Action:
        return Action(place.stage, Op.UPDATE, (next_update + 1) * m - 1, next_update + 1)

    for op, microbatch in _unflushed(place, place.warmup):
        step = microbatch // m
        needed = step - 2 if op is Op.FORWARD else step - 1 if microbatch == (step + 1) * m - 1 else -1
        if next_update <= needed:
            yield update()
            next_update += 1
        yield Action(place.stage, op, microbatch, max(place.oldest, step - 1))
    yield update()


def pipedream(place: Place) -> Iterator[Action]:
    """Yields the actions of PipeDream (SOSP 2019): weight stashing, one update per batch, and a delay of P - 1 - s on
    stage s.

    The unit of work of PipeDream is the batch. Here a batch passes through in m microbatches, so a stage with a delay
    of d batches has d * m forwards in flight, and d + 1 versions.
    """
    m, delay = place.num_microbatches, place.num_stages - 1 - place.stage
    for op, microbatch in _unflushed(place, delay * m):
        step = microbatch // m
        yield Action(place.stage, op, microbatch, max(place.oldest, step - delay))
        if op is Op.BACKWARD and (microbatch + 1) % m == 0:
            yield Action(place.stage, Op.UPDATE, microbatch, step + 1)


def paci(place: Place) -> Iterator[Action]:
    """Yields the actions of PACI (arXiv:2606.07881): one forward and one backward in turn. Each stage updates its
    weights in place after m backwards of its own.

    There is no weight stashing: a backward reads the newest weights, which may be newer than those its forward read.
    """
    version = place.first_step
    for op, microbatch in _unflushed(place, place.num_stages - 1 - place.stage):
        yield Action(place.stage, op, microbatch, version)
        if op is Op.BACKWARD and (microbatch + 1) % place.num_microbatches == 0:
            version += 1
            yield Action(place.stage, Op.UPDATE, microbatch, version)


def _count(first: int, number: int | None) -> Iterator[int]:
    return count(first) if number is None else iter(range(first, first + number))


def _unflushed(place: Place, warmup: int) -> Iterator[tuple[Op, int]]:
    m = place.num_microbatches
    return _alternate(place.first_step * m, None if place.num_steps is None else place.num_steps * m, warmup)


def _alternate(first: int, num_microbatches: int | None, warmup: int) -> Iterator[tuple[Op, int]]:
    """Yields `warmup` forwards, then one forward and one backward in turn, and finally the remaining backwards."""
    next_backward = first
    for microbatch in _count(first, num_microbatches):
        yield Op.FORWARD, microbatch
        if microbatch - first >= warmup:
            yield Op.BACKWARD, next_backward
            next_backward += 1
    if num_microbatches is not None:
        for microbatch in range(next_backward, first + num_microbatches):
            yield Op.BACKWARD, microbatch
