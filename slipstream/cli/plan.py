"""`slipstream plan`."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ..config.defaults import settled
from ..config.models import recomputed_layers
from ..config.schema import Config
from ..errors import UsageError
from ..model.spec import ModelSpec
from ..observe.console import Screen
from ..observe.devices import DeviceKind, kind_of
from ..tools.plan.advice import GIB, Advice, advise
from ..tools.plan.budget import budget_sentence
from ..tools.plan.costs import ModelCosts, estimate, find_device, measured_costs
from ..tools.plan.fsdp import FSDP
from ..tools.plan.memory import MemoryModel
from ..tools.plan.predict import SCHEDULES
from ..tools.plan.savings import ever_smaller
from ..tools.plan.search import DATA_PARALLEL, Cluster, Option, Search, best_of
from ..tools.plan.show import WIDE, draw_plan, plan_table, plan_tree
from ..train.layer_profile import Profile, read_profile
from .config_arguments import (
    check_folder,
    config_of,
    model_of_run,
    parse_with_config,
    progress_bar,
    wide_console,
    write_to,
)

GBPS = 1e9 / 8
"""Bytes per second of a link of one gigabit per second."""
SEQUENCES_PER_DEVICE = 8
"""Default number of sequences per device in a batch: enough to fill a pipeline."""
MAX_DEVICES, MAX_SEQUENCES = 100_000, 2**20


@dataclass(frozen=True)
class PlanArguments(Config):
    """Predicts step time and memory of every schedule for a model and a number of devices, and recommends one.

    CONFIG.toml and --section.field are those of `slipstream train`. Of [pipeline] only the batch is used, because the
    plan searches for stages, microbatches and cuts. The figures are for the dtypes of [train].
    """

    devices: int = 0
    """Number of devices."""
    memory: float | None = None
    """GiB of one device that a run may use; by default the memory in its data sheet, or a core's share of this
    machine."""
    device_kind: str | None = None
    """One of h200, h100, a100, b200, l40s, rtx4090 and cpu (one core of this machine). By default the device of the
    profile, or h200."""
    latency_us: float = 0.0
    """Microseconds that a message between two stages takes, whatever its size."""
    bandwidth_gbps: float | None = None
    """Gigabits per second between two devices of a node, in one direction; by default those of NVLink."""
    devices_per_node: int | None = None
    """Devices in a node. By default 8; for cpu, all."""
    node_bandwidth_gbps: float | None = None
    """Gigabits per second from every device to other nodes, in one direction; by default 400."""
    batch_tokens: int | None = None
    """Tokens in a step, over all devices. By default those of the configuration, or 8 sequences per device if that is
    more."""
    tokens: float | None = None
    """Tokens to train on: the plan says how long they take. By default 20 for every parameter that a token uses."""
    efficiency: float | None = None
    """The share of a device's peak FLOP/s that matrix products reach, for estimates without a profile. By default what
    was measured (docs/guides/speed.md): 0.5, and 0.25 in blocks with experts."""
    profile: Path | None = None
    """A file of `slipstream profile`: measured costs instead of estimates."""
    json: Path | None = None
    """Write everything to this file, including the memory of every stage."""
    figure: Path | None = None
    """Draw the steps and the memory of every stage: .png or .svg."""


def main(arguments: list[str]) -> None:
    given, path, default = parse_with_config(PlanArguments, arguments, "plan")
    asked = config_of(given)
    screen = Screen()
    model = model_of_run(asked)
    _check_plan(given)
    if asked.train.freeze:
        _check_blocks(asked, model)
    profile = read_profile(given.profile) if given.profile else None
    device = _device(given, profile)
    train_device: Literal["cpu", "cuda"] = "cpu" if device.name == "cpu" else "cuda"
    config = settled(replace(asked, train=replace(asked.train, device=train_device)))
    memory = device.memory if given.memory is None else given.memory * GIB
    if not memory:
        raise UsageError("memory is missing, and this system does not say how much it has: give --memory GIB")
    cluster = _cluster(given, device, memory)
    batch_size, memory_model = _batch_size(given, config, model), MemoryModel(config, model, train_device)
    searches: list[Search] = []
    costs: dict[int, ModelCosts] = {}
    for smaller in ever_smaller(config, model, given.devices, profile is not None):
        chunk = smaller.train.loss_chunk_tokens
        if chunk not in costs:  # whole models are built for them, and no other saving changes them
            costs[chunk] = _costs(given, smaller, model, device, profile)
        recomputing = costs[chunk].recomputing(recomputed_layers(smaller, model))
        keeping_cache = replace(memory_model, config=smaller)
        searches.append(Search(smaller, model, recomputing, cluster, batch_size, keeping_cache))
    options = {}
    names = (DATA_PARALLEL, FSDP, *SCHEDULES)
    with progress_bar() as progress:
        task = progress.add_task("planning", total=len(names))
        for name in names:
            progress.update(task, description=f"planning {name}")
            options[name] = best_of(searches, name)
            progress.advance(task)
    advice = advise(searches, options, asked, default, path)
    _print(screen, searches[0], device, options, advice, given.tokens)
    _write(given, searches[0], options, advice, screen)


def _check_blocks(config: Config, model: ModelSpec) -> None:
    """Raises a UsageError if equal blocks have different parameters to train: only a few blocks are counted."""
    blocks = list(model.meta_layers())[1:-1]
    kinds = {tuple((name, parameter.requires_grad) for name, parameter in block.named_parameters()) for block in blocks}
    if len(kinds) > len({tuple(name for name, _ in kind) for kind in kinds}):
        raise UsageError(
            f"train.freeze = {list(config.train.freeze)} freezes blocks differently, and a plan counts equal blocks: "
            "leave it out"
        )


def _check_plan(given: PlanArguments) -> None:
    if not 1 <= given.devices <= MAX_DEVICES:
        problem = "is missing, or 0" if given.devices == 0 else f"= {given.devices} is invalid"
        raise UsageError(f"devices {problem}: say how many there are, --devices 8, up to {MAX_DEVICES:,}")
    for name in ("memory", "bandwidth_gbps", "node_bandwidth_gbps", "tokens"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} = {value} is invalid: use a number above 0")
    if given.devices_per_node is not None and given.devices_per_node < 1:
        raise UsageError(f"devices_per_node = {given.devices_per_node} is invalid: use 1 or more")
    if not 0 <= given.latency_us < math.inf:
        raise UsageError(f"latency_us = {given.latency_us} is no time: use a number of 0 or more")
    if given.efficiency is not None and not 0 < given.efficiency <= 1:
        raise UsageError(f"efficiency = {given.efficiency} is no share of a peak: use more than 0, and at most 1")
    for name in ("json", "figure"):
        if getattr(given, name) is not None:
            check_folder(name, getattr(given, name))
    if given.figure is not None:
        if given.figure.suffix not in (".png", ".svg"):
            raise UsageError(f"figure = {str(given.figure)!r} is neither .png nor .svg: name one of those")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError('figure needs matplotlib: pip install "slipstream[plot]", or leave it out')


def _device(given: PlanArguments, profile: Profile | None) -> DeviceKind:
    in_bf16 = "bfloat16" in (given.train.compute_dtype, given.optimizer.newton_schulz_dtype)
    if given.device_kind is not None:
        return find_device(given.device_kind, in_bf16)
    if profile is None:
        return find_device("h200")
    if profile.device.startswith("cpu"):
        return find_device("cpu", in_bf16)
    known = kind_of(profile.device)
    if known is None:
        raise UsageError(
            f"device_kind is missing, and {profile.device!r} of the profile is unknown: give --device-kind"
        )
    return known


def _cluster(given: PlanArguments, device: DeviceKind, memory: float) -> Cluster:
    return Cluster(
        given.devices,
        memory,
        given.latency_us / 1e6,
        given.bandwidth_gbps * GBPS if given.bandwidth_gbps else device.link_bandwidth,
        given.devices_per_node or device.node_size,
        given.node_bandwidth_gbps * GBPS if given.node_bandwidth_gbps else device.node_bandwidth,
    )


def _costs(
    given: PlanArguments, config: Config, model: ModelSpec, device: DeviceKind, profile: Profile | None
) -> ModelCosts:
    if profile is None:
        return estimate(config, model, device, given.efficiency)
    assert given.profile is not None
    train = config.train
    for what, measured, wanted in (
        ("", f"{profile.optimizer} in {profile.dtype}", f"{config.optimizer.name} in {train.dtype}"),
        (
            "train.compute_dtype = ",
            repr(profile.compute_dtype or profile.dtype),
            repr(train.compute_dtype or train.dtype),
        ),
        ("train.loss_chunk_tokens = ", f"{profile.loss_chunk_tokens}", f"{train.loss_chunk_tokens}"),
        ("train.compile = ", f"{profile.compile}".lower(), f"{train.compile}".lower()),
    ):
        if measured != wanted:
            raise UsageError(
                f"profile = {str(given.profile)!r} is of {what}{measured}, not of {wanted}: run slipstream profile "
                "with these options"
            )
    return measured_costs(profile, model, given.profile)


def _batch_size(given: PlanArguments, config: Config, model: ModelSpec) -> int:
    if given.batch_tokens is None:
        return max(config.pipeline.microbatches * config.train.microbatch_size, SEQUENCES_PER_DEVICE * given.devices)
    size, rest = divmod(given.batch_tokens, model.sequence_length)
    if size > MAX_SEQUENCES:
        most = MAX_SEQUENCES * model.sequence_length
        raise UsageError(f"batch_tokens = {given.batch_tokens} is more than anybody plans with: use at most {most}")
    if rest or size < 1:
        nearest = max(1, round(given.batch_tokens / model.sequence_length)) * model.sequence_length
        raise UsageError(
            f"batch_tokens = {given.batch_tokens} is no multiple of model.sequence_length = {model.sequence_length}: "
            f"use {nearest}"
        )
    return size


def _print(
    screen: Screen,
    search: Search,
    device: DeviceKind,
    options: dict[str, Option | str],
    advice: Advice,
    tokens: float | None,
) -> None:
    cluster, model = search.cluster, search.model
    shared = ", its masters and state shared by replicas" if search.config.optimizer.sharded else ""
    nodes = f", {_gbps(cluster.node_bandwidth)} between nodes of {cluster.node_size}" * (not cluster.is_one_node)
    screen.print(
        f"{_name(search.config)}: {search.num_parameters:,} parameters in {model.num_layers + 2} layers, "
        f"{search.memory_model.dtypes}, {search.config.optimizer.name}{shared}\n"
        f"{cluster.num_devices} x {device.name} with {cluster.memory / GIB:.4g} GiB, links of "
        f"{_gbps(cluster.bandwidth)} and {cluster.latency * 1e6:g} us{nodes}\n"
        f"a step of {search.batch_size * model.sequence_length:,} tokens: {search.batch_size} sequences of "
        f"{model.sequence_length}\n"
        f"costs {search.costs.source}\n"
    )
    console = wide_console()
    console.print(plan_table(options, advice.choice, console.width))
    screen.print(
        "\nP x R: stages and replicas. m x size: microbatches, and sequences in each. price: tokens to the same loss, "
        "compared with no delay.\n"
        "with: s replicas share the optimizer, c loss in chunks, r1 all blocks recomputed, r2 every second.\n"
        "planned: the trainer does not have it. GiB: upper bound of the peak of the largest stage."
        + (" Then its parts.\n" if console.width >= WIDE else " Its parts: in a wider terminal, or with --json.\n")
    )
    impossible = [f"{name} cannot: {option}" for name, option in options.items() if isinstance(option, str)]
    if impossible:
        screen.print("\n".join([*impossible, ""]))
    for sentence in advice.sentences:
        screen.print(sentence)
    if advice.choice is not None:
        screen.print(budget_sentence(search, device, advice.choice, tokens))
        screen.print(f"\n  {advice.command}")


def _name(config: Config) -> str:
    return config.model.preset if config.model.name == "decoder" else config.model.name


def _gbps(bytes_per_second: float) -> str:
    return f"{bytes_per_second / GBPS:,.0f} Gb/s"


def _write(
    given: PlanArguments, search: Search, options: dict[str, Option | str], advice: Advice, screen: Screen
) -> None:
    if given.json is not None:
        text = json.dumps(plan_tree(search, options, advice), indent=2) + "\n"
        write_to("json", given.json, partial(given.json.write_text, text, encoding="utf-8"))
        screen.print(f"{given.json}: every schedule, every stage")
    if given.figure is not None:
        write_to("figure", given.figure, partial(draw_plan, search, options, advice, given.figure))
        screen.print(f"{given.figure}: the steps, and the memory of every stage")
