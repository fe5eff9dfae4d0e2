"""The costs of every layer: read from a profile, or estimated from FLOPs and a data sheet.

    costs = estimate(config, model, find_device("h200"))
    costs.stages([6, 5, 5, 2], microbatch_size=1, latency=0.0)      # StageCosts, for predict

A matrix product is estimated as its FLOPs divided by a share of the device's peak in the compute dtype. Operations that
only move data (embedding lookups, most of an update) are estimated as bytes divided by memory bandwidth. An estimate
shows which schedule and which cut are better, and the rough speed. `slipstream profile` measures the real speed.
"""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from ...config.defaults import precision_of
from ...config.schema import Config
from ...errors import UsageError
from ...model.spec import ModelSpec
from ...observe.devices import DEVICE_KINDS, DeviceKind
from ...optim.groups import is_matrix
from ...train.layer_profile import LayerCost, Profile
from .predict import StageCosts

DENSE_EFFICIENCY, EXPERT_EFFICIENCY = 0.5, 0.25
"""Shares of the bf16 peak that stages of 8b and of moe-10b reached on an H200 (docs/guides/speed.md)."""


def find_device(name: str, in_bf16: bool = False) -> DeviceKind:
    """Returns a kind of device. "cpu" is one core of this machine, which is measured because it has no data sheet.
    in_bf16: whether to measure bf16 too."""
    if name == "cpu":
        return _measure_core(in_bf16)
    if name not in DEVICE_KINDS:
        raise UsageError(f"device_kind = {name!r} is unknown: choose one of {', '.join(DEVICE_KINDS)}, cpu")
    return DEVICE_KINDS[name]


def _measure_core(in_bf16: bool) -> DeviceKind:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        square, vector = torch.ones(512, 512), torch.ones(2**22)
        product = _shortest(lambda: square @ square)
        small = torch.ones(128, 128, dtype=torch.bfloat16)  # some cores are very slow in bfloat16
        bf16_flops = 2 * 128**3 / _shortest(lambda: small @ small) if in_bf16 else None
        copy = _shortest(vector.clone)
    finally:
        torch.set_num_threads(threads)
    bandwidth = 2 * vector.nbytes / copy
    try:
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):  # not every system reports it
        memory = 0.0
    share = memory / (os.cpu_count() or 1)
    flops = 2 * 512**3 / product
    return DeviceKind("cpu", share, flops, bandwidth, bandwidth / 2, bf16_flops, node_size=None)


def _shortest(action: Callable[[], object]) -> float:
    return min(timeit.repeat(action, number=1, repeat=8))


