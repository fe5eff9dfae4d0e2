"""Does LMO descent (sign descent, and Muon's orthogonal update) with delayed gradients converge as the theory says?

    m <- beta m + (1 - beta) g         g at x[t];  direction: m, or beta m + (1 - beta) g with Nesterov
    z[t+1] = z[t] - u[t]               u[t] = rate * LMO(direction)
    x[t+2] = z[t+1] - lam u[t]         one step of delay, without error feedback (lam 0) and with it (lam 1)

On small stochastic problems whose optimum is known, beside the synchronous run with the same start and noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from page import COLOURS, MARKERS, SVG_SALT, markdown

Array = NDArray[np.float64]

METHODS = ("sync", "delay", "delay + EF")


@dataclass(frozen=True)
class Problem:
    """f(W) = <W, H W> / 2, matrix least squares with H = A^T A / n and the optimum moved to W = 0."""

    name: str
    hessian: Array
    """n x n."""
    start: Array
    """seeds x n x k, each of length 1 in the LMO's norm."""
    smoothness: float
    """L: the dual norm of a difference of gradients is at most L times the norm of the difference of points."""
    dual_by_frobenius: float
    """The dual norm is at most this many times the Frobenius norm."""
    lmo: Callable[[Array], Array]
    """The direction of length 1 with the largest inner product."""
    dual_norm: Callable[[Array], Array]

    @property
    def initial_loss(self) -> float:
        """Mean over the seeds; the optimum's loss is 0."""
        return float(self.loss(self.start).mean())

    def loss(self, weights: Array) -> Array:
        return 0.5 * (weights * (self.hessian @ weights)).sum(axis=(-2, -1))


def _hessian(size: int, rng: np.random.Generator) -> Array:
    """Eigenvalues from 1 down to 1/20 along random axes, so that no axis is one the LMO prefers."""
    axes, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return (axes * np.geomspace(1.0, 0.05, size)) @ axes.T


def _orthogonal_factor(matrix: Array) -> Array:
    left, _, right = np.linalg.svd(matrix)
    return left @ right


def sign_problem(seeds: int, size: int = 12) -> Problem:
    """A vector, and sign descent: the LMO of the largest entry, whose dual is the sum of the entries."""
    rng = np.random.default_rng(0)
    hessian = _hessian(size, rng)
    start = rng.uniform(-1, 1, size=(seeds, size, 1))
    # For a positive H, L = max |H d|_1 over |d|_inf <= 1 is max s^T H s over signs s; s and -s are alike.
    signs = 1.0 - 2.0 * ((np.arange(2 ** (size - 1))[:, None] >> np.arange(size)) & 1)
    return Problem(
        name="sign",
        hessian=hessian,
        start=start / np.abs(start).max(axis=(-2, -1), keepdims=True),
        smoothness=float(np.einsum("si,ij,sj->s", signs, hessian, signs).max()),
        dual_by_frobenius=math.sqrt(size),
        lmo=np.sign,
        dual_norm=lambda gradient: np.abs(gradient).sum(axis=(-2, -1)),
    )


def spectral_problem(seeds: int, size: int = 6) -> Problem:
    """A square matrix, and Muon's U V^T: the LMO of the largest singular value, whose dual is their sum."""
    rng = np.random.default_rng(0)
    hessian = _hessian(size, rng)
    start = rng.normal(size=(seeds, size, size))
    return Problem(
        name="spectral",
        hessian=hessian,
        start=start / np.linalg.norm(start, ord=2, axis=(-2, -1), keepdims=True),
        # The nuclear norm of H D is at most that of H times D's largest singular value; an orthogonal D attains it.
        smoothness=float(np.trace(hessian)),
        dual_by_frobenius=math.sqrt(size),
        lmo=_orthogonal_factor,
        dual_norm=lambda gradient: np.linalg.svd(gradient, compute_uv=False).sum(axis=-1),
    )


