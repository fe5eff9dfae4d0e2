"""What a configuration comes to: model, data, optimizers and cuts, checked, before any weight or process exists.

Everything that can be wrong with a configuration is said here, in one sentence, before a process is started.
"""

from __future__ import annotations

import inspect
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import Config, ConfigError, OptimizerSection, has_experts, model_config, schedule_of, validate
from .data import Batches, Corpus, DataConfig, Tokens, ValidationBatches, load_corpus, validation_batches
from .defaults import leaves_rest_to_adamw, num_gpus_wanted, optimizer_class, peak_rates_of, settled
from .model import ModelConfig, decoder, layer_costs, layer_names, num_parameters
from .optim import RECIPES, AdamW, Group, balance_experts, is_matrix, learning_rate_schedule, muon_and_adamw
from .optim.groups import assign
from .pipeline import PartitionError, partition, under_torchrun
from .pipeline.partition import check_sizes
from .pipeline.pipeline import plan_schedule
from .schedule import TRAITS
from .shape import num_processes, validate_shapes

MAX_WARMUP_STEPS = 1000
"""Of a run that does not say: what suits a short one is long for a long one."""


@dataclass(frozen=True)
class Parts:
    """What a configuration comes to."""

    model: ModelConfig
    batches: Batches
    validation: ValidationBatches | None
    groups: list[Group]
    learning_rate: Callable[[int], float]
    """By update: what every group's peak rate is multiplied by."""
    peak_rates: dict[str, float]
    """By group."""
    layers_per_stage: list[int]
    tokenizer: str = "unknown"
    """What made the tokens, and its file, as `Corpus` has them."""
    tokenizer_json: bytes | None = None

    def learning_rates(self, step: int) -> dict[str, float]:
        """Of all groups, whichever stage they are on."""
        return {name: peak * self.learning_rate(step) for name, peak in self.peak_rates.items()}


@cache
def _corpus(config: DataConfig) -> Corpus:
    """Read once by whoever starts the stages, and inherited by those that are forked."""
    return load_corpus(config)


def check(config: Config) -> Parts:
    """Builds everything but weights and processes, or says in one sentence why it cannot be done."""
    validate(config)
    config = settled(config)
    validate_shapes(config)
    if under_torchrun():
        _check_torchrun(config)
    if config.train.device == "cuda":
        _check_cuda(config)
    try:
        groups = parameter_groups(config)
        corpus = _corpus(config.data)
        model = model_config(config, corpus.vocab_size)
        batches, validation = _batches(config, model, corpus)
        _check_memory(config, model)
        _check_optimizers(config, groups, model)
        sizes = _layers_per_stage(config, model)
        _check_processes(config, model)
        plan_schedule(schedule_of(config), groups, _has_tied(config, model), config.train.non_finite == "skip")
        rate = learning_rate(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"data.sources = {list(config.data.sources)} leads to {str(error.filename)!r}, which cannot be read "
            f"({error.strerror}): give another"
        ) from error
    return Parts(
        model, batches, validation, groups, rate, peak_rates(config), sizes, corpus.tokenizer, corpus.tokenizer_json
    )


def in_shape_of(config: Config, parts: Parts) -> Parts:
    """The parts of a run that differs from theirs in its shape alone, and has been checked."""
    batches, validation = _batches(config, parts.model, _corpus(config.data))
    sizes = _layers_per_stage(config, parts.model)
    return replace(parts, batches=batches, validation=validation, layers_per_stage=sizes)


