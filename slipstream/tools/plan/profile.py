"""Measures the costs of every layer of a model on this device: `slipstream profile`.

One layer of each kind (embedding, block, head with the loss) is built with its weights and timed alone: forward,
backward with and without gradients of the weights, and the update with the program's own code. The results are medians
after a warm-up; CUDA times are taken between events. With train.compile the layers are compiled, as in a stage. All
blocks are equal, so only one is timed. If only the first blocks are dense, one of them is timed too. The load of
experts is that of their initial weights.

In slices of a GPU (tools/bench/slices.py) the other slices compute at the same time, as in a run. A process alone on a
GPU would have the whole memory bandwidth and a higher clock.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ...config.defaults import precision_of
from ...config.optimizers import parameter_groups
from ...config.schema import Config
from ...errors import RunFailure
from ...model.spec import Loss, ModelSpec, on_meta
from ...pipeline.compiled import Compiled
from ...pipeline.update import Updater
from ...pipeline.weight_versions import WeightVersions, weight_layout
from ...train.layer_profile import Profile, Row, layer_kinds
from ..bench.slices import sliced
from .memory import MemoryModel
from .stage import layers_of

WARMUPS, REPEATS = 2, 7

ENOUGH_SECONDS = 3.0
"""Time after which a measurement is not repeated any more, if it was made at least twice."""

READY_SECONDS = 120.0
"""Timeout for all slices to start on their GPU."""


def measure_profile(config: Config, model: ModelSpec, tell: Callable[[str], None]) -> Profile:
    device = torch.device(config.train.device)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.pipeline.stages))  # as many as a stage has
    try:
        rows = []
        for kind in dict.fromkeys(layer_kinds(model)):
            tell(kind)
            rows.append(_measure(kind, config, model, device))
        used = torch.get_num_threads() if device.type == "cpu" else 0
    finally:
        torch.set_num_threads(threads)
    return Profile(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {used} threads",
        torch=torch.__version__,
        threads=used,
        optimizer=config.optimizer.name,
        dtype=config.train.dtype,
        microbatch_size=config.train.microbatch_size,
        model=model.facts(),
        message=MemoryModel(config, model).message(config.train.microbatch_size),
        rows=tuple(rows),
        loss_chunk_tokens=config.train.loss_chunk_tokens,
        compute_dtype=config.train.compute_dtype,
        compile=config.train.compile,
    )


def measure_in_slices(config: Config, model: ModelSpec, share: int) -> Profile:
    """Measures on one of pipeline.stages slices of a GPU, each with `share` percent of its multiprocessors."""
    context, num_slices = multiprocessing.get_context("spawn"), config.pipeline.stages
    ready, over, answer = context.Barrier(num_slices), context.Event(), context.SimpleQueue()
    with sliced(share):
        measuring = context.Process(target=_measure_in_slice, args=(config, model, ready, answer), daemon=True)
        others = [
            context.Process(target=_compute_until, args=(config, model, ready, over), daemon=True)
            for _ in range(num_slices - 1)
        ]
        for process in (measuring, *others):
            process.start()
        measuring.join()
        over.set()
        for process in others:
            process.join()
    found = None if answer.empty() else answer.get()
    if not isinstance(found, Profile):
        raise RunFailure(f"the slice was not measured ({found or 'its process died'}): try a smaller microbatch")
    return replace(found, device=f"{found.device}, {share} % of it beside {num_slices - 1} busy neighbours")


def _measure_in_slice(config: Config, model: ModelSpec, ready: Any, answer: Any) -> None:
    try:
        ready.wait(READY_SECONDS)
        answer.put(measure_profile(config, model, lambda kind: None))
    except Exception as error:
        answer.put(f"{type(error).__name__}: {error}")


def _compute_until(config: Config, model: ModelSpec, ready: Any, over: Any) -> None:
    """Runs forwards and backwards of a block until `over` is set."""
    try:
        device = torch.device(config.train.device)
        layer, _ = _build("block", config, model, device)
        layer.to(precision_of(config).compute)
        shape = (config.train.microbatch_size, model.sequence_length, model.dim)
        inputs = torch.randn(shape, device=device, dtype=precision_of(config).compute).requires_grad_()
        ready.wait(READY_SECONDS)
    except BaseException:
        ready.abort()  # so that no other process waits for this one
        raise
    while not over.is_set():
        for _ in range(4):
            outputs = layer(inputs)
            outputs.backward(outputs)
        if device.type == "cuda":
            torch.cuda.synchronize()  # limits the work that is still queued at the end


def _measure(kind: str, config: Config, model: ModelSpec, device: torch.device) -> Row:
    layer, loss = _build(kind, config, model, device)
    versions = _versions(layer, config)
    size, length = config.train.microbatch_size, model.sequence_length
    dtype = precision_of(config).compute
    ids = torch.randint(model.vocab_size, (size, length), device=device)
    inputs = ids if kind == "embedding" else torch.randn(size, length, model.dim, device=device, dtype=dtype)

    def forward() -> Tensor:
        outputs = layer(inputs)
        return loss(outputs, ids) if kind == "head" else outputs

    def backward(outputs: Tensor) -> None:
        torch.autograd.backward([outputs], [torch.ones_like(outputs)])

    if inputs.is_floating_point():
        inputs.requires_grad_()
    seconds = _median(lambda: None, lambda _: forward(), device)
    both = _median(forward, backward, device)
    input_only = 0.0
    if inputs.is_floating_point():
        layer.requires_grad_(False)
        input_only = min(both, _median(forward, backward, device))
        layer.requires_grad_(True)
    memory = MemoryModel(config, model, "cuda" if device.type == "cuda" else "cpu")
    index = layer_kinds(model).index(kind)
    passes = memory.passes(layers_of(model, index, 1), size)
    return Row(
        kind=kind,
        num_layers=layer_kinds(model).count(kind),
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        forward=seconds,
        backward_input=input_only,
        backward_weight=both - input_only,
        update=_measure_update(versions, config, device),
        activations=passes.activations,
    )


def _build(kind: str, config: Config, model: ModelSpec, device: torch.device) -> tuple[nn.Sequential, Loss]:
    index = layer_kinds(model).index(kind)
    with on_meta():
        whole, loss = model.layers_and_loss(config.train.loss_chunk_tokens)
        layer = nn.Sequential(OrderedDict([list(whole.named_children())[index]]))
    layer.to(getattr(torch, config.train.dtype)).to_empty(device=device)
    model.initialise(layer, config.train.seed)
    return Compiled(OrderedDict(layer.named_children())) if config.train.compile else layer, loss


def _versions(layer: nn.Sequential, config: Config) -> WeightVersions:
    """Creates weight versions as two_bw keeps them. The layer becomes a working copy."""
    dtypes = precision_of(config)
    layout = weight_layout(
        num_versions=2,
        delay=1,
        corrects=config.optimizer.error_feedback != 0,
        compares=config.train.track_alignment,
        is_mixed=dtypes.is_mixed,
    )
    return WeightVersions(layer, layout, dtype=dtypes.compute, gradient_dtype=dtypes.gradient)


def _measure_update(versions: WeightVersions, config: Config, device: torch.device) -> float:
    groups, dtype = parameter_groups(config), precision_of(config).gradient
    updater = Updater(versions, groups, {}, lambda step: 1.0, config.train.track_alignment, device)

    def gradients() -> dict[str, Tensor]:
        return {name: torch.full_like(master, 1e-3, dtype=dtype) for name, master in versions.masters.items()}

    def update(values: dict[str, Tensor]) -> None:
        updater.apply(versions.newest, values, [0.5] * len(groups), horizon=1)
        versions.close_next()

    return _median(gradients, update, device)


def _median(prepare: Callable[[], Any], action: Callable[[Any], Any], device: torch.device) -> float:
    """Returns the median seconds of an action, which gets the result of `prepare`."""
    seconds: list[float] = []
    for repeat in range(WARMUPS + REPEATS):
        if repeat <= 1:
            started = time.perf_counter()  # without one-time work of the first repeat, such as compilation
        value = prepare()
        start = _mark(device)
        result = action(value)
        end = _mark(device)
        del value, result
        if repeat >= WARMUPS or (repeat > 0 and time.perf_counter() - started > ENOUGH_SECONDS):
            seconds.append(_between(start, end))
        if repeat > 0 and time.perf_counter() - started > ENOUGH_SECONDS:
            break
    return median(seconds)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
