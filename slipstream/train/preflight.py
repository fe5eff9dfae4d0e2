"""Rejects configurations that this machine cannot run, before any process starts, and ranks that were given different
ones."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import asdict

import torch
from torch import nn

from ..config.defaults import num_gpus_wanted, precision_of
from ..config.layout import num_processes
from ..config.schema import Config
from ..config.toml import flat
from ..errors import ConfigError
from ..model.spec import ModelSpec, on_meta
from ..optim import Group
from ..optim.groups import assign
from ..transport.environment import first_address, under_torchrun, world_size

MAX_STAGES_PER_CORE = 32
"""Largest number of stages per CPU core. Each stage is a process that has loaded torch, which takes a few hundred
megabytes."""

PLACES = (
    "run.folder",
    "data.sources",
    "data.validation_sources",
    "data.tokenizer",
    "model.initial",
    "model.hf",
    "pipeline.profile",
)
"""Fields that name files. They may differ between hosts."""


def check_torchrun(config: Config) -> None:
    stages, replicas, num_started = config.pipeline.stages, config.pipeline.replicas, world_size()
    if config.pipeline.transport == "thread" and num_started > 1:
        raise ConfigError(
            f"pipeline.transport = 'thread' keeps all stages in one process, and WORLD_SIZE = {num_started} were "
            "started: set pipeline.transport = 'process', or start it without torchrun, or unset RANK"
        )
    if config.pipeline.transport == "thread" or (needed := num_processes(config)) == num_started:
        first_address()  # raises what is wrong with it
        return
    if needed != stages * replicas:
        raise ConfigError(
            f"pipeline.processes or pipeline.reshape come to {needed} processes, and WORLD_SIZE = {num_started} "
            f"were started: start {needed}, or set pipeline.processes = {num_started}"
        )
    if replicas > 1:
        raise ConfigError(
            f"pipeline.stages = {stages} x pipeline.replicas = {replicas} is not WORLD_SIZE = {num_started}, the "
            f"number of processes that were started: start {needed}, or change one of them"
        )
    raise ConfigError(
        f"pipeline.stages = {stages} is not WORLD_SIZE = {num_started}, the number of processes that were started: "
        f"set pipeline.stages = {num_started}, or start {stages}"
    )


def check_num_processes(config: Config, model: ModelSpec) -> None:
    """Rejects more processes than any layout could use: a stage needs at least one layer, and a replica at least one
    microbatch."""
    section = config.pipeline
    most = (model.num_layers + 2) * section.microbatches * section.replicas
    if num_processes(config) > most:
        raise ConfigError(
            f"pipeline.processes = {num_processes(config)} is more than any layout could use, {model.num_layers + 2} "
            f"layers in {section.microbatches * section.replicas} replicas: use at most {most}"
        )


def check_cuda(config: Config) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda' finds no CUDA device here: use train.device = 'cpu'")
    num_devices, wanted = torch.cuda.device_count(), num_gpus_wanted(config)
    if num_devices < wanted:
        raise ConfigError(
            f"{wanted} processes (pipeline.stages x pipeline.replicas) need a GPU each and there are {num_devices}: "
            "set pipeline.share_gpu for several on one GPU, or pipeline.transport = 'thread', or use fewer stages"
        )


def check_model(config: Config, model: ModelSpec) -> None:
    """Builds the layers once without weights: a model of the user's own may not be what it says."""
    name = config.model.name
    try:
        with on_meta():
            layers, _ = model.layers_and_loss(config.train.loss_chunk_tokens)
        num_costs = len(model.layer_flops())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # it is the user's code, and may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.name = {name!r} fails when its layers are built ({reason}): change it") from error
    names = [child for child, _ in layers.named_children()]
    for built, said in zip(names, model.layer_names, strict=False):
        if built != said:
            raise ConfigError(
                f"model.name = {name!r} builds a layer named {built!r} where layer_names has {said!r}: make them agree"
            )
    if len(names) != len(model.layer_names) or num_costs != len(names):
        raise ConfigError(
            f"model.name = {name!r} builds {len(names)} layers with {num_costs} costs, and layer_names has "
            f"{len(model.layer_names)}: make them agree"
        )


def check_optimizers(config: Config, groups: list[Group], model: ModelSpec) -> None:
    """Constructs every optimizer once with toy parameters and makes one step, so that errors are reported before the
    run starts.

    The toy parameters have the numbers of dimensions that the parameters of the model have.
    """
    named_parameters = [(name, p) for name, p in model.meta_layers().named_parameters() if p.requires_grad]
    for group, members in assign(named_parameters, groups):
        if not members:
            continue
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
                "change optimizer.arguments, or use another optimizer"
            ) from error


def check_memory(config: Config, model: ModelSpec) -> None:
    """Rejects a model or a microbatch that cannot fit into the memory of this machine. Only runs on CPUs are checked.

    The check uses a lower bound: the weights and their gradients, or one microbatch with its activations between all
    blocks. A run that passes may still need too much memory; `slipstream plan` gives a better estimate.
    """
    if config.train.device != "cpu" or not (limit := _memory_of_this_machine()):
        return
    precision = precision_of(config)
    itemsize, compute = precision.master.itemsize, precision.compute.itemsize
    tokens = config.train.microbatch_size * model.sequence_length
    num_parameters = model.num_parameters()
    frozen = model.num_frozen_parameters()  # without gradients
    weights = (2 * itemsize * (num_parameters - frozen) + compute * frozen) * config.pipeline.replicas
    microbatch = tokens * (16 + compute * model.dim * model.num_layers)
    if under_torchrun():  # this machine may hold only one of the stages
        weights, microbatch = weights // (config.pipeline.stages * config.pipeline.replicas), tokens * 16
    for needed, what, remedy in (
        (weights, f"a model of {num_parameters:,} parameters", "lower model.dim, model.num_layers or others"),
        (microbatch, f"a microbatch of {tokens:,} tokens", "lower train.microbatch_size or model.sequence_length"),
    ):
        if needed > limit:
            raise ConfigError(
                f"{what} takes at least {needed / 1e9:,.0f} GB and there are {limit / 1e9:,.0f} GB: {remedy}"
            )


def _memory_of_this_machine() -> float:
    """Returns the number of bytes that a process may use, or 0 if the system does not report it."""
    try:
        physical = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return 0.0
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return physical if limit == resource.RLIM_INFINITY else min(physical, float(limit))


def check_machine(config: Config) -> None:
    """Rejects more processes (or threads) than this machine can hold, so that a mistyped number does not make it
    unusable."""
    most, is_threaded = MAX_STAGES_PER_CORE * (os.cpu_count() or 1), config.pipeline.transport == "thread"
    if (is_threaded or not under_torchrun()) and (count := num_processes(config)) > most:
        raise ConfigError(
            f"pipeline.stages x pipeline.replicas (or pipeline.reshape, pipeline.processes) come to {count} "
            f"{'threads' if is_threaded else 'processes'}, more than the {most} that this machine's cores are trusted "
            "with: use fewer, or torchrun on more machines"
        )


def configuration_text(config: Config) -> str:
    """Returns the configuration as JSON, to compare it between processes."""
    return json.dumps({name: value for name, value in flat(asdict(config)).items() if name not in PLACES})


def difference(first: str, own: str, rank: int) -> str | None:
    """Returns a sentence about the first field whose value is another than in the first process, or None."""
    theirs, ours = json.loads(first), json.loads(own)
    for name, value in ours.items():
        if theirs.get(name) != value:
            return (
                f"{name} = {value!r} on rank {rank} is {theirs.get(name)!r} on rank 0: start all ranks with the same "
                "configuration"
            )
    return None
