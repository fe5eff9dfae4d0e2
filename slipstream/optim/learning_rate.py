"""Learning-rate schedules: a factor of the peak learning rate for the index of every update, in plain Python.

    multiplier = cosine(warmup_steps=100, total_steps=1000, final_fraction=0.1)
    lr = peak_lr * multiplier(update)          # update counts from 0

The index is that of the update, not of the batch in flight. Warm-up rises linearly from 1 / warmup_steps, never from
zero, so that the first update has an effect. From `total_steps` on the factor stays at `final_fraction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES = ("constant", "cosine", "linear", "wsd", "1-sqrt")

Multiplier = Callable[[int], float]


def constant(warmup_steps: int) -> Multiplier:
    _check(warmup_steps)
    return lambda step: _warmup(step, warmup_steps)


def cosine(warmup_steps: int, total_steps: int, final_fraction: float) -> Multiplier:
    """Returns a schedule that falls as half a cosine from the end of the warm-up to `total_steps`."""
    _check(warmup_steps, total_steps - warmup_steps, total_steps, final_fraction)

    def multiplier(step: int) -> float:
        left = 0.5 * (1 + math.cos(math.pi * _progress(step, warmup_steps, total_steps)))
        return _warmup(step, warmup_steps) * (final_fraction + (1 - final_fraction) * left)

    return multiplier


def linear(warmup_steps: int, total_steps: int, final_fraction: float) -> Multiplier:
    """Returns a schedule that falls linearly from the end of the warm-up to `total_steps`."""
    return wsd(warmup_steps, total_steps - warmup_steps, total_steps, final_fraction)


def wsd(warmup_steps: int, decay_steps: int, total_steps: int, final_fraction: float) -> Multiplier:
    """Returns a schedule of warm-up, stable phase and decay: at the peak until the last `decay_steps`, then a linear
    fall."""
    _check(warmup_steps, decay_steps, total_steps, final_fraction)

    def multiplier(step: int) -> float:
        left = 1 - _progress(step, total_steps - decay_steps, total_steps)
        return _warmup(step, warmup_steps) * (final_fraction + (1 - final_fraction) * left)

    return multiplier


def one_minus_sqrt(warmup_steps: int, decay_steps: int, total_steps: int, final_fraction: float) -> Multiplier:
    """Returns the schedule of `wsd` with another decay: the rate falls as 1 - sqrt(share of the decay that has passed),
    at first fast and then slowly.

    Hägele et al. found it to reach a lower loss than the linear decay (arXiv:2405.18392).
    """
    _check(warmup_steps, decay_steps, total_steps, final_fraction)

    def multiplier(step: int) -> float:
        left = 1 - math.sqrt(_progress(step, total_steps - decay_steps, total_steps))
        return _warmup(step, warmup_steps) * (final_fraction + (1 - final_fraction) * left)

    return multiplier


def learning_rate_schedule(
    name: str, *, warmup_steps: int, total_steps: int, decay_steps: int, final_fraction: float
) -> Multiplier:
    """Returns a schedule by name. Only wsd and 1-sqrt use `decay_steps`, and constant uses only `warmup_steps`."""
    if name == "constant":
        return constant(warmup_steps)
    if name == "cosine":
        return cosine(warmup_steps, total_steps, final_fraction)
    if name == "linear":
        return linear(warmup_steps, total_steps, final_fraction)
    if name == "wsd":
        return wsd(warmup_steps, decay_steps, total_steps, final_fraction)
    if name == "1-sqrt":
        return one_minus_sqrt(warmup_steps, decay_steps, total_steps, final_fraction)
    raise ValueError(f"learning-rate schedule {name!r} is unknown: choose one of {', '.join(SCHEDULES)}")


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _progress(step: int, start: int, end: int) -> float:
    """Returns 0 up to `start`, 1 from `end` on, and a linear function in between."""
    if step >= end:
        return 1.0
    return (step - start) / (end - start) if step > start else 0.0


def _check(
    warmup_steps: int, decay_steps: int = 0, total_steps: int | None = None, final_fraction: float = 1.0
) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}: use 0 or more")
    if total_steps is not None and total_steps < warmup_steps:
        raise ValueError(f"total_steps is {total_steps}: use at least the {warmup_steps} of warmup_steps")
    if decay_steps < 0:
        raise ValueError(f"decay_steps is {decay_steps}: use 0 or more")
    if total_steps is not None and warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"decay_steps is {decay_steps}: use at most the {total_steps - warmup_steps} that warm-up leaves"
        )
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction is {final_fraction}: use a value from 0 to 1")
