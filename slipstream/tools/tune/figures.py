"""Draws the figures of the page as SVG. matplotlib is optional: without it there are none."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    fit: Fit, prediction: Prediction, records: Sequence[Record], parameters: float, tokens: float
) -> dict[str, str]:
    """Returns every figure as SVG, by its title. tokens: those of the target, with the equivalent ones before."""
    if not start():
        return {}
    drawing = Drawing(fit, prediction, records, parameters, tokens, is_late=bool(prediction.gap))
    found: dict[str, Callable[[Axes], None]] = {
        "Loss at the target over rate and batch": drawing.contour,
        "Loss of every branch and what the law says": drawing.agreement,
        "Rate at every size": drawing.bowls,
        "Best rate": partial(drawing.law, "rate"),
        "Best batch": partial(drawing.law, "batch"),
        "Loss": partial(drawing.law, "loss"),
    }
    if drawing.is_late:
        found["What the delay adds, over the number of steps"] = drawing.gaps
    return {title: _svg(draw) for title, draw in found.items()}


def _svg(draw: Callable[[Axes], None]) -> str:
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    figure, axes = pyplot.subplots(figsize=(5.6, 4.0), layout="constrained")
    axes.grid(alpha=0.25)
    draw(axes)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.legend()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


@dataclass(frozen=True)
class Drawing:
    fit: Fit
    prediction: Prediction
    records: Sequence[Record]
    parameters: float
    tokens: float
    is_late: bool

    def _sizes(self) -> Iterator[tuple[str, str, list[Record]]]:
        """Yields the colour, the name and the records of every size."""
        for colour, size in zip(COLOURS, dict.fromkeys(record.size for record in self.records), strict=False):
            yield colour, size, [record for record in self.records if record.size == size]

    def contour(self, axes: Axes) -> None:
        rate, batch = self.prediction.rate, self.prediction.batch
        rates = rate * 2 ** np.linspace(-2, 2, 81)
        batches = batch * 2 ** np.linspace(-3, 3, 81)
        losses = self.fit.loss(self.parameters, self.tokens, batches[:, None], rates[None, :], self.is_late)
        excess = losses / self.prediction.loss - 1
        drawn = axes.contour(rates, batches, excess * 100, levels=[0.1, 0.25, 0.5, 1, 2, 4, 8], cmap="viridis_r")
        axes.clabel(drawn, fmt=lambda level: f"+{level:g} %", fontsize=8)
        axes.plot(rate, batch, "*", color=VERMILLION, markersize=14, label="chosen")
        axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="tokens in a step")

    def agreement(self, axes: Axes) -> None:
        for colour, size, own in self._sizes():
            ends = [end for record in own for end in record.ends()]
            said = [float(self.fit.loss(e.parameters, e.tokens, e.batch, e.rate, e.is_late)) for e in ends]
            axes.plot([end.loss for end in ends], said, "o", color=colour, markersize=4, label=f"{size} parameters")
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color=GREY, linewidth=1, zorder=0)
        axes.set(xlabel="measured loss", ylabel="loss of the law")

    def bowls(self, axes: Axes) -> None:
        """Loss over the rate at the middle length and batch of every size. The first trunk of a size has this batch."""
        for colour, size, own in self._sizes():
            first = own[0]
            points = sorted(
                (end.rate, end.loss)
                for record in own
                if (record.batch, record.is_late) == (first.batch, first.is_late)
                for end in record.ends()[1:2]
            )
            tokens = first.steps[1] * first.batch
            rates = np.exp(np.linspace(np.log(points[0][0] / 1.3), np.log(points[-1][0] * 1.3), 60))
            said = self.fit.loss(first.parameters, tokens, first.batch, rates, first.is_late)
            axes.plot(rates, said, color=colour, linewidth=1)
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=f"{size}, {tokens:.2g} tokens")
        axes.set(xscale="log", xlabel="learning rate", ylabel="held-out loss, nats per token")

    def law(self, what: str, axes: Axes) -> None:
        """The law with its band along the line from the smallest proxy to the target, and the best measured points."""
        fit, is_late = self.fit, self.is_late
        smallest = self.records[0].parameters
        ends = [end for record in self.records for end in record.ends() if end.is_late == is_late]
        first = min(end.parameters * end.tokens for end in ends)
        target = self.parameters * self.tokens
        compute = np.exp(np.linspace(np.log(first), np.log(target * 1.3), 60))
        share = np.log(compute / first) / np.log(target / first)
        sizes = smallest * (self.parameters / smallest) ** share
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
        said = self.prediction
        value = {"rate": said.rate, "batch": said.best_batch, "loss": said.loss}[what]
        axes.plot(6 * target, value, "*", color=VERMILLION, markersize=14, label="target")
        names = {"rate": "learning rate", "batch": "tokens in a step", "loss": "loss, nats per token"}
        axes.set(xscale="log", yscale="log", xlabel="compute 6 N D, FLOPs", ylabel=names[what])

    def gaps(self, axes: Axes) -> None:
        for colour, size, own in self._sizes():
            late = {(record.batch, record.rate): record.losses for record in own if record.is_late}
            points = [
                (steps, with_delay - without)
                for record in own
                if not record.is_late and (record.batch, record.rate) in late
                for steps, with_delay, without in zip(
                    record.steps, late[record.batch, record.rate], record.losses, strict=True
                )
                if with_delay is not None and without is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=colour, label=f"{size} parameters, measured")
        parameters, tokens, batch = self.parameters, self.tokens, self.prediction.batch
        shortest = min(min(record.steps) for record in self.records)
        steps = np.exp(np.linspace(np.log(shortest), np.log(tokens / batch * 2), 60))
        drawn = self.fit.gap(parameters, tokens, tokens / steps[:, None], self.fit.samples)
        low, high = np.quantile(drawn, BAND, axis=1)
        axes.fill_between(steps, low, high, color=GREY, alpha=0.2, label="target, 5 to 95 %")
        axes.plot(steps, self.fit.gap(parameters, tokens, tokens / steps), color=BLACK, label="target")
        axes.plot(tokens / batch, self.prediction.gap, "*", color=VERMILLION, markersize=14, label="chosen")
        axes.set(xscale="log", yscale="log", xlabel="steps", ylabel="gap to sync, nats per token")
