"""Chooses the proxies of a target from a budget: three smaller models of its family, each for three lengths.

A proxy has fewer heads of the same size, and width, depth and inner widths in proportion. Its longest branch reads as
many tokens per parameter as the target will, or half as many if this brings the proxies nearer to the target. The two
shorter ones read a half and a quarter of that, and are decay branches of the same trunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...config.defaults import settled
from ...config.models import with_model
from ...config.rules import schedule_of
from ...config.schema import CheckpointSection, Config, PipelineSection, RunSection
from ...errors import ConfigError
from ...model.registry import Decoder
from ...model.spec import ModelSpec
from ..study.cell import Cell
from .advice import Size, decay_steps, from_laws, is_delayed, with_rate

NUM_SIZES = 3
SIZE_RATIO = 2.5
"""Wanted ratio of the parameters of two neighbouring sizes."""
TOKEN_SHARES = (1.0, 0.5)
"""Possible tokens per parameter of the proxies, as shares of the target's."""
HORIZONS = (0.25, 0.5, 1.0)
"""Lengths of the branches, as shares of the longest."""
BATCH_FACTORS = (0.5, 2.0)
"""Batches beside the middle one."""
FIRST_RATES = (2**-1.5, 2**-0.5, 2**0.5, 2**1.5)
"""Learning rates of the smallest size, as multiples of level 0's."""
RATES = (0.5, 1.0, 2.0)
"""Learning rates of the other sizes, as multiples of what the sizes before predict."""
FINER_RATES = (2**-0.5, 2**0.5)
"""Learning rates that the rest of the budget pays for, as multiples of what the law says is best."""
MIN_STEPS = 100
"""Fewest steps of the shortest branch at the middle batch."""
MICROBATCH_TOKENS = 16384
"""Most tokens in a microbatch of a proxy, unless a sequence is longer."""
VALIDATION_TOKENS = 2**16
"""Fewest held-out tokens that a branch is evaluated on, if the corpus has them."""