def _check_torchrun(config: Config) -> None:
    stages, replicas, world_size = config.pipeline.stages, config.pipeline.replicas, int(os.environ["WORLD_SIZE"])
    if config.pipeline.transport == "thread" and world_size > 1:
        raise ConfigError(
            f"pipeline.transport = 'thread' keeps all stages in one process and torchrun started {world_size}: "
            "set pipeline.transport = 'process', or leave torchrun out"
        )
    if config.pipeline.transport == "thread" or (needed := num_processes(config)) == world_size:
        return
    if needed != stages * replicas:
        raise ConfigError(
            f"pipeline.processes or pipeline.reshape come to {needed} processes, and torchrun started {world_size}: "
            f"start {needed}, or set pipeline.processes = {world_size}"
        )
    if replicas > 1:
        raise ConfigError(
            f"pipeline.stages = {stages} x pipeline.replicas = {replicas} is not the {world_size} processes that "
            f"torchrun started: start {needed}, or change one of them"
        )
    raise ConfigError(
        f"pipeline.stages = {stages} is not the {world_size} processes that torchrun started: "
        f"set pipeline.stages = {world_size}, or start {stages}"
    )


def _check_processes(config: Config, model: ModelConfig) -> None:
    """Every shape has a layer to a stage, and a microbatch to a replica."""
    section = config.pipeline
    most = (model.num_layers + 2) * section.microbatches * section.replicas
    if num_processes(config) > most:
        raise ConfigError(
            f"pipeline.processes = {num_processes(config)} is more than any shape could use, {model.num_layers + 2} "
            f"layers in {section.microbatches * section.replicas} replicas: use at most {most}"
        )


def _check_cuda(config: Config) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda' finds no CUDA device here: use train.device = 'cpu'")
    num_devices, wanted = torch.cuda.device_count(), num_gpus_wanted(config)
    if num_devices < wanted:
        raise ConfigError(
            f"{wanted} processes (pipeline.stages x pipeline.replicas) need a GPU each and there are {num_devices}: "
            "set pipeline.share_gpu for several on one GPU, or pipeline.transport = 'thread', or use fewer stages"
        )


def parameter_groups(config: Config) -> list[Group]:
    balance = [balance_experts(_balance_rate(config.optimizer))] if has_experts(config) else []
    return balance + _optimizer_groups(config)


def _balance_rate(section: OptimizerSection) -> float:
    """That of DeepSeek-V3 (arXiv:2412.19437, section 4.2), unless another is given."""
    return 0.001 if section.balance_rate is None else section.balance_rate


def _optimizer_groups(config: Config) -> list[Group]:
    config = settled(config)
    section, (rate, adamw_rate) = config.optimizer, peak_rates_of(config.optimizer)
    clip_norm = section.clip_norm or None
    shared: dict[str, Any] = {
        "weight_decay": section.weight_decay,
        "error_feedback": section.error_feedback,
        "clip_norm": clip_norm,
    }
    if section.name == "muon":
        return muon_and_adamw(
            muon_lr=rate,
            muon_beta=section.momentum,
            muon_nesterov=section.nesterov,
            muon_lookahead=1.0 if section.lookahead is None else section.lookahead,
            muon_ns_steps=section.newton_schulz_steps,
            muon_ns_dtype=getattr(torch, section.newton_schulz_dtype or "float32"),
            adamw_lr=adamw_rate,
            adamw_beta1=section.beta1,
            adamw_beta2=section.beta2,
            adamw_nesterov=section.adamw_nesterov,
            adamw_predictor=adamw_predictor(section),
            **shared,
        )
    adamw = partial(
        AdamW,
        beta1=section.beta1,
        beta2=section.beta2,
        nesterov=section.adamw_nesterov,
        predictor=adamw_predictor(section),
    )
    if section.name == "adamw":
        return [Group("all", partial(adamw, lr=rate), elementwise=True, **shared)]
    if section.name in RECIPES:
        recipe, make = RECIPES[section.name], _recipe_optimizer(section)
        matrices = Group("matrices", make, is_matrix, elementwise=recipe.elementwise, **shared)
        if recipe.matrices_only:
            make = partial(adamw, lr=adamw_rate)
        return [matrices, Group("rest", make, elementwise=recipe.elementwise or recipe.matrices_only, **shared)]
    cls = optimizer_class(section.name)
    arguments: dict[str, float] = {"lr": rate, **section.arguments}
    if "weight_decay" in inspect.signature(cls).parameters:
        arguments["weight_decay"] = 0.0  # ours is decoupled, and error feedback would extrapolate any other
    return [Group("all", partial(cls, **arguments), **shared)]


