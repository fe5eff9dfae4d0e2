"""Fits one law to the ends of all branches: loss, best learning rate, best batch, and the gap of the delay.

    L = E + R + R/R0 (2k (lr/lr* - 1 - ln(lr/lr*)) + w (ln B - ln B*)^2) + gap        R = A N^-alpha + C D^-beta
    ln lr* = r + r_n ln N + r_d ln D + r_b ln B         ln B* = b + b_d ln D
    gap = g (D / B)^-g_s N^g_n, for delayed runs only

A rate near the best one costs k (ln lr - ln lr*)^2; further away, too high a rate costs more than too low a one. What a
wrong rate or batch costs shrinks with R, the part of the loss that size and tokens reduce, as it did in the sweeps of
two targets (docs/research/log.md); R0 is R in the midst of the proxies. N, D and B are divided by the geometric means
of the proxies', so that every constant is a value in their midst. The gap depends on the batch through the number of
steps D / B: so it was in all our measurements (docs/results/delay.md). A delayed run therefore wants a smaller batch
than B*, which is that of a synchronous run.

Every parameter has a weak prior, mostly from published exponents, so that a parameter which the proxies hardly
determine stays plausible. Bands come from repeated fits to the fitted losses plus errors as large as the residuals
were: half of the variance for a whole trunk, because its branches share a fate, and half for every branch. The centres
of the priors are drawn anew too, so a band is as wide as the prior where the proxies say nothing. Resampling whole
trunks would too often leave out one of the few synchronous ones.

A law may bend beyond the proxies. So the law of the smaller ones is also tested on the largest one (`Backtest`), and
the band of the loss is widened by the error that this shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .laws import GapLaw

Array = np.ndarray

NUM_SAMPLES = 200
BAND = (0.05, 0.95)
NOISE = 0.002
"""Relative spread of a final loss that is assumed at least: between seeds it is 0.0004 to 0.004 (docs/results)."""
FAR = 0.03
"""Relative excess over the best loss at the same size and length at which a point counts half. The law holds near
the optimum only."""

POOR = 0.01
"""Relative spread of the proxies' losses around the law from which its predictions deserve a warning."""

NEAR = 0.5
"""Exponent of the compute of a branch in its weight. A hundredth of the compute counts a tenth, because laws bend at
the start."""
FEW_STEPS = 1000
"""Number of steps at which a branch counts half. Shorter ones are still at the start, where losses follow no power law:
in our tests they missed it by 1 to 19 %."""
IRREDUCIBLE = 0.3
"""E in nats per byte of text. Chinchilla's 1.69 nats per token are 0.4 per byte (arXiv:2203.15556). Our tests of small
models on bytes (benchmarks/tune_h200_2026-11-18) want less of it, and smaller exponents."""


@dataclass(frozen=True)
class End:
    """The end of one branch."""

    trunk: str
    parameters: float
    tokens: float
    batch: float
    rate: float
    is_late: bool
    loss: float


@dataclass(frozen=True)
class Prior:
    name: str
    mean: float
    spread: float
    reason: str


def priors(
    ends: Sequence[End],
    is_spectral: bool,
    guess: Callable[[float, float], tuple[float, float]],
    gap: GapLaw,
    bytes_per_token: float,
) -> list[Prior]:
    """Returns the priors of all parameters.

    guess: function (N, D) -> rate and batch of level 0. gap: our measured gap of this optimizer.
    """
    centre = Centre.of(ends)
    best = min(end.loss for end in ends)
    rate, batch = guess(centre.parameters, centre.tokens)
    at_batch = math.log(rate) + 0.5 * math.log(centre.batch / batch)
    rate_by_size = Prior("r_n", -0.3, 0.3, "Muon's rate hardly depends on the width; Step Law -0.71 for AdamW")
    if not is_spectral:
        rate_by_size = Prior("r_n", -0.5, 0.3, "Step Law -0.71, DeepSeek -0.25")
    return [
        Prior("ln_E", math.log(IRREDUCIBLE * bytes_per_token), 0.5, "Chinchilla 0.4 nats per byte, arXiv:2203.15556"),
        Prior("ln_A", math.log(0.2 * best), 1.5, "hardly any"),
        Prior("alpha", 0.17, 0.12, "Kaplan 0.08, arXiv:2001.08361, to Chinchilla 0.34"),
        Prior("ln_C", math.log(0.2 * best), 1.5, "hardly any"),
        Prior("beta", 0.17, 0.12, "Kaplan 0.10 to Chinchilla 0.28, refitted 0.37, arXiv:2404.10102"),
        Prior("ln_k", math.log(0.018 * best), 0.7, "our sweep of Muon and AdamW at 25M parameters"),
        Prior("r", at_batch, 1.0, "level 0"),
        rate_by_size,
        Prior("r_d", -0.15, 0.2, "at a fixed batch: Step Law 0.02, MuonH -0.32, arXiv:2603.28743"),
        Prior("r_b", 0.5, 0.25, "the square-root rule; our sweep of Muon 0.63"),
        Prior("ln_w", math.log(0.007 * best), 0.7, "our sweep of Muon at 25M parameters"),
        Prior("b", math.log(batch / centre.batch), 1.0, "level 0"),
        Prior("b_d", 0.5, 0.15, "Step Law 0.57, Power Lines 0.38"),
        Prior("ln_g", math.log(gap(centre.tokens / centre.batch)), 1.0, "our runs of 25M parameters"),
        Prior("g_s", gap.exponent, 0.3, "our runs of 25M parameters"),
        Prior("g_n", 0.0, 0.2, "no dependence on the size"),
    ]