@dataclass(frozen=True)
class ModelCosts:
    layers: tuple[LayerCost, ...]
    """Costs of all layers in the order of the model, including embedding and head."""
    microbatch_size: int
    """Microbatch size of the measurement or estimate. The costs of other sizes are assumed to be proportional."""
    source: str
    """Origin of the costs, as text."""

    def recomputing(self, names: Collection[str]) -> ModelCosts:
        """Returns the costs if the layers with these names are recomputed before their backward."""
        layers = tuple(
            replace(layer, backward_input=layer.backward_input + layer.forward) if layer.name in names else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def stages(self, layers_per_stage: Sequence[int], microbatch_size: int, latency: float) -> StageCosts:
        scale, layers = microbatch_size / self.microbatch_size, iter(self.layers)
        parts = [list(islice(layers, size)) for size in layers_per_stage]
        return StageCosts(
            forward=tuple(scale * sum(layer.forward for layer in part) for part in parts),
            backward_input=tuple(scale * sum(layer.backward_input for layer in part) for part in parts),
            backward_weight=tuple(scale * sum(layer.backward_weight for layer in part) for part in parts),
            update=tuple(sum(layer.update for layer in part) for part in parts),
            latency=latency,
        )


def measured_costs(profile: Profile, model: ModelSpec, path: Path) -> ModelCosts:
    where = f"{profile.device}, torch {profile.torch}, microbatches of {profile.microbatch_size}"
    layers = profile.layer_costs(model, path)
    return ModelCosts(layers, profile.microbatch_size, f"measured: {path} ({where})")


def estimate(config: Config, model: ModelSpec, device: DeviceKind, efficiency: float | None = None) -> ModelCosts:
    """Estimates the costs of all layers. efficiency: the share of the peak that matrix products reach. None means the
    measured shares, which are lower for blocks with experts."""
    dense = DENSE_EFFICIENCY if efficiency is None else efficiency
    sparse = EXPERT_EFFICIENCY if efficiency is None else efficiency
    size = config.train.microbatch_size
    tokens, dtypes = size * model.sequence_length, precision_of(config)
    peak = device.flops_in(dtypes.compute)
    # The gradient of a table (embedding or head) is written, and then added to the existing gradient: one read and one
    # more write.
    added = model.vocab_size * model.dim * (dtypes.compute.itemsize + 2 * dtypes.gradient.itemsize)
    names, per_token = model.layer_names, model.layer_flops()
    # Matrix products without weights, as in attention: their whole backward is with respect to inputs.
    attention = model.weightless_flops()
    message = tokens * model.dim * dtypes.compute.itemsize
    embedding = LayerCost(
        names[0],
        forward=2 * message / device.memory_bandwidth,
        backward_input=0.0,
        backward_weight=added / device.memory_bandwidth,  # mostly zeros
        update=0.0,
    )
    num_dense = model.num_layers - model.num_sparse_layers
    shares = [dense] * num_dense + [sparse] * model.num_sparse_layers
    blocks = [
        LayerCost(
            name,
            forward=tokens * cost / (peak * share),
            backward_input=tokens * (cost + attention) / (peak * share),
            backward_weight=tokens * (cost - attention) / (peak * share),
            update=0.0,
        )
        for name, cost, share in zip(names[1:-1], per_token[1:-1], shares, strict=True)
    ]
    cost = tokens * per_token[-1] / (peak * dense)
    head = LayerCost(names[-1], cost, cost, cost, update=0.0)
    if config.train.loss_chunk_tokens:  # the forward also computes the gradient, and the backward only adds it
        head = replace(head, forward=3 * cost, backward_input=0.0, backward_weight=added / device.memory_bandwidth)
    layers = tuple(
        _trained(cost, module, config, device, dense)
        for cost, module in zip([embedding, *blocks, head], model.meta_layers(), strict=True)
    )
    what = "measured on one core just now" if device.name == "cpu" else "data sheet"
    is_bf16 = dtypes.compute == torch.bfloat16 and device.bf16_flops is not None
    unit = "fp32" if not is_bf16 else "bf16" if device.name == "cpu" else "bf16 on tensor cores"
    of_experts = f", {sparse:.0%} with experts," if sparse != dense and model.num_sparse_layers else ""
    source = (
        f"estimated: {dense:.0%}{of_experts} of {peak / 1e12:.3g} TFLOP/s in {unit} ({device.name}, {what}), "
        f"{device.memory_bandwidth / 1e12:.3g} TB/s of memory"
    )
    return ModelCosts(layers, size, source)


def _trained(cost: LayerCost, layer: nn.Module, config: Config, device: DeviceKind, efficiency: float) -> LayerCost:
    """Returns the costs with only the gradients of the values that are trained, and with their update."""
    trained = {f"{cost.name}.{name}": p for name, p in layer.named_parameters() if p.requires_grad}
    share = sum(p.numel() for p in trained.values()) / max(1, sum(p.numel() for p in layer.parameters()))
    update = sum(_update_seconds(config, device, efficiency, *pair) for pair in trained.items())
    return replace(cost, backward_weight=cost.backward_weight * share, update=update)


def _update_seconds(config: Config, device: DeviceKind, efficiency: float, name: str, parameter: nn.Parameter) -> float:
    """Returns the seconds of the update of a parameter. They consist of the Newton-Schulz products, if the optimizer is
    Muon, and of memory traffic. An update reads or writes about 12 values per parameter: nine in the masters' dtype,
    two of the gradient and one of the working copy."""
    dtypes = precision_of(config)
    moved = 9 * dtypes.master.itemsize + 2 * dtypes.gradient.itemsize + dtypes.compute.itemsize
    seconds = float(parameter.numel() * moved / device.memory_bandwidth)
    if config.optimizer.name == "muon" and is_matrix(name, parameter):
        # A step: X X^T, its square, and their product with X, for every matrix of a stack.
        short, long = sorted(parameter.shape[-2:])
        products = 2.0 * (2 * short * short * long + short**3) * (parameter.numel() // (short * long))
        flops = device.flops_in(getattr(torch, config.optimizer.newton_schulz_dtype or "float32")) * efficiency
        seconds += config.optimizer.newton_schulz_steps * products / flops
    return seconds