def adamw_predictor(section: OptimizerSection) -> str:
    return section.adamw_predictor or ("nesterov" if section.name == "adamw" else "last")


def peak_rates(config: Config) -> dict[str, float]:
    """By group, as `parameter_groups` names them."""
    section, recipe = config.optimizer, RECIPES.get(config.optimizer.name)
    rate, adamw_rate = peak_rates_of(section)
    balance = {"balance": _balance_rate(section)} if has_experts(config) else {}
    if leaves_rest_to_adamw(section):
        return balance | {"matrices": rate, "rest": adamw_rate}
    return balance | ({"matrices": rate, "rest": rate} if recipe else {"all": rate})


def _recipe_optimizer(section: OptimizerSection) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    recipe = RECIPES[section.name]
    try:
        return recipe.optimizer(peak_rates_of(section)[0], section.arguments)
    except (ImportError, AttributeError) as error:  # without the package, or with one too old to have the class
        raise ConfigError(
            f"optimizer.name = {section.name!r} needs pytorch-optimizer 4.1 or newer ({error}): "
            "pip install --upgrade pytorch-optimizer"
        ) from error


def _check_optimizers(config: Config, groups: list[Group], model: ModelConfig) -> None:
    """Makes every optimizer once, for toy parameters of as many dimensions as it will be given, and lets it step: what
    does not suit it is the user's to hear of before the run."""
    with torch.device("meta"):
        named_parameters = list(decoder(model).named_parameters())
    for group, members in assign(named_parameters, groups):
        toys = [nn.Parameter(torch.ones((2,) * ndim)) for ndim in sorted({p.ndim for _, p in members})]
        for toy in toys:
            toy.grad = torch.ones_like(toy)
        try:
            group.optimizer(toys).step()
        except Exception as error:
            arguments = config.optimizer.arguments
            given = f" with optimizer.arguments = {arguments}" if arguments else ""
            raise ConfigError(
                f"optimizer.name = {config.optimizer.name!r}{given} fails on a toy model ({error}): "
                "mend optimizer.arguments, or use another optimizer"
            ) from error


def _check_memory(config: Config, model: ModelConfig) -> None:
    """Against the least that could do, on CPUs: weights and gradients, and one microbatch with what every block keeps
    of it. What takes less may still be too much, and `slipstream plan` tells more; this is for what is beyond hope."""
    if config.train.device != "cpu" or not (limit := _memory_of_this_machine()):
        return
    itemsize = getattr(torch, config.train.dtype).itemsize
    compute = getattr(torch, config.train.compute_dtype or config.train.dtype).itemsize
    tokens = config.train.microbatch_size * model.sequence_length
    weights = 2 * itemsize * num_parameters(model) * config.pipeline.replicas
    microbatch = tokens * (16 + compute * model.dim * model.num_layers)
    if under_torchrun():  # this machine may have one stage among others
        weights, microbatch = weights // (config.pipeline.stages * config.pipeline.replicas), tokens * 16
    for needed, what, remedy in (
        (weights, f"a model of {num_parameters(model):,} parameters", "lower model.dim, model.num_layers or others"),
        (microbatch, f"a microbatch of {tokens:,} tokens", "lower train.microbatch_size or model.sequence_length"),
    ):
        if needed > limit:
            raise ConfigError(
                f"{what} takes at least {needed / 1e9:,.0f} GB and there are {limit / 1e9:,.0f} GB: {remedy}"
            )


def _memory_of_this_machine() -> float:
    """Bytes that a process may have; 0 where the system does not say."""
    try:
        physical = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return 0.0
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return physical if limit == resource.RLIM_INFINITY else min(physical, float(limit))


