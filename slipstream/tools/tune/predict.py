"""Reads a setting for the target from a fit, and what is to be expected of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...config.schema import Config
from ...model.spec import ModelSpec
from .advice import Size, batch_of, is_delayed, with_batch, with_rate
from .fit import Fit
from .proxies import held_out_sequences

Band = tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    rate: float
    rate_band: Band
    best_batch: float
    """Tokens in a step before they are rounded to what keeps the pipeline full."""
    batch_band: Band
    batch: int
    loss: float
    loss_band: Band
    gap: float
    """Part of the loss that the delay adds."""
    gap_band: Band
    wrong: dict[str, float]
    """Loss that a wrong setting adds, by what is wrong."""
    synchronous_loss: float
    """Loss of a synchronous pipeline in the same time: its bubbles leave it fewer tokens."""
    synchronous_tokens: float
    synchronous_batch: float | None
    """Batch from which on the synchronous pipeline is better. None means that none was found."""
    equivalent_tokens: float = 0.0
    """Continued training: tokens from scratch after which the law expects the loss of the folder."""


def predict(
    fit: Fit, config: Config, model: ModelSpec, tokens: float, before: float = 0.0
) -> tuple[Prediction, Config]:
    """Returns the prediction and the configuration of the target. before: equivalent tokens that the weights have seen
    already."""
    size, late, total = Size.of(model), is_delayed(config), tokens + before
    n = size.parameters
    best = float(fit.batch(n, total, late))
    config = with_batch(config, model.sequence_length, best)
    batch = batch_of(config, model.sequence_length)
    rate = float(fit.rate(n, total, batch))
    config = with_rate(config, size, model.sequence_length, rate, tokens)
    sequences = held_out_sequences(config, model.sequence_length)
    config = replace(
        config, evaluation=replace(config.evaluation, batches=max(1, round(sequences / config.train.microbatch_size)))
    )

    def loss(batch: float, rate: float | None, late: bool = late, tokens: float = total) -> float:
        return float(fit.loss(n, tokens, batch, rate, late))

    expected = loss(batch, rate)
    stages, microbatches = config.pipeline.stages, config.pipeline.microbatches
    share = microbatches / (microbatches + stages - 1)
    return (
        Prediction(
            rate,
            fit.band(fit.rate(n, total, batch, fit.samples)),
            best,
            fit.band(fit.batch(n, total, late, fit.samples)),
            batch,
            expected,
            fit.loss_band(n, total, batch, rate, late),
            float(fit.gap(n, total, batch)) if late else 0.0,
            fit.gap_band(n, total, batch) if late else (0.0, 0.0),
            {
                "half the rate": loss(batch, rate / 2) - expected,
                "twice the rate": loss(batch, rate * 2) - expected,
                "half the batch, rate adapted": loss(batch / 2, None) - expected,
                "twice the batch, rate adapted": loss(batch * 2, None) - expected,
                "half the batch, same rate": loss(batch / 2, rate) - expected,
                "twice the batch, same rate": loss(batch * 2, rate) - expected,
            },
            loss(batch, None, False, total * share),
            tokens * share,
            _crossing(fit, config, n, total, batch) if late else None,
            before,
        ),
        config,
    )


def _crossing(fit: Fit, config: Config, parameters: float, tokens: float, batch: float) -> float | None:
    """Returns the smallest batch above the chosen one at which a synchronous pipeline ends lower in the same time. More
    microbatches make its bubbles smaller and the gap of the delay larger."""
    stages, microbatches = config.pipeline.stages, config.pipeline.microbatches
    batches = batch * 2 ** np.linspace(0, 6, 241)
    counts = microbatches * batches / batch
    share = counts / (counts + stages - 1)
    sync = fit.loss(parameters, tokens * share, batches, None, False)
    late = fit.loss(parameters, tokens, batches, None, True)
    better = batches[sync < late]
    return float(better[0]) if len(better) else None
