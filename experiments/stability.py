"""How large may the learning rate be before momentum descent on a quadratic diverges, and what does a delay change?

m <- beta m + (1 - beta) g         g at x[t];  direction: m, or beta m + (1 - beta) g with Nesterov
z[t+1] = z[t] - rate * direction
x[t+1+d] = z[t+1] - lam d w[t]     d steps of delay; w: the last update, or some of its change on top (trend)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from page import COLOURS, MARKERS, SVG_SALT, markdown, three_digits

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Variant:
    """A column of the stability table."""

    label: str
    nesterov: bool
    delay: int
    lam: float


VARIANTS = (
    Variant("sync EMA", nesterov=False, delay=0, lam=0.0),
    Variant("delay EMA, lam 0", nesterov=False, delay=1, lam=0.0),
    Variant("delay EMA, lam 1", nesterov=False, delay=1, lam=1.0),
    Variant("sync Nesterov", nesterov=True, delay=0, lam=0.0),
    Variant("delay Nesterov, lam 0", nesterov=True, delay=1, lam=0.0),
    Variant("delay Nesterov, lam 0.5", nesterov=True, delay=1, lam=0.5),
    Variant("delay Nesterov, lam 1", nesterov=True, delay=1, lam=1.0),
)
STABILITY_BETAS = (0.0, 0.9, 0.95, 0.99)
DELAYS = (0, 1, 2, 3, 4, 6, 8, 12, 15, 16)
DELAY_BETA = 0.95
DELAY_LAMS = (0.0, 1.0)
TRENDS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
TREND_BETAS = (0.9, 0.95)


def characteristic_polynomial(
    rate: Array, beta: float, nesterov: bool, delay: int, lam: float, trend: float = 0.0
) -> Array:
    """Coefficients, highest power of r first, of the recurrence that z follows; one row for each lr * curvature.

    With q the shift to the previous step, m = (1 - beta) g / (1 - beta q), Nesterov multiplies that by
    1 + beta (1 - q), and x = q^d (1 + lam d (1 - q)) z because u[t-1] = z[t-1] - z[t]. So z[t+1] - z[t] = -u[t] reads
    (1 - q)(1 - beta q) z + rate (1 - beta) q^(1+d) (1 + beta (1 - q)) (1 + lam d (1 - q)) z = 0.
    trend: of the last update's change, so much is expected again; it multiplies lam by 1 + trend (1 - q).
    """
    free = np.polymul([-1.0, 1.0], [-beta, 1.0])
    feedback: NDArray[np.floating] = np.zeros(delay + 2)
    feedback[0] = 1 - beta
    if nesterov:
        feedback = np.polymul(feedback, [-beta, 1 + beta])
    expected = lam * delay * np.polymul([-1.0, 1.0], [-trend, 1 + trend])
    feedback = np.polymul(feedback, np.polyadd(expected, [1.0]))
    degree = max(len(free), len(feedback)) - 1
    in_q = np.pad(free, (degree + 1 - len(free), 0)) + rate[:, None] * np.pad(feedback, (degree + 1 - len(feedback), 0))
    # q = 1/r: the coefficient of q^k belongs to r^(degree - k).
    return in_q[:, ::-1]


def spectral_radius(rate: Array, beta: float, nesterov: bool, delay: int, lam: float, trend: float = 0.0) -> Array:
    """Largest |r| of the companion matrix; z forgets its start exactly when it is below 1. One for each rate."""
    polynomial = characteristic_polynomial(rate, beta, nesterov, delay, lam, trend)
    degree = polynomial.shape[1] - 1
    companion = np.zeros((len(rate), degree, degree))
    companion[:, 0, :] = -polynomial[:, 1:] / polynomial[:, :1]
    companion[:, 1:, :-1] = np.eye(degree - 1)
    return np.abs(np.linalg.eigvals(companion)).max(axis=1)


def largest_stable_rate(beta: float, nesterov: bool, delay: int, lam: float, trend: float = 0.0) -> float:
    """The first lr * curvature at which momentum descent on a quadratic stops being stable.

    At rate 0 one root is 1 and the others lie inside the circle; a small rate moves that root to about 1 - rate. So the
    stable rates begin at 0, and the limit wanted is the end of that interval, not the largest rate that happens to be
    stable: scan upward in steps of 2 % to the first unstable rate, then bisect inside that step. An unstable window
    narrower than 2 % would be stepped over; the tests look for one by solving for roots on the circle instead.
    """
    scan = np.geomspace(1e-3, 1e3, 1 + math.ceil(math.log(1e6) / math.log(1.02)))
    unstable = spectral_radius(scan, beta, nesterov, delay, lam, trend) >= 1
    if unstable[0] or not unstable.any():
        raise ValueError(f"the limit is not between {scan[0]} and {scan[-1]}")
    first = int(unstable.argmax())
    low, high = float(scan[first - 1]), float(scan[first])
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if spectral_radius(np.array([middle]), beta, nesterov, delay, lam, trend)[0] < 1:
            low = middle
        else:
            high = middle
    return low


def stability_table() -> str:
    """Largest stable lr * curvature, by momentum."""
    rows = [
        [f"{beta:g}", *(three_digits(largest_stable_rate(beta, v.nesterov, v.delay, v.lam)) for v in VARIANTS)]
        for beta in STABILITY_BETAS
    ]
    return markdown(["beta", *(variant.label for variant in VARIANTS)], rows)


def delay_table() -> str:
    """Largest stable lr * curvature, by delay, for Nesterov momentum."""
    rows = [
        [f"lam {lam:g}", *(three_digits(largest_stable_rate(DELAY_BETA, True, delay, lam)) for delay in DELAYS)]
        for lam in DELAY_LAMS
    ]
    return markdown(["delay d", *(str(delay) for delay in DELAYS)], rows)


def trend_table() -> str:
    """Largest stable lr * curvature one step late, by the share of the last update's change that is expected again."""
    rows = [
        [
            f"{'Nesterov' if nesterov else 'EMA'}, beta {beta:g}",
            *(three_digits(largest_stable_rate(beta, nesterov, 1, 1.0, trend)) for trend in (*TRENDS, beta)),
        ]
        for nesterov in (False, True)
        for beta in TREND_BETAS
    ]
    return markdown(["k", *(f"{trend:g}" for trend in TRENDS), "beta"], rows)


