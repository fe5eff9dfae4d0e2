"""Learning-rate schedules: a factor of the peak learning rate for the index of every update, in plain Python.

    multiplier = learning_rate_schedule("wsd", warmup_steps=100, total_steps=1000, decay_steps=200, final_fraction=0.1)
    lr = peak_lr * multiplier(update)          # update counts from 0

The index is that of the update, not of the batch in flight. Warm-up rises linearly from 1 / warmup_steps, never from
zero, so that the first update has an effect. From `total_steps` on the factor stays at `final_fraction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda passed: 1.0,
    "cosine": lambda passed: 0.5 * (1 + math.cos(math.pi * passed)),
    "linear": lambda passed: 1 - passed,
    "wsd": lambda passed: 1 - passed,
    # At first fast and then slowly. Hägele et al. found it to reach a lower loss than the linear decay
    # (arXiv:2405.18392).
    "1-sqrt": lambda passed: 1 - math.sqrt(passed),
}
"""By name: function from the share of the decay that has passed to the share of the fall that is left."""


def learning_rate_schedule(
    name: str, *, warmup_steps: int, total_steps: int, decay_steps: int, final_fraction: float
) -> Callable[[int], float]:
    """Returns a schedule by name. wsd and 1-sqrt stay at the peak until the last `decay_steps`. cosine and linear fall
    from the end of the warm-up, and constant uses only `warmup_steps`."""
    if name not in SCHEDULES:
        raise ValueError(f"learning-rate schedule {name!r} is unknown: choose one of {', '.join(SCHEDULES)}")
    if name == "constant":
        total_steps, final_fraction = warmup_steps, 1.0
    if name not in ("wsd", "1-sqrt"):
        decay_steps = total_steps - warmup_steps
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}: use 0 or more")
    if total_steps < warmup_steps:
        raise ValueError(f"total_steps is {total_steps}: use at least the {warmup_steps} of warmup_steps")
    if decay_steps < 0:
        raise ValueError(f"decay_steps is {decay_steps}: use 0 or more")
    if warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"decay_steps is {decay_steps}: use at most the {total_steps - warmup_steps} that warm-up leaves"
        )
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction is {final_fraction}: use a value from 0 to 1")

    def multiplier(step: int) -> float:
        warmed = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
        left = SCHEDULES[name](_progress(step, total_steps - decay_steps, total_steps))
        return warmed * (final_fraction + (1 - final_fraction) * left)

    return multiplier


def _progress(step: int, start: int, end: int) -> float:
    """Returns 0 up to `start`, 1 from `end` on, and a linear function in between."""
    if step >= end:
        return 1.0
    return (step - start) / (end - start) if step > start else 0.0