def descend(
    problem: Problem, betas: Sequence[float], rates: Sequence[float], steps: int, noise: float, nesterov: bool = False
) -> tuple[Array, Array]:
    """Play all METHODS on the same noise, for each beta with its rate: two arrays, betas x methods x seeds.

    The first is the dual norm of the exact gradient at z, averaged over the run: what the theory bounds. The second is
    the loss at z, averaged over the last tenth of the run, since an LMO step never shrinks and z ends in a cycle.
    `noise` is the standard deviation of every entry of the gradient noise.
    """
    rng = np.random.default_rng(1)
    beta = np.asarray(betas)[:, None, None, None, None]
    rate = np.asarray(rates)[:, None, None, None, None]
    z = np.broadcast_to(problem.start, (len(betas), len(METHODS), *problem.start.shape)).copy()
    x, momentum, previous_update = z.copy(), np.zeros_like(z), np.zeros_like(z)
    norms, losses = np.zeros(z.shape[:3]), np.zeros(z.shape[:3])
    last_tenth = steps - max(1, steps // 10)
    for step in range(steps):
        norms += problem.dual_norm(problem.hessian @ z)
        gradient = problem.hessian @ x + noise * rng.normal(size=problem.start.shape)
        momentum = beta * momentum + (1 - beta) * gradient
        update = rate * problem.lmo(beta * momentum + (1 - beta) * gradient if nesterov else momentum)
        # x[t+1] is z[t+1] when synchronous, z[t] one step late, and z[t] - u[t-1] with error feedback.
        x = np.stack([(z - update)[:, 0], z[:, 1], z[:, 2] - previous_update[:, 2]], axis=1)
        z, previous_update = z - update, update
        if step >= last_tenth:
            losses += problem.loss(z)
    return norms / steps, losses / (steps - last_tenth)


def bound(
    problem: Problem, beta: float, rate: float, steps: int, noise: float, delay: int, nesterov: bool = False
) -> float:
    """What the average dual norm of the gradient cannot exceed in expectation; derived in docs/research/theory.md."""
    lag = np.arange(steps)
    weights = (1 - beta) * beta**lag
    if nesterov:
        weights = beta * weights
        weights[0] += 1 - beta
    # By step: momentum starts at zero and the LMO ignores its scale, so the direction is that of a weighted mean.
    total = np.cumsum(weights)
    age = np.cumsum(lag * weights) / total
    noise_left = np.sqrt(np.cumsum(weights**2)) / total
    noise_norm = problem.dual_by_frobenius * noise * math.sqrt(problem.start[0].size)
    return float(
        problem.initial_loss / (rate * steps)
        + problem.smoothness * rate * (0.5 + 2 * (age.mean() + delay))
        + 2 * noise_norm * noise_left.mean()
    )


def best_rate(problem: Problem, beta: float, steps: int) -> float:
    """Where EMA's synchronous bound is smallest, at a mean age of beta / (1 - beta); near T^(-3/4) in `rate_study`."""
    return math.sqrt(problem.initial_loss / (steps * problem.smoothness * (0.5 + 2 * beta / (1 - beta))))


@dataclass(frozen=True)
class Row:
    """One setting of a study, averaged over the seeds; a line of docs/research/theory.json."""

    study: str
    problem: str
    nesterov: bool
    noise: float
    beta: float
    steps: int
    rate: float
    gradient_norm: list[float]
    """By method: the dual norm of the gradient, averaged over the run."""
    excess: list[float]
    """Of the delay and of delay + EF over sync, as a fraction of sync."""
    excess_error: list[float]
    """Standard errors of `excess`, over the seeds; methods share their noise, so it is that of the difference."""
    final_loss: list[float]
    """By method."""
    bound: list[float]
    """On the gradient norm, synchronous and one step late."""
    delay_share: float
    """2 L rate, what the delay adds to the bound."""


def _rows(
    study: str,
    problem: Problem,
    betas: Sequence[float],
    rates: Sequence[float],
    steps: int,
    noise: float,
    nesterov: bool = False,
) -> list[Row]:
    norms, losses = descend(problem, betas, rates, steps, noise, nesterov)
    rows = []
    for beta, rate, norm, loss in zip(betas, rates, norms, losses, strict=True):
        sync = norm[0].mean()
        difference = (norm[1:] - norm[0]) / sync
        rows.append(
            Row(
                study=study,
                problem=problem.name,
                nesterov=nesterov,
                noise=noise,
                beta=beta,
                steps=steps,
                rate=_rounded(rate),
                gradient_norm=[_rounded(value) for value in norm.mean(axis=1)],
                excess=[_rounded(value) for value in difference.mean(axis=1)],
                excess_error=[_rounded(value) for value in difference.std(axis=1, ddof=1) / math.sqrt(norm.shape[1])],
                final_loss=[_rounded(value) for value in loss.mean(axis=1)],
                bound=[_rounded(bound(problem, beta, rate, steps, noise, delay, nesterov)) for delay in (0, 1)],
                delay_share=_rounded(2 * problem.smoothness * rate),
            )
        )
    return rows


SEEDS = 8
NOISE = 0.03
RATE_BETAS = (0.9, 0.95, 0.98, 0.99)
SWEEP_BETAS = (0.0, 0.9, 0.95, 0.99)
SWEEP_STEPS = 1000
FIXED_RATE = 0.01


def rate_study(problem: Problem, betas: Sequence[float] = RATE_BETAS) -> list[Row]:
    """Longer and longer runs with the theory's settings, 1 - beta = T^(-1/2) and a rate that falls as T^(-3/4)."""
    rows = []
    for beta in betas:
        steps = round((1 - beta) ** -2)
        rows += _rows("rate", problem, [beta], [best_rate(problem, beta, steps)], steps, NOISE)
    return rows


def sweep_study(problem: Problem, betas: Sequence[float] = SWEEP_BETAS, steps: int = SWEEP_STEPS) -> list[Row]:
    """Runs of one length: each beta with the rate that is best for its bound, then all with the same rate."""
    best = [best_rate(problem, beta, steps) for beta in betas]
    fixed = [FIXED_RATE] * len(betas)
    rows = []
    for noise in (NOISE, 0.0):
        rows += _rows("best", problem, betas, best, steps, noise)
        rows += _rows("fixed", problem, betas, fixed, steps, noise)
        rows += _rows("fixed", problem, betas, fixed, steps, noise, nesterov=True)
    return rows


# ---------------------------------------------------------------- what it came to


def read_rows(source: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(source.read_text(encoding="utf-8"))]


def rate_table(rows: Sequence[Row]) -> str:
    """The average gradient of longer and longer runs, and the slope of each column's logarithm against that of T."""
    lines = []
    for name, selected in _by_problem(rows, "rate").items():
        for row in selected:
            lines.append(
                [
                    name,
                    f"{row.beta:g}",
                    str(row.steps),
                    *(f"{norm:.4f}" for norm in row.gradient_norm),
                    *(_percent(*pair) for pair in zip(row.excess, row.excess_error, strict=True)),
                    f"{(row.gradient_norm[1] - row.gradient_norm[0]) / row.delay_share:.2f}",
                    f"{row.bound[0]:.3f}",
                ]
            )
        steps = [row.steps for row in selected]
        norms = [log_slope(steps, [row.gradient_norm[i] for row in selected]) for i in range(len(METHODS))]
        excess = log_slope(steps, [row.excess[0] for row in selected])
        bounds = log_slope(steps, [row.bound[0] for row in selected])
        slopes = [f"{slope:.2f}" for slope in (*norms, excess, bounds)]
        lines.append([name, "", "*slope*", *slopes[:4], "", "", slopes[4]])
    header = ["LMO", "beta", "T", *METHODS, "excess of delay", "of delay + EF", "of delay / 2 L eta", "bound, sync"]
    return markdown(header, lines)


def excess_table(rows: Sequence[Row]) -> str:
    """How much larger than sync's the average gradient is, in percent: delay / delay + EF, by beta."""
    return _sweep_table(rows, lambda row: " / ".join(_fixed(100 * excess, 1) for excess in row.excess))


def final_loss_table(rows: Sequence[Row]) -> str:
    """The final loss in units of 1e-4: sync / delay / delay + EF, by beta."""
    return _sweep_table(rows, lambda row: " / ".join(f"{1e4 * loss:.3g}" for loss in row.final_loss))


def _sweep_table(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.study != "rate":
            momentum = "Nesterov" if row.nesterov else "EMA"
            lines.setdefault((row.study, momentum, f"{row.noise:g}", row.problem), []).append(cell(row))
    header = ["rate", "momentum", "noise", "LMO", *(f"beta {beta:g}" for beta in SWEEP_BETAS)]
    return markdown(header, [[*key, *cells] for key, cells in sorted(lines.items())])


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line nearest to log y against log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _by_problem(rows: Sequence[Row], study: str) -> dict[str, list[Row]]:
    selected: dict[str, list[Row]] = {}
    for row in rows:
        if row.study == study:
            selected.setdefault(row.problem, []).append(row)
    return selected


def _percent(fraction: float, error: float) -> str:
    return f"{_fixed(100 * fraction, 2)} ± {_fixed(100 * error, 2)} %"


def _fixed(value: float, digits: int) -> str:
    """Without the minus sign of a zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def _rounded(value: float) -> float:
    """Six digits: enough for any table, and few enough for a readable log."""
    return float(f"{value:.6g}")


LINE_STYLES = {"sign": "--", "spectral": "-"}


def draw_lmo(rows: Sequence[Row], target: Path) -> None:
    """The average gradient against T, and the excess over sync against momentum at the best and at a fixed rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": SVG_SALT}):
        figure, (convergence, best, fixed) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
        for name, selected in _by_problem(rows, "rate").items():
            steps = [row.steps for row in selected]
            for i, method in enumerate(METHODS):
                convergence.loglog(
                    steps,
                    [row.gradient_norm[i] for row in selected],
                    color=COLOURS[method],
                    linestyle=LINE_STYLES[name],
                    marker=MARKERS[method],
                    markersize=9 - 2 * i,
                    label=f"{name}: {method}",
                )
            convergence.loglog(steps, [row.bound[0] for row in selected], color="#aaaaaa", linestyle=LINE_STYLES[name])
        convergence.set_title("1 - beta = T^(-1/2), best rate (grey: bound)", fontsize=10)
        convergence.set_xlabel("steps T")
        convergence.set_ylim(bottom=0.02)  # room for the legend
        convergence.set_ylabel("average dual norm of the gradient")
        for panel, study in ((best, "best"), (fixed, "fixed")):
            for name, selected in _by_problem(rows, study).items():
                shown = [row for row in selected if row.noise > 0 and not row.nesterov]
                for i, method in enumerate(METHODS[1:]):
                    panel.errorbar(
                        [f"{row.beta:g}" for row in shown],
                        [100 * row.excess[i] for row in shown],
                        yerr=[100 * row.excess_error[i] for row in shown],
                        color=COLOURS[method],
                        linestyle=LINE_STYLES[name],
                        marker=MARKERS[method],
                        markersize=5,
                        label=f"{name}: {method}",
                    )
            panel.set_xlabel("beta")
            panel.set_ylabel("excess over sync, %")
        best.set_title(f"T = {SWEEP_STEPS}, best rate for each beta", fontsize=10)
        fixed.set_title(f"T = {SWEEP_STEPS}, rate {FIXED_RATE:g} for every beta", fontsize=10)
        for panel, corner in ((convergence, "lower left"), (best, "upper right"), (fixed, "upper left")):
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8, loc=corner)
        figure.savefig(target, metadata={"Date": None})
        pyplot.close(figure)