@dataclass(frozen=True)
class Centre:
    """Geometric means over the proxies."""

    parameters: float
    tokens: float
    batch: float

    @classmethod
    def of(cls, ends: Sequence[End]) -> Centre:
        def mean(name: str) -> float:
            return math.exp(sum(math.log(getattr(end, name)) for end in ends) / len(ends))

        return cls(mean("parameters"), mean("tokens"), mean("batch"))


@dataclass(frozen=True)
class Backtest:
    """What a law of the smaller proxies says about the largest one."""

    error: float
    """Relative error of the losses, root mean square."""
    compute: float
    """Parameters times tokens of the largest proxy."""
    ratio: float
    """The same, divided by that of the next smaller one."""

    def error_at(self, compute: float) -> float:
        """Returns the relative error to expect of the law of all proxies: as much for every such ratio."""
        return self.error * max(0.0, math.log(compute / self.compute) / math.log(self.ratio))


@dataclass(frozen=True)
class Fit:
    priors: list[Prior]
    centre: Centre
    theta: Array
    """(parameters): the best fit."""
    samples: Array
    """(NUM_SAMPLES, parameters): repeated fits."""
    noise: float
    """Relative spread of an observed loss around the law."""
    backtest: Backtest | None = None
    """None means that there are fewer than three sizes."""

    # ---- the law. theta: one vector, or one per row; the result has the same number of rows.

    def rate(self, parameters: Any, tokens: Any, batch: Any, theta: Array | None = None) -> Array:
        """Returns the best learning rate for a batch."""
        t, n, d, b = self._unpack(theta, parameters, tokens, batch)
        return np.exp(t["r"] + t["r_n"] * n + t["r_d"] * d + t["r_b"] * b)

    def gap(self, parameters: Any, tokens: Any, batch: Any, theta: Array | None = None) -> Array:
        t, n, d, b = self._unpack(theta, parameters, tokens, batch)
        return np.exp(t["ln_g"] - t["g_s"] * (d - b) + t["g_n"] * n)

    def floor(self, parameters: Any, tokens: Any, theta: Array | None = None) -> Array:
        """Returns the loss at the best rate and batch, without delay."""
        t, n, d, _ = self._unpack(theta, parameters, tokens, self.centre.batch)
        return np.exp(t["ln_E"]) + np.exp(t["ln_A"] - t["alpha"] * n) + np.exp(t["ln_C"] - t["beta"] * d)

    def loss(
        self, parameters: Any, tokens: Any, batch: Any, rate: Any, is_late: Any, theta: Array | None = None
    ) -> Array:
        """Returns the loss. rate: None means the best one for the batch."""
        t, _, d, b = self._unpack(theta, parameters, tokens, batch)
        best = self.rate(parameters, tokens, batch, theta)
        x = 0.0 if rate is None else np.log(rate) - np.log(best)
        y = b - (t["b"] + t["b_d"] * d)
        late = np.asarray(is_late, float) * self.gap(parameters, tokens, batch, theta)
        wrong = 2 * np.exp(t["ln_k"]) * (np.expm1(x) - x) + np.exp(t["ln_w"]) * y**2
        wrong = wrong * self._reducible_share(parameters, tokens, theta)
        return self.floor(parameters, tokens, theta) + wrong + late

    def _reducible_share(self, parameters: Any, tokens: Any, theta: Array | None) -> Array:
        """Returns R / R0."""
        t = self._unpack(theta, parameters, tokens, 1.0)[0]
        reducible = self.floor(parameters, tokens, theta) - np.exp(t["ln_E"])
        return reducible / (np.exp(t["ln_A"]) + np.exp(t["ln_C"]))

    def loss_band(
        self, parameters: float, tokens: float, batch: float, rate: float, is_late: bool
    ) -> tuple[float, float]:
        """Returns the band of a loss that is measured: the law's, the spread between runs, and the backtest's error."""
        losses = self.loss(parameters, tokens, batch, rate, is_late, self.samples)
        beyond = 0.0 if self.backtest is None else self.backtest.error_at(parameters * tokens)
        errors = np.hypot(self.noise, beyond) * np.random.default_rng(1).standard_normal(len(losses))
        return self.band(losses * (1 + errors))

    def gap_band(self, parameters: float, tokens: float, batch: float) -> tuple[float, float]:
        """Returns the band of a gap that two runs show, with delay and without: the law's, and the spread between
        runs."""
        spread = math.sqrt(2) * self.noise * float(self.floor(parameters, tokens))
        gaps = self.gap(parameters, tokens, batch, self.samples)
        return self.band(gaps + spread * np.random.default_rng(2).standard_normal(len(gaps)))

    def batch(self, parameters: Any, tokens: Any, is_late: bool, theta: Array | None = None) -> Array:
        """Returns the batch with the lowest loss, at the best rate for it."""
        t, _, d, _ = self._unpack(theta, parameters, tokens, 1.0)
        best = np.exp(t["b"] + t["b_d"] * d) * self.centre.batch
        if not is_late:
            return best
        # With y = ln B - ln B*, w y^2 + gap(B*) e^(s y) is lowest where 2 w y + s gap(B*) e^(s y) = 0.
        s = np.maximum(t["g_s"], 0.05)
        w = np.exp(t["ln_w"]) * self._reducible_share(parameters, tokens, theta)
        y = -lambert(s**2 * self.gap(parameters, tokens, best, theta) / (2 * w)) / s
        return best * np.exp(y)

    def value(self, name: str) -> float:
        """Returns a parameter of the best fit."""
        return float(self.theta[[prior.name for prior in self.priors].index(name)])

    def band(self, values: Array) -> tuple[float, float]:
        low, high = np.quantile(values, BAND)
        return float(low), float(high)

    def _unpack(
        self, theta: Array | None, parameters: Any, tokens: Any, batch: Any
    ) -> tuple[dict[str, Array], Any, Any, Any]:
        theta = self.theta if theta is None else theta
        names = {prior.name: theta[..., index] for index, prior in enumerate(self.priors)}
        n, d = np.log(parameters / self.centre.parameters), np.log(tokens / self.centre.tokens)
        return names, n, d, np.log(batch / self.centre.batch)

    # ---- files

    def tree(self) -> dict[str, Any]:
        return {
            "parameters": [
                {
                    "name": prior.name,
                    "value": float(self.theta[index]),
                    "band": self.band(self.samples[:, index]),
                    "prior": [prior.mean, prior.spread],
                    "reason": prior.reason,
                }
                for index, prior in enumerate(self.priors)
            ],
            "centre": vars(self.centre),
            "noise": self.noise,
            "backtest": self.backtest and vars(self.backtest),
            "samples": np.round(self.samples, 6).tolist(),
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Fit:
        rows = tree["parameters"]
        found = [Prior(row["name"], row["prior"][0], row["prior"][1], row["reason"]) for row in rows]
        theta = np.array([row["value"] for row in rows])
        backtest = tree["backtest"] and Backtest(**tree["backtest"])
        return cls(found, Centre(**tree["centre"]), theta, np.array(tree["samples"]), tree["noise"], backtest)


def fit(ends: Sequence[End], priors_of: Callable[[Sequence[End]], list[Prior]], num_samples: int | None = None) -> Fit:
    """Fits the law. ends: branches that did not diverge. num_samples: None means NUM_SAMPLES, 0 a fit without bands and
    backtest."""
    given = priors_of(ends)
    means, spreads = (np.array([getattr(prior, name) for prior in given]) for name in ("mean", "spread"))
    losses = np.array([end.loss for end in ends])
    sizes, lengths, batches, rates, late = (
        np.array([getattr(end, name) for end in ends]) for name in ("parameters", "tokens", "batch", "rate", "is_late")
    )
    frame = Fit(given, Centre.of(ends), means, np.empty((0, len(means))), NOISE)

    def predicted(theta: Array) -> Array:
        """theta (rows, parameters) -> losses (rows, ends)"""
        return frame.loss(sizes, lengths, batches, rates, late, theta[:, None, :])

    weights = _weights(ends)

    def solve(observed: Array, centres: Array, noise: float, start: Array) -> Array:
        def residuals(theta: Array) -> Array:
            data = (predicted(theta) - observed) / losses * weights / noise
            return np.concatenate([data, (theta - centres) / spreads], axis=1)

        return least_squares(residuals, start)

    theta = solve(losses, means, NOISE, means)
    trunks = {name: index for index, name in enumerate(dict.fromkeys(end.trunk for end in ends))}
    cluster = np.array([trunks[end.trunk] for end in ends])
    # A fit makes residuals smaller than the errors were. The trunks are independent, and the priors determine about
    # half of the parameters.
    inflation = math.sqrt(len(trunks) / max(1.0, len(trunks) - len(means) / 2))
    noise = NOISE
    for _ in range(3):
        noise = max(NOISE, inflation * _miss(predicted(theta[None])[0], ends))
        theta = solve(losses, means, noise, theta)
    expected = predicted(theta[None])[0]
    random = np.random.default_rng(0)
    samples = []
    for _ in range(NUM_SAMPLES if num_samples is None else num_samples):
        errors = random.standard_normal(len(trunks))[cluster] + random.standard_normal(len(losses))
        centres = means + spreads * random.standard_normal(len(means))
        samples.append(solve(expected + errors * noise * losses / (weights * math.sqrt(2)), centres, noise, theta))
    backtest = None if num_samples == 0 else _backtest(ends, priors_of)
    return Fit(given, frame.centre, theta, np.array(samples).reshape(-1, len(means)), noise, backtest)


def _backtest(ends: Sequence[End], priors_of: Callable[[Sequence[End]], list[Prior]]) -> Backtest | None:
    sizes = sorted({end.parameters for end in ends})
    if len(sizes) < 3:
        return None
    largest = [end for end in ends if end.parameters == sizes[-1]]
    rest = [end for end in ends if end.parameters < sizes[-1]]
    smaller = fit(rest, priors_of, num_samples=0)
    losses = [smaller.loss(end.parameters, end.tokens, end.batch, end.rate, end.is_late) for end in largest]
    compute, before = (max(end.parameters * end.tokens for end in some) for some in (largest, rest))
    return Backtest(_miss(np.array(losses), largest), compute, compute / before)


def _miss(losses: Array, ends: Sequence[End]) -> float:
    """Returns the relative error of losses that a law predicts, root mean square."""
    weights, observed = _weights(ends), np.array([end.loss for end in ends])
    return math.sqrt(float(np.sum((weights * (losses / observed - 1)) ** 2) / np.sum(weights**2)))


def _weights(ends: Sequence[End]) -> Array:
    """Returns the weights of the ends: larger with the compute and the number of steps, and smaller the further a loss
    exceeds the best one of the same size, length and mode."""
    best: dict[tuple[float, float, bool], float] = {}
    keys = [(end.parameters, round(math.log2(end.tokens), 1), end.is_late) for end in ends]
    for key, end in zip(keys, ends, strict=True):
        best[key] = min(end.loss, best.get(key, math.inf))
    excess = np.array([end.loss / best[key] - 1 for key, end in zip(keys, ends, strict=True)])
    compute = np.array([end.parameters * end.tokens for end in ends])
    steps = np.array([end.tokens / end.batch for end in ends])
    return (compute / compute.max()) ** NEAR / (1 + (FEW_STEPS / steps) ** 2) / (1 + excess / FAR)


def lambert(z: Array) -> Array:
    """Returns the solution x of x e^x = z, for z of 0 or more, by Newton's method."""
    x = np.log1p(z)
    for _ in range(20):
        x = x - (x - z * np.exp(-x)) / (x + 1)
    return x


def least_squares(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Minimises the sum of squares by Levenberg and Marquardt's method.

    residuals: function (rows, parameters) -> (rows, residuals).
    """
    theta, damping = start.copy(), 1e-2
    eye = np.eye(len(theta)) * 1e-6
    value = residuals(theta[None])[0]
    for _ in range(100):
        jacobian = ((residuals(theta + eye) - value) / 1e-6).T
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ value
        while damping < 1e12:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            with np.errstate(over="ignore", invalid="ignore"):
                tried = residuals((theta + step)[None])[0]
            if np.isfinite(tried).all() and tried @ tried < value @ value:
                break
            damping *= 4
        else:
            return theta
        gained = value @ value - tried @ tried
        theta, value, damping = theta + step, tried, damping / 8
        if gained < 1e-10 * (value @ value):
            return theta
    return theta
