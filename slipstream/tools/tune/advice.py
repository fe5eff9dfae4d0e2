"""Level 0: a setting from published laws, without a run; and the configuration of any setting.

    config = with_rate(with_batch(config, model.sequence_length, batch), size, model.sequence_length, rate, tokens)

The batch is rounded to microbatches that keep the pipeline full. Warm-up, decay and weight decay follow from rate,
batch and tokens in the same way for the proxies and for the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ...config.defaults import LEARNING_RATES, leaves_rest_to_adamw
from ...config.rules import schedule_of
from ...config.schema import Config
from ...errors import ConfigError
from ...model.spec import ModelSpec
from .laws import GAPS, GAPS_SOURCE, LAWS, STEP_LAW, STEP_LAW_TOKENS, UNKNOWN, measured_gap, weight_decay

WARMUP_SHARE, MAX_WARMUP_STEPS = 0.05, 1000
DECAY_SHARE = 0.2
"""Share of the steps at the end in which the rate falls, as in Hägele et al. (arXiv:2405.18392)."""
SPECTRAL = ("muon", "normuon", "scion")
"""Optimizers whose update has a spectral norm of the learning rate."""
FEWEST_STEPS = 20
"""Fewest steps of a run that laws can say something about."""
DEAR = 0.01
"""Gap of the delay in nats from which it deserves a warning."""
LARGE_BATCH = 2.0
"""Number of times the batch of the law from which a batch deserves a warning."""


@dataclass(frozen=True)
class Size:
    """What the laws need to know about a model."""

    parameters: float
    """N: parameters of the blocks that a token uses."""
    flops_per_token: float
    dim: int

    @classmethod
    def of(cls, model: ModelSpec) -> Size:
        blocks = list(model.meta_layers())[1:-1]
        inner = sum(parameter.numel() for block in blocks for parameter in block.parameters())
        idle = model.num_parameters() - model.num_active_parameters() if model.num_experts else 0
        return cls(inner - idle, model.flops_per_token(), model.dim)


def from_laws(config: Config, size: Size, tokens: float) -> tuple[float, float]:
    """Returns rate and batch of Step Law. The rate is the optimizer's: of the matrices, where AdamW updates the
    rest."""
    assert STEP_LAW.rate is not None
    rate = STEP_LAW.rate(size.parameters, tokens) * rate_factor(config, size.dim)
    return rate, STEP_LAW.batch(size.parameters, tokens)


def level_0(config: Config, model: ModelSpec, size: Size, tokens: float) -> tuple[Config, list[str]]:
    """Returns the configuration of the laws, and what to know about it. If the batch had to be rounded, the rate
    follows with its square root."""
    rate, batch = from_laws(config, size, tokens)
    config = with_batch(config, model.sequence_length, batch)
    rate *= math.sqrt(batch_of(config, model.sequence_length) / batch)
    config = with_rate(config, size, model.sequence_length, rate, tokens)
    if config.train.steps < FEWEST_STEPS:
        there = batch_of(config, model.sequence_length)
        raise ConfigError(
            f"tokens = {tokens:.3g} is too few: a step that keeps the pipeline full has {there:,}, so give "
            f"{FEWEST_STEPS * there:.3g} or more"
        )
    return config, remarks(config, model, size, tokens, batch)


def rate_factor(config: Config, dim: int) -> float:
    """Returns the learning rate of the optimizer as a multiple of AdamW's.

    Moonlight (arXiv:2502.16982) makes Muon's update as large as AdamW's with 0.2 sqrt(max(rows, cols)). Our Muon scales
    with sqrt(max(1, rows / cols)), so its rate has to contain 0.2 sqrt(cols), and most matrices have dim columns.
    Optimizers that work element by element keep the ratio of our own sweep (docs/results/delay.md).
    """
    name = config.optimizer.name
    if name in SPECTRAL:
        return 0.2 * math.sqrt(dim)
    if name not in LEARNING_RATES:
        raise ConfigError(
            f"optimizer.name = {name!r} has no law for its learning rate: tune knows {', '.join(LEARNING_RATES)}"
        )
    return LEARNING_RATES[name] / LEARNING_RATES["adamw"]


def fewest_sequences(config: Config) -> int:
    """Returns the sequences in the smallest step that keeps the pipeline full."""
    return max(schedule_of(config).min_microbatches, config.pipeline.stages) * config.pipeline.replicas


def batch_of(config: Config, sequence_length: int) -> int:
    """Returns the tokens in a step of a configuration."""
    return config.train.microbatch_size * config.pipeline.microbatches * config.pipeline.replicas * sequence_length


def with_batch(config: Config, sequence_length: int, batch: float) -> Config:
    """Returns the configuration with about `batch` tokens in a step that keep the pipeline full: at least as many
    microbatches as stages, and as the schedule needs. Their size is reduced if there would be too few."""
    replicas = config.pipeline.replicas
    sequences, least = batch / (sequence_length * replicas), fewest_sequences(config) // replicas
    size = min(config.train.microbatch_size, max(1, int(sequences / least)))
    return replace(
        config,
        train=replace(config.train, microbatch_size=size),
        pipeline=replace(config.pipeline, microbatches=max(least, round(sequences / size))),
    )


def with_rate(config: Config, size: Size, sequence_length: int, rate: float, tokens: float) -> Config:
    """Returns the configuration with this rate and all that follows from it and from the batch, for a run of this many
    tokens."""
    batch = batch_of(config, sequence_length)
    steps = max(1, round(tokens / batch))
    section = replace(
        config.optimizer,
        learning_rate=_short(rate),
        adamw_learning_rate=(
            _short(rate / rate_factor(config, size.dim)) if leaves_rest_to_adamw(config.optimizer) else None
        ),
        weight_decay=_short(weight_decay(size.parameters, tokens, batch, rate)),
        schedule="1-sqrt",
        warmup_steps=min(MAX_WARMUP_STEPS, int(steps * WARMUP_SHARE)),
        decay_steps=decay_steps(steps),
        final_fraction=0.0,
        horizon_steps=None,
    )
    return replace(config, optimizer=section, train=replace(config.train, steps=steps))


def decay_steps(steps: int) -> int:
    return int(steps * DECAY_SHARE)


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def is_delayed(config: Config) -> bool:
    schedule = schedule_of(config)
    return schedule.traits.drifts or any(schedule.delay(stage) for stage in range(schedule.num_stages))


def law_rows(config: Config, size: Size, tokens: float) -> list[dict[str, Any]]:
    """Returns what every law says about the target. `rate` is that of AdamW, and `converted` that of the configured
    optimizer."""
    return [
        {
            "name": law.name,
            "source": law.source,
            "formula": law.formula,
            "fitted_on": law.fitted_on,
            "rate": (rate := law.rate(size.parameters, tokens) if law.rate else None),
            "converted": None if rate is None else rate * rate_factor(config, size.dim),
            "batch": law.batch(size.parameters, tokens),
            "is_covered": law.covers(size.parameters),
        }
        for law in LAWS
    ]


def remarks(config: Config, model: ModelSpec, size: Size, tokens: float, wanted_batch: float) -> list[str]:
    """Returns what to know about a setting of level 0. config: that of the setting. wanted_batch: the batch before it
    was rounded."""
    found, batch, name = [], batch_of(config, model.sequence_length), config.optimizer.name
    if not STEP_LAW.covers(size.parameters):
        low, high = STEP_LAW.parameters
        found.append(
            f"{size.parameters:.3g} parameters without embedding and head are outside the runs of {STEP_LAW.name} "
            f"({low:.0e} to {high:.0e}): the rate is an extrapolation."
        )
    low, high = STEP_LAW_TOKENS
    if not low <= tokens <= high:
        found.append(
            f"{tokens:.3g} tokens are outside the runs of {STEP_LAW.name} ({low:.0e} to {high:.0e}): rate and batch "
            "are extrapolations."
        )
    if model.num_experts:
        found.append(
            "N counts the parameters that a token uses, of the experts those that are chosen: an assumption, because "
            "the laws were fitted on dense models."
        )
    if name in SPECTRAL:
        found.append(
            f"The rate of {name} is 0.2 sqrt(dim) = {rate_factor(config, size.dim):.2f} times AdamW's (Moonlight, "
            "arXiv:2502.16982); embedding, head and norms keep AdamW's."
        )
    elif name != "adamw":
        found.append(
            f"The rate of {name} is {rate_factor(config, size.dim):g} times AdamW's, the ratio of the best rates of "
            "our own sweep at 25M parameters."
        )
    if batch > LARGE_BATCH * wanted_batch:
        found.append(
            f"Full pipelines (pipeline.stages = {config.pipeline.stages}, pipeline.replicas = "
            f"{config.pipeline.replicas}) need {batch:,} tokens in a step, {batch / wanted_batch:.1f} times the "
            f"{wanted_batch:,.0f} of the law: use shorter sequences, fewer stages or fewer replicas."
        )
    if is_delayed(config):
        found.append(gap_remark(config))
    return found


def gap_remark(config: Config) -> str:
    """Returns what the delay costs at this number of steps, by our own measurements."""
    section, steps = config.optimizer, config.train.steps
    law = measured_gap(section.name, section.error_feedback != 0)
    stands_in = "" if (section.name, True) in GAPS else f" (those of {UNKNOWN}: {section.name} has too few)"
    mode = "with" if section.error_feedback else "without"
    cost = law(steps)
    warning = ""
    if cost > DEAR:
        warning = "Warning: this is much. A smaller batch costs less, and so does pipeline.schedule = 'one_f_one_b'. "
    return (
        f"{warning}The delay costs about {cost:.2g} nats in {steps:,} steps {mode} error feedback, and "
        f"{law(2 * steps):.2g} in twice as many steps of half the batch: by {GAPS_SOURCE}{stands_in}."
    )
