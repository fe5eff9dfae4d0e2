"""The token price of a delay: how many times the tokens a delayed run needs to reach the loss of a run without delay.

A plan that compared only speed would recommend schedules that never wait. So it compares tokens per second divided by
this price.
"""

from __future__ import annotations

from ...config.schema import OptimizerSection
from .predict import traits_of

PRICES = {
    "muon": (1.11, 1.19),
    "normuon": (1.12, 1.20),
    "soap": (1.23, 1.40),
    "adan": (1.53, 1.64),
    "adamw": (1.47, 3.18),
}
"""Price of one update of delay, with error feedback and without, from docs/results/delay.md. muon: runs of 12,207
steps, compared with runs of other lengths ("The length of the run"; with 24,414 small steps there was no cost, "More
steps"). The others: runs of 3,052 steps, read from the curve of the synchronous run ("The gap"). Longer runs cost
less."""
UNKNOWN = "adamw"
"""Optimizer whose price is used for an optimizer that was not measured: the most sensitive one."""


def token_price(section: OptimizerSection, schedule: str, delay: int) -> float:
    """Returns the token price. delay: the largest delay of any stage. A delay of more than one update was not measured
    with every optimizer. Each further update is assumed to cost as much as the first."""
    if delay == 0:
        return 1.0
    with_feedback, without = PRICES.get(section.name, PRICES[UNKNOWN])
    is_corrected = section.error_feedback != 0 and not traits_of(schedule).drifts
    price = with_feedback if is_corrected else without
    return 1 + delay * (price - 1)