def draw_stability(target: Path) -> None:
    """Left: the limit against momentum. Right: against the delay."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": SVG_SALT}):
        figure, (by_momentum, by_delay) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        horizons = np.geomspace(1, 200, 25)
        for variant in VARIANTS:
            limits = [
                largest_stable_rate(1 - 1 / horizon, variant.nesterov, variant.delay, variant.lam)
                for horizon in horizons
            ]
            method = "sync" if variant.delay == 0 else "delay" if variant.lam == 0 else "delay + EF"
            by_momentum.loglog(
                horizons,
                limits,
                color=COLOURS[method],
                linestyle="-" if variant.nesterov else "--",
                alpha=0.5 if variant.lam == 0.5 else 1,
                label=variant.label,
            )
        by_momentum.set_xlabel("1 / (1 - beta)")
        by_momentum.set_ylabel("largest stable lr * curvature")
        delays = range(DELAYS[-1] + 1)
        for lam, method in zip(DELAY_LAMS, ("delay", "delay + EF"), strict=True):
            limits = [largest_stable_rate(DELAY_BETA, True, delay, lam) for delay in delays]
            by_delay.semilogy(
                delays, limits, color=COLOURS[method], marker=MARKERS[method], markersize=4, label=f"lam {lam:g}"
            )
        by_delay.set_xlabel(f"delay d (Nesterov, beta {DELAY_BETA:g})")
        for panel in (by_momentum, by_delay):
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
        figure.savefig(target, metadata={"Date": None})
        pyplot.close(figure)
