"""Draws the figures of the page as SVG. matplotlib is optional: without it there are none."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..study.figures import BLACK, BLUE, GREEN, GREY, VERMILLION, start
from .fit import BAND, Fit
from .predict import Prediction
from .trunks import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, GREEN, VERMILLION)


def figures(
    fit: Fit, prediction: Prediction, records: Sequence[Record], parameters: float, tokens: float, is_late: bool
) -> dict[str, str]:
    """Returns every figure as SVG, by its title. tokens: those of the target, with the equivalent ones before."""
    if not start():
        return {}
    found = {
        "Loss at the target over rate and batch": _svg(
            lambda axes: _contour(axes, fit, prediction, parameters, tokens, is_late)
        ),
        "Loss of every branch and what the law says": _svg(lambda axes: _agreement(axes, fit, records)),
        "Rate at every size": _svg(lambda axes: _bowls(axes, fit, records, parameters)),
        "Best rate": _svg(lambda axes: _law(axes, fit, prediction, records, tokens, parameters, "rate", is_late)),
        "Best batch": _svg(lambda axes: _law(axes, fit, prediction, records, tokens, parameters, "batch", is_late)),
        "Loss": _svg(lambda axes: _law(axes, fit, prediction, records, tokens, parameters, "loss", is_late)),
    }
    if is_late:
        found["What the delay adds, over the number of steps"] = _svg(
            lambda axes: _gaps(axes, fit, prediction, records, parameters, tokens)
        )
    return found


def _svg(draw: Callable[[Axes], None]) -> str:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.6, 4.0), layout="constrained")
    axes.grid(alpha=0.25)
    draw(axes)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _contour(axes: Axes, fit: Fit, prediction: Prediction, parameters: float, tokens: float, is_late: bool) -> None:
    rates = prediction.rate * 2 ** np.linspace(-2, 2, 81)
    batches = prediction.batch * 2 ** np.linspace(-3, 3, 81)
    losses = fit.loss(parameters, tokens, batches[:, None], rates[None, :], is_late)
    excess = losses / prediction.loss - 1
    drawn = axes.contour(rates, batches, excess * 100, levels=[0.1, 0.25, 0.5, 1, 2, 4, 8], cmap="viridis_r")
    axes.clabel(drawn, fmt=lambda level: f"+{level:g} %", fontsize=8)
    axes.plot(prediction.rate, prediction.batch, "*", color=VERMILLION, markersize=14, label="chosen")
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="tokens in a step")
    axes.legend()


def _agreement(axes: Axes, fit: Fit, records: Sequence[Record]) -> None:
    for colour, size in zip(COLOURS, dict.fromkeys(record.size for record in records), strict=False):
        ends = [end for record in records if record.size == size for end in record.ends()]
        said = [float(fit.loss(e.parameters, e.tokens, e.batch, e.rate, e.is_late)) for e in ends]
        axes.plot([end.loss for end in ends], said, "o", color=colour, markersize=4, label=f"{size} parameters")
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color=GREY, linewidth=1, zorder=0)
    axes.set(xlabel="measured loss", ylabel="loss of the law")
    axes.legend()


def _bowls(axes: Axes, fit: Fit, records: Sequence[Record], parameters: float) -> None:
    """Loss over the rate at the middle length and batch of every size."""
    for colour, size in zip(COLOURS, dict.fromkeys(record.size for record in records), strict=False):
        own = [record for record in records if record.size == size]
        batch = sorted(record.batch for record in own)[len(own) // 2]
        points = sorted(
            (end.rate, end.loss)
            for record in own
            if record.batch == batch and record.is_late == own[0].is_late
            for end in record.ends()[1:2]
        )
        if not points:
            continue
        record = next(record for record in own if record.batch == batch)
        rates = np.exp(np.linspace(np.log(points[0][0] / 1.3), np.log(points[-1][0] * 1.3), 60))
        said = fit.loss(record.parameters, record.steps[1] * batch, batch, rates, own[0].is_late)
        axes.plot(rates, said, color=colour, linewidth=1)
        axes.plot(*zip(*points, strict=True), "o", color=colour, label=f"{size}, {record.steps[1] * batch:.2g} tokens")
    axes.set(xscale="log", xlabel="learning rate", ylabel="held-out loss, nats per token")
    axes.legend()


def _law(
    axes: Axes,
    fit: Fit,
    prediction: Prediction,
    records: Sequence[Record],
    tokens: float,
    parameters: float,
    what: str,
    is_late: bool,
) -> None:
    """The law with its band along the line from the smallest proxy to the target, and the best measured points."""
    smallest = records[0]
    ends = [end for record in records for end in record.ends() if end.is_late == is_late]
    first = min(end.parameters * end.tokens for end in ends)
    compute = np.exp(np.linspace(np.log(first), np.log(parameters * tokens * 1.3), 60))
    share = np.log(compute / first) / np.log(parameters * tokens / first)
    sizes = smallest.parameters * (parameters / smallest.parameters) ** share
    lengths = compute / sizes

    def law(theta: np.ndarray) -> np.ndarray:
        batch = fit.batch(sizes, lengths, is_late, theta)
        if what == "batch":
            return batch
        if what == "rate":
            return fit.rate(sizes, lengths, batch, theta)
        return fit.loss(sizes, lengths, batch, None, is_late, theta)

    low, high = np.quantile(law(fit.samples[:, None, :]), BAND, axis=0)
    axes.fill_between(6 * compute, low, high, color=BLUE, alpha=0.15, label="5 to 95 %")
    axes.plot(6 * compute, law(fit.theta), color=BLUE, label="law")
    best: dict[tuple[float, int], float] = {}
    for end in ends:
        key = (end.parameters, round(np.log2(end.tokens)))
        best[key] = min(best.get(key, np.inf), end.loss)
    top = [end for end in ends if end.loss == best[end.parameters, round(np.log2(end.tokens))]]
    axes.plot(
        [6 * e.parameters * e.tokens for e in top],
        [getattr(e, what) for e in top],
        "o",
        color=BLACK,
        markersize=4,
        label="best branch of a size and length",
    )
    value = {"rate": prediction.rate, "batch": prediction.best_batch, "loss": prediction.loss}[what]
    axes.plot(6 * parameters * tokens, value, "*", color=VERMILLION, markersize=14, label="target")
    names = {"rate": "learning rate", "batch": "tokens in a step", "loss": "loss, nats per token"}
    axes.set(xscale="log", yscale="log", xlabel="compute 6 N D, FLOPs", ylabel=names[what])
    axes.legend()


def _gaps(
    axes: Axes, fit: Fit, prediction: Prediction, records: Sequence[Record], parameters: float, tokens: float
) -> None:
    late = {(r.size, r.batch, r.rate): r for r in records if r.is_late}
    for colour, size in zip(COLOURS, dict.fromkeys(record.size for record in records), strict=False):
        points = [
            (steps, with_delay - without)
            for record in records
            if record.size == size and not record.is_late and (record.size, record.batch, record.rate) in late
            for steps, with_delay, without in zip(
                record.steps, late[record.size, record.batch, record.rate].losses, record.losses, strict=True
            )
            if with_delay is not None and without is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=f"{size} parameters, measured")
    steps = np.exp(np.linspace(np.log(min(min(r.steps) for r in records)), np.log(tokens / prediction.batch * 2), 60))
    drawn = fit.gap(parameters, tokens, tokens / steps[:, None], fit.samples)
    low, high = np.quantile(drawn, BAND, axis=1)
    axes.fill_between(steps, low, high, color=GREY, alpha=0.2, label="target, 5 to 95 %")
    axes.plot(steps, fit.gap(parameters, tokens, tokens / steps), color=BLACK, label="target")
    axes.plot(tokens / prediction.batch, prediction.gap, "*", color=VERMILLION, markersize=14, label="chosen")
    axes.set(xscale="log", yscale="log", xlabel="steps", ylabel="gap to sync, nats per token")
    axes.legend()