def recomputed_layers(config: Config, model: ModelConfig) -> tuple[str, ...]:
    """By name: every n-th block, from the first, whichever stage it is on."""
    every, blocks = config.train.recompute_every, layer_names(model)[1:-1]
    return tuple(blocks[::every]) if every else ()


def _layers_per_stage(config: Config, model: ModelConfig) -> list[int]:
    costs = _measured_costs(config, model) or _estimated_costs(config, model)
    stages = config.pipeline.stages
    if stages > len(costs):
        raise ConfigError(
            f"pipeline.stages = {stages} is more than the model's {len(costs)} layers (embedding, {model.num_layers} "
            f"blocks, head): use at most {len(costs)}, or raise model.num_layers"
        )
    sizes = list(config.pipeline.layers_per_stage) or partition(costs, stages)
    try:
        check_sizes(sizes, len(costs), stages)
    except PartitionError as error:
        raise ConfigError(f"pipeline.{error}") from error
    return sizes


def _estimated_costs(config: Config, model: ModelConfig) -> list[float]:
    """In forwards' FLOPs: a backward is two more, so a block that is recomputed takes four thirds of what others do."""
    recomputed = recomputed_layers(config, model)
    forward = zip(layer_names(model), layer_costs(model, model.sequence_length), strict=True)
    return [cost * 4 / 3 if name in recomputed else cost for name, cost in forward]


def _measured_costs(config: Config, model: ModelConfig) -> list[float]:
    """Of a forward and a backward through each layer; empty without a profile."""
    if not config.pipeline.profile:
        return []
    from .arguments import UsageError
    from .plan.profile import read_profile  # which asks this file for the groups of parameters

    path = Path(config.pipeline.profile)
    try:
        costs = read_profile(path).costs(model, path)
    except UsageError as error:
        raise ConfigError(f"pipeline.{error}") from error
    return [layer.compute for layer in costs.recomputing(recomputed_layers(config, model)).layers]


def _has_tied(config: Config, model: ModelConfig) -> bool:
    """Whether a weight is held by two stages."""
    name = config.pipeline.schedule
    has_tied = model.tied_embeddings and config.pipeline.stages > 1
    if has_tied and TRAITS[name].steps_alone:
        raise ConfigError(
            f"model.tied_embeddings = true needs first and last stage to step together, and those of {name} do not: "
            "set model.tied_embeddings = false, or pipeline.schedule = 'two_bw'"
        )
    return has_tied


def _batches(config: Config, model: ModelConfig, corpus: Corpus) -> tuple[Batches, ValidationBatches | None]:
    length, size = model.sequence_length, config.train.microbatch_size
    _check_window(corpus.train, "training", length, "give data.sources more text")
    batches = Batches(
        corpus.train, length, size, config.pipeline.microbatches * config.pipeline.replicas, seed=config.train.seed
    )
    if not config.evaluation.batches:
        return batches, None
    _check_window(
        corpus.validation,
        "validation",
        length,
        "raise data.validation_fraction, name data.validation_sources, or set evaluation.batches = 0",
    )
    return batches, validation_batches(corpus.validation, length, size, config.evaluation.batches)


def _check_window(tokens: Tokens, part: str, length: int, remedy: str) -> None:
    if len(tokens) <= length:
        raise ConfigError(
            f"model.sequence_length = {length} takes {length + 1} tokens and there are {len(tokens)} for {part}: "
            f"shorten it, or {remedy}"
        )


def learning_rate(config: Config) -> Callable[[int], float]:
    """By update: what every peak rate is multiplied by."""
    section, steps = config.optimizer, config.optimizer.horizon_steps or config.train.steps
    warmup, decay = section.warmup_steps, section.decay_steps
    if warmup is None:
        warmup = min(steps // 10, MAX_WARMUP_STEPS, steps - (decay or 0))
    if decay is None:
        decay = min(steps // 5, steps - warmup)
    return learning_rate_schedule(
        section.schedule,
        warmup_steps=warmup,
        total_steps=steps,
        decay_steps=decay,
        final_fraction=section.final_fraction,
    )
