"""What a delay costs in tokens: how many more a delayed run needs to reach the loss of a run without delay.

Speed alone would recommend whatever never waits. A schedule is worth its tokens per second divided by this price.
"""

from __future__ import annotations

from ...config.schema import OptimizerSection
from ...schedule import TRAITS

PRICES = {
    "muon": (1.05, 1.19),
    "normuon": (1.12, 1.20),
    "soap": (1.23, 1.40),
    "adan": (1.53, 1.64),
    "adamw": (1.47, 3.18),
}
"""Of one update of delay, with error feedback and without. muon: 12,207 steps ("The length of the run"; 24,414 small
ones cost nothing, "More steps"). The others: 3,052 steps ("The gap"), and less in longer runs."""
UNKNOWN = "adamw"
"""What an optimizer that was not measured is taken for: the most sensitive that was."""


def token_price(section: OptimizerSection, schedule: str, delay: int) -> float:
    """delay: of the stage that is latest. More than one update was not measured with every optimizer: each is taken to
    cost what the first does."""
    if delay == 0:
        return 1.0
    with_feedback, without = PRICES.get(section.name, PRICES[UNKNOWN])
    is_corrected = section.error_feedback != 0 and not (schedule in TRAITS and TRAITS[schedule].drifts)
    price = with_feedback if is_corrected else without
    return 1 + delay * (price - 1)
