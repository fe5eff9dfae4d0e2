"""Published laws for learning rate, batch and weight decay, and our own measurements of what a delay costs.

Every law says what it was fitted on. N is the number of parameters without embedding and head, of which only those
count that a token uses; D is the number of tokens. The laws of the learning rate belong to their own batch: Step Law's
rate grows with D because its batch grows with D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import linear_regression


@dataclass(frozen=True)
class Law:
    name: str
    source: str
    formula: str
    fitted_on: str
    parameters: tuple[float, float]
    """Smallest and largest N of the runs that the law was fitted on, approximately."""
    batch: Callable[[float, float], float]
    """Function (N, D) -> tokens in a step."""
    rate: Callable[[float, float], float] | None = None
    """Function (N, D) -> peak learning rate of AdamW."""

    def covers(self, parameters: float) -> bool:
        return self.parameters[0] <= parameters <= self.parameters[1]


STEP_LAW = Law(
    "Step Law",
    "arXiv:2503.04715",
    "lr = 1.79 N^-0.713 D^0.307, B = 0.58 D^0.571",
    "AdamW, 60M to 1B parameters, 2B to 100B tokens, 2,048 positions, ALiBi and SwiGLU, cosine",
    (6e7, 1.1e9),
    lambda n, d: 0.58 * d**0.571,
    lambda n, d: 1.79 * n**-0.713 * d**0.307,
)
STEP_LAW_TOKENS = 2e9, 1e11
"""Fewest and most tokens of its runs."""
DEEPSEEK = Law(
    "DeepSeek LLM",
    "arXiv:2401.02954",
    "lr = 0.3118 C^-0.125, B = 0.2920 C^0.3271, C = 6 N D",
    "AdamW, 1e17 to 2e19 FLOPs, 4,096 positions, rate in steps",
    (1e7, 2e9),
    lambda n, d: 0.2920 * (6 * n * d) ** 0.3271,
    lambda n, d: 0.3118 * (6 * n * d) ** -0.125,
)
POWER_LINES = Law(
    "Power Lines",
    "arXiv:2505.13738",
    "B = 2048 x 0.0306 D^0.383; tau = B / (lr wd D) = 1.084 (D/N)^-0.527",
    "AdamW with muP, 111M to 3.3B parameters, SlimPajama, 2,048 positions, linear decay to zero",
    (1.1e8, 3.3e9),
    lambda n, d: 2048 * 0.0306 * d**0.383,
)
LAWS = (STEP_LAW, DEEPSEEK, POWER_LINES)


def weight_decay(parameters: float, tokens: float, batch: float, rate: float) -> float:
    """Returns the weight decay that gives tau = batch / (rate x decay x tokens) its best value by Power Lines. tau is
    the share of the run over which the weights average their updates."""
    best_tau = 1.084 * (tokens / parameters) ** -0.527
    return batch / (rate * best_tau * tokens)


# ---- the delay, by our own measurements

GAPS: dict[tuple[str, bool], dict[int, float]] = {
    ("muon", True): {1000: 0.0694, 3052: 0.0178, 12207: 0.0043},
    ("muon", False): {1000: 0.1264, 3052: 0.0361, 12207: 0.0093},
    ("adamw", True): {1000: 0.1055, 3052: 0.0544},
    ("adamw", False): {1000: 0.4872, 3052: 0.2329},
}
"""Loss that one step of delay adds, by (optimizer, error feedback) and number of steps, from docs/results/delay.md: 25M
parameters, nats per byte, 32,768 bytes a step."""
GAPS_SOURCE = "our own runs, docs/results/delay.md: 25M parameters, nats per byte at a loss near 1"
UNKNOWN = "adamw"
"""Optimizer whose gap stands for one that was not measured at several lengths: the most sensitive one."""


@dataclass(frozen=True)
class GapLaw:
    """gap = at_thousand (steps / 1000)^-exponent"""

    at_thousand: float
    exponent: float

    def __call__(self, steps: float) -> float:
        return self.at_thousand * (steps / 1000) ** -self.exponent


def measured_gap(optimizer: str, has_error_feedback: bool) -> GapLaw:
    """Returns the line through the measured gaps, by least squares in logarithms."""
    name = optimizer if (optimizer, True) in GAPS else UNKNOWN
    gaps = GAPS[name, has_error_feedback]
    slope, middle = linear_regression([math.log(steps / 1000) for steps in gaps], list(map(math.log, gaps.values())))
    return GapLaw(math.exp(middle), -slope)