@dataclass(frozen=True)
class Proxy:
    model: Decoder
    config: Config
    """Configuration without rate, batch and length."""
    size: Size
    tokens: float
    """Tokens of the longest branch."""
    batch: int
    """Sequences of the middle batch, a power of two."""

    @property
    def name(self) -> str:
        count = self.size.parameters
        return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"

    @property
    def middle_tokens(self) -> float:
        return self.tokens * HORIZONS[1]

    def horizons(self, sequences: int) -> tuple[int, ...]:
        """Returns the steps of the branches, with this many sequences in a step."""
        return tuple(round(share * self.tokens / (sequences * self.model.sequence_length)) for share in HORIZONS)

    def with_batch(self, sequences: float) -> Proxy:
        """Returns the proxy with another middle batch, near this one, whose shortest branch is long enough."""
        power = _middle(sequences)
        while power > self.batch and self.horizons(power)[0] < MIN_STEPS:
            power //= 2
        return replace(self, batch=power)

    def flops(self, sequences: int) -> float:
        """Returns the FLOPs of a trunk with its branches."""
        *shorter, longest = self.horizons(sequences)
        steps = longest + sum(map(decay_steps, shorter))
        return self.size.flops_per_token * steps * sequences * self.model.sequence_length

    def microbatch_size(self, sequences: int) -> int:
        """Returns the sequences in a microbatch: the same for all usual batches, so that a compiled model is compiled
        once."""
        most = max(1, MICROBATCH_TOKENS // self.model.sequence_length)
        return min(sequences, _power(self.batch * BATCH_FACTORS[0]), 2 ** int(math.log2(most)))

    def cell(self, rate: float, sequences: int, is_late: bool) -> Cell:
        """Returns the cell of a trunk. Its warm-up and its weight decay are those of the middle branch."""
        length, steps = self.model.sequence_length, self.horizons(sequences)
        size = self.microbatch_size(sequences)
        config = replace(
            self.config,
            pipeline=replace(self.config.pipeline, microbatches=sequences // size),
            train=replace(self.config.train, microbatch_size=size),
            evaluation=replace(self.config.evaluation, batches=max(1, self.config.evaluation.batches // size)),
        )
        made = with_rate(config, self.size, length, rate, self.middle_tokens)
        made = replace(made, train=replace(made.train, steps=steps[-1]))
        on_gpu = made.train.device == "cuda"
        cell = Cell(
            made,
            mode="late",
            compute_dtype="bfloat16" if on_gpu and made.train.dtype == "float32" else None,
            compile_mode="reduce-overhead" if on_gpu else None,
        )
        return cell if is_late else cell.synchronous()


def smaller(model: Decoder, num_heads: int, fewest_layers: int) -> Decoder:
    """Returns a model of the same family with this number of heads."""
    share = num_heads / model.num_heads
    layers = max(fewest_layers, round(model.num_layers * share))
    dense = model.num_dense_layers and max(1, round(model.num_dense_layers * share))
    keys = max(1, round(model.num_kv_heads * share))
    return replace(
        model,
        num_heads=num_heads,
        num_kv_heads=max(k for k in range(1, keys + 1) if num_heads % k == 0),
        dim=max(2, 2 * round(model.dim * share / 2)),
        num_layers=max(layers, dense + 1 if model.num_experts else 1),
        hidden_dim=max(8, 8 * round(model.hidden_dim * share / 8)),
        expert_dim=model.num_experts and max(8, 8 * round(model.expert_dim * share / 8)),
        num_dense_layers=dense,
        initial="",
    )


def choose_proxies(config: Config, model: ModelSpec, tokens: float, budget: float, reach: float) -> list[Proxy]:
    """Returns the set of proxies nearest to the target that a budget pays for, the smallest proxy first.

    budget: share of the target's FLOPs. reach: how many times the largest proxy's parameters and tokens the target may
    have.
    """
    said = f"budget = {100 * budget:g}%"
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"{said} needs smaller models of the same family, and only those of model.name = 'decoder' "
            "can be made: leave --budget out"
        )
    target = Size.of(model)
    fewest = 1 if _has_one_delay(config) else max(1, config.pipeline.stages - 2)
    whole = [proxy_of(config, smaller(model, heads, fewest), target, tokens) for heads in range(1, model.num_heads)]
    sets = []
    for share in TOKEN_SHARES:
        candidates = [_with_tokens(proxy, share * proxy.tokens) for proxy in whole]
        sets += [_with_smaller(candidates, largest) for largest in range(NUM_SIZES - 1, len(candidates))]
    if not sets:
        raise ConfigError(
            f"model.num_heads = {model.num_heads} leaves no three smaller models with heads of the same size: leave "
            "--budget out"
        )
    longest = max(_fewest_steps(found) for found in sets)
    sets = [found for found in sets if _fewest_steps(found) >= MIN_STEPS]
    if not sets:
        raise ConfigError(
            f"tokens = {tokens:.3g} is too few: the shortest branch of the proxies would make {longest} steps, and the "
            f"fit needs {MIN_STEPS}, so give several times more --tokens"
        )
    flops = target.flops_per_token * tokens
    priced = [(planned_flops(found) / flops, found) for found in sets]
    affordable = [found for cost, found in priced if cost <= budget]
    if not affordable:
        least = _share(min(cost for cost, _ in priced))
        raise ConfigError(
            f"{said} is too small: the smallest proxies cost {least} of the target's {flops:.3g} FLOPs, "
            f"so use --budget {least} or more"
        )
    chosen = min(affordable, key=lambda found: _distance(found, target, tokens))
    far = _distance(chosen, target, tokens)
    if far > reach:
        near = [cost for cost, found in priced if _distance(found, target, tokens) <= reach]
        remedy = f"use --budget {_share(min(near))}" if near else "choose a smaller target"
        raise ConfigError(
            f"reach = {reach:g} is less than the {far:.3g} times by which the target exceeds the largest proxy that "
            f"{said} pays for, of {chosen[-1].name} parameters: {remedy}, or a larger --reach"
        )
    return chosen


def _fewest_steps(found: Sequence[Proxy]) -> int:
    return min(proxy.horizons(proxy.batch)[0] for proxy in found)


def _distance(found: Sequence[Proxy], target: Size, tokens: float) -> float:
    return max(target.parameters / found[-1].size.parameters, tokens / found[-1].tokens)


def _share(value: float) -> str:
    """Returns a percentage, rounded up."""
    digits = 10 ** (math.floor(math.log10(value * 100)) - 1)
    return f"{math.ceil(value * 100 / digits) * digits:g}%"


def _with_smaller(candidates: Sequence[Proxy], largest: int) -> list[Proxy]:
    """Returns a set of sizes whose parameters have about the wanted ratio."""
    found, top = [candidates[largest]], largest
    for left in range(NUM_SIZES - 2, -1, -1):
        wanted = found[0].size.parameters / SIZE_RATIO
        top = min(range(left, top), key=lambda i: abs(math.log(candidates[i].size.parameters / wanted)))
        found.insert(0, candidates[top])
    return found


def planned_flops(proxies: Sequence[Proxy]) -> float:
    """Returns the FLOPs of all trunks, with one more rate for each size in case the best is at the edge."""
    total, is_late = 0.0, is_delayed(proxies[0].config)
    for index, proxy in enumerate(proxies):
        num_rates = len(FIRST_RATES if index == 0 else RATES) + 1 + is_late
        total += num_rates * proxy.flops(proxy.batch)
        trials = 1 if index == len(proxies) - 1 else 2
        total += trials * sum(proxy.flops(_power(proxy.batch * factor)) for factor in BATCH_FACTORS)
    return total


def proxy_of(config: Config, model: Decoder, target: Size, tokens: float) -> Proxy:
    """Returns the proxy with this model. target, tokens: size of the target and tokens that it is trained on."""
    size = Size.of(model)
    proxy = Proxy(model, _base(config, model), size, tokens=0, batch=0)
    return _with_tokens(proxy, tokens * size.parameters / target.parameters)


def _with_tokens(proxy: Proxy, tokens: float) -> Proxy:
    _, batch = from_laws(proxy.config, proxy.size, tokens * HORIZONS[1])
    return replace(proxy, tokens=tokens, batch=_middle(batch / proxy.model.sequence_length))


def _middle(sequences: float) -> int:
    """Returns the nearest power of two whose half is not less than a sequence."""
    return max(_power(sequences), round(1 / BATCH_FACTORS[0]))


def _base(config: Config, model: Decoder) -> Config:
    """Returns the configuration that all trunks of a model share: in one process, with the delays of the target."""
    stages = 1 if _has_one_delay(config) else config.pipeline.stages
    train = replace(config.train, gradient_dtype=None, reduction_dtype=None, compile=False, non_finite="raise")
    base = replace(
        with_model(config, model),
        pipeline=PipelineSection(schedule=config.pipeline.schedule, stages=stages, transport="thread"),
        train=replace(train, microbatch_size=1),
        optimizer=replace(config.optimizer, sharded=False),
        evaluation=replace(config.evaluation, batches=held_out_sequences(config, model.sequence_length), every_steps=0),
        checkpoint=CheckpointSection(),
        run=RunSection(),
    )
    base = settled(base)
    return replace(base, train=replace(base.train, compute_dtype=None))


def held_out_sequences(config: Config, sequence_length: int) -> int:
    """Returns the number of held-out sequences of every evaluation, a power of two. All proxies and the target must
    read the same ones."""
    wanted = max(config.evaluation.batches * config.train.microbatch_size, VALIDATION_TOKENS // sequence_length)
    return 2 ** math.ceil(math.log2(max(1, wanted)))


def _has_one_delay(config: Config) -> bool:
    """Returns whether all stages have the same delay. A single stage can then stand for all."""
    schedule = schedule_of(config)
    delays = {schedule.delay(stage) for stage in range(schedule.num_stages)}
    return len(delays) == 1 and not schedule.traits.drifts


def _power(value: float) -> int:
    """Returns the nearest power of two."""
    return 2 ** max(0, round(math.log2(value)))
