"""Builds the parts from a configuration and runs them: `slipstream train`.

The trainer is a user of `Pipeline` and `launch` like any other. Everything that can be wrong with a configuration is
said by `check` before a process is started.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import resource
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from .config import Config, ConfigError, model_config, schedule_of, to_toml, validate
from .data import Batches, Corpus, DataConfig, ValidationBatches, load_corpus, validation_batches
from .metrics import Metrics, chrome_trace, draw_losses
from .model import ModelConfig, decoder, initialise, layer_costs, next_token_loss, num_parameters
from .optim import AdamW, Group, learning_rate_schedule, muon_and_adamw
from .pipeline import Pipeline, StepReport, Transport, launch, partition, under_torchrun
from .pipeline.clock import Span
from .pipeline.comm import gather_objects
from .pipeline.partition import check_sizes
from .pipeline.pipeline import plan_schedule
from .schedule import Action

TRACE_SPANS = 512
"""Latest actions of every stage that go into trace.json."""


@dataclass(frozen=True)
class Parts:
    """What a configuration comes to."""

    model: ModelConfig
    batches: Batches
    validation: ValidationBatches | None
    groups: list[Group]
    learning_rate: Callable[[int], float]
    layers_per_stage: list[int]


@cache
def _corpus(config: DataConfig) -> Corpus:
    """Read once by whoever starts the stages, and inherited by those that are forked."""
    return load_corpus(config)


def check(config: Config) -> Parts:
    """Builds everything but weights and processes, or says in one sentence why it cannot be done."""
    validate(config)
    if config.train.device == "cuda":
        _check_cuda(config)
    try:
        corpus = _corpus(config.data)
        model = model_config(config, corpus.vocab_size)
        batches = Batches(
            corpus.train,
            model.sequence_length,
            config.train.microbatch_size,
            config.pipeline.microbatches,
            seed=config.train.seed,
        )
        validation = None
        if config.evaluation.batches:
            validation = validation_batches(
                corpus.validation, model.sequence_length, config.train.microbatch_size, config.evaluation.batches
            )
        groups = parameter_groups(config)
        costs = layer_costs(model, model.sequence_length)
        sizes = list(config.pipeline.layers_per_stage) or partition(costs, config.pipeline.stages)
        check_sizes(sizes, len(costs), config.pipeline.stages)
        has_tied = model.tied_embeddings and config.pipeline.stages > 1
        plan_schedule(schedule_of(config), groups, has_tied, config.train.non_finite == "skip")
        _check_optimizers(groups)
        steps = config.train.steps
        rate = config.optimizer
        learning_rate = learning_rate_schedule(
            rate.schedule,
            warmup_steps=steps // 10 if rate.warmup_steps is None else rate.warmup_steps,
            total_steps=steps,
            decay_steps=steps // 5 if rate.decay_steps is None else rate.decay_steps,
            final_fraction=rate.final_fraction,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Parts(model, batches, validation, groups, learning_rate, sizes)


def _check_cuda(config: Config) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda' finds no CUDA device here: use train.device = 'cpu'")
    num_devices, stages = torch.cuda.device_count(), config.pipeline.stages
    if config.pipeline.transport == "process" and not under_torchrun() and num_devices < stages:
        raise ConfigError(
            f"pipeline.stages = {stages} processes need a GPU each and there are {num_devices}: use "
            "pipeline.transport = 'thread' for several stages on one GPU, or fewer stages"
        )


def parameter_groups(config: Config) -> list[Group]:
    section = config.optimizer
    clip_norm = section.clip_norm or None
    shared: dict[str, Any] = {
        "weight_decay": section.weight_decay,
        "error_feedback": section.error_feedback,
        "clip_norm": clip_norm,
    }
    if section.name == "muon":
        return muon_and_adamw(
            muon_lr=section.learning_rate,
            muon_beta=section.momentum,
            muon_nesterov=section.nesterov,
            muon_ns_steps=section.newton_schulz_steps,
            muon_ns_dtype=getattr(torch, section.newton_schulz_dtype),
            adamw_lr=section.adamw_learning_rate,
            adamw_beta1=section.beta1,
            adamw_beta2=section.beta2,
            **shared,
        )
    if section.name == "adamw":
        make = partial(AdamW, lr=section.learning_rate, beta1=section.beta1, beta2=section.beta2)
        return [Group("all", make, **shared)]
    cls = _optimizer_class(section.name)
    return [Group("all", partial(cls, lr=section.learning_rate, **section.arguments), **shared)]


def _optimizer_class(path: str) -> Any:
    module_name, _, class_name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), class_name) if module_name else None
    except (ImportError, AttributeError):
        cls = None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer.name = {path!r} is no optimizer: use muon, adamw or the import path of an installed torch "
            "optimizer, such as torch.optim.SGD"
        )
    return cls


def _check_optimizers(groups: list[Group]) -> None:
    """Makes every optimizer once for a toy matrix: wrong arguments are the user's to hear of before the run."""
    for group in groups:
        try:
            group.optimizer([nn.Parameter(torch.zeros(2, 2))])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the optimizer of group {group.name!r} refuses its arguments: {error}") from error


# ---- the run


def train(config: Config) -> None:
    """Checks, makes the run's folder, starts the stages. Under torchrun, every rank calls this."""
    torch.set_num_threads(1)  # this process computes nothing, and one that never had a second thread is safe to fork
    parts = check(config)
    console = Console()
    folder = Path(config.run.folder) / config.run.name
    if int(os.environ.get("RANK", "0")) == 0:
        _make_folder(folder, config.run.overwrite)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        console.print(
            f"{num_parameters(parts.model):,} parameters on {config.pipeline.stages} stages of "
            f"{parts.layers_per_stage} layers, {config.pipeline.schedule}, {config.train.device}; writing {folder}",
            highlight=False,
            soft_wrap=True,
        )
    launch(
        partial(train_stage, config=config),
        config.pipeline.stages,
        threads=config.pipeline.transport == "thread",
        device=config.train.device,
        timeout_seconds=config.pipeline.timeout_seconds,
        start_method="fork" if sys.platform == "linux" and config.train.device == "cpu" else None,
    )


def _make_folder(folder: Path, overwrite: bool) -> None:
    if folder.exists():
        if not overwrite:
            raise ConfigError(
                f"run.name = {folder.name!r} has been used: {folder} exists; choose another name, or set run.overwrite"
            )
        if folder.is_symlink() or not (folder / "config.toml").exists():
            raise ConfigError(
                f"run.name = {folder.name!r} is no run's folder: {folder} has no config.toml; remove it yourself"
            )
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.folder = {str(folder.parent)!r} cannot be written ({error.strerror}): use another"
        ) from error


def train_stage(transport: Transport, config: Config) -> None:
    """One stage of a run, in whatever process or thread it was put."""
    parts = check(config)
    device = torch.device(config.train.device)
    if device.type == "cpu" and config.pipeline.transport == "process":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // transport.num_stages))
    with torch.device("meta"):
        model = decoder(parts.model)

    def materialise(layers: nn.Sequential) -> None:
        layers.to(getattr(torch, config.train.dtype))
        layers.to_empty(device=device)
        initialise(layers, parts.model, config.train.seed)

    validation = parts.validation
    num_validation_tokens = sum(map(validation.num_tokens, range(len(validation)))) if validation else 1
    pipeline = Pipeline(
        transport,
        model,
        data=parts.batches,
        loss=next_token_loss,
        optimizer=parts.groups,
        num_microbatches=config.pipeline.microbatches,
        num_steps=config.train.steps,
        schedule=config.pipeline.schedule,
        depth=config.pipeline.depth,
        sync_start_steps=config.pipeline.sync_start_steps,
        learning_rate=parts.learning_rate,
        loss_scale=lambda step: 1 / parts.batches.num_tokens(step),
        evaluation=validation,
        num_evaluations=len(validation) if validation else 0,
        evaluate_every=config.evaluation.every_steps,
        evaluation_scale=1 / num_validation_tokens,
        skip_non_finite=config.train.non_finite == "skip",
        track_alignment=config.train.track_alignment,
        layers_per_stage=parts.layers_per_stage,
        prepare=materialise,
        device=device,
    )
    folder = Path(config.run.folder) / config.run.name
    is_last = transport.stage == transport.num_stages - 1
    tokens_per_step = parts.batches.num_tokens(0)
    console = Console()
    metrics = (
        Metrics(folder, config.train.steps, tokens_per_step, config.run.log_every_steps, console) if is_last else None
    )
    delays: list[int] = []
    losses: list[float] = []
    val_loss: float | None = None
    try:
        for report in pipeline.run():
            if isinstance(report, StepReport):
                delays.append(report.delay)
                losses.append(report.loss)
                if metrics:
                    metrics.step(report)
            else:
                val_loss = report.loss
                if metrics:
                    metrics.evaluation(report)
    finally:
        seconds = metrics.close() if metrics else 0.0
    stages = _gather_stages(transport, pipeline, delays, device)
    if is_last:
        summary = _summary(config, parts, stages, losses, val_loss, seconds)
        _leave_behind(folder, summary, stages, console)


def _gather_stages(
    transport: Transport, pipeline: Pipeline, delays: list[int], device: torch.device
) -> list[dict[str, Any]]:
    """What every stage knows of itself, on every stage."""
    executor, schedule = pipeline.executor, pipeline.schedule
    hashes = {
        name: hashlib.sha256(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
        for name, weight in pipeline.weights().items()
        if transport.stage == pipeline.tied.get(name, (transport.stage,))[0]  # a tied weight is one weight
    }
    late = delays[
        schedule.sync_start_steps + schedule.delay(transport.stage) :
    ]  # the first have nothing to be late for
    own = {
        "utilisation": executor.clock.utilisation(),
        "busy_seconds": {op.name.lower(): seconds for op, seconds in executor.clock.busy_by_op.items()},
        "delays": sorted(set(late or delays)),
        "versions": executor.peak_versions,
        "in_flight": executor.peak_in_flight,
        "memory": _peak_memory(device),
        "parameters": hashes,
        "started_at": executor.clock.started_at,
        "spans": [(str(s.action), s.start, s.end) for s in list(executor.clock.spans)[-TRACE_SPANS:]],
    }
    parts = gather_objects(transport, json.dumps(own).encode(), lambda: "the other stages' summaries")
    return [json.loads(part) for part in parts]


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the device's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _summary(
    config: Config,
    parts: Parts,
    stages: list[dict[str, Any]],
    losses: list[float],
    val_loss: float | None,
    seconds: float,
) -> dict[str, Any]:
    parameters = dict(sorted(item for stage in stages for item in stage["parameters"].items()))
    checksum = hashlib.sha256("".join(f"{name}={digest};" for name, digest in parameters.items()).encode()).hexdigest()
    utilisations = [stage["utilisation"] for stage in stages]
    delays = [delay for stage in stages for delay in stage["delays"]]
    tokens = parts.batches.num_tokens(0) * config.train.steps
    tail = losses[-max(1, len(losses) // 20) :]
    return {
        "schedule": config.pipeline.schedule,
        "stages": config.pipeline.stages,
        "layers_per_stage": parts.layers_per_stage,
        "microbatches": config.pipeline.microbatches,
        "steps": config.train.steps,
        "parameters": num_parameters(parts.model),
        "tokens": tokens,
        "first_loss": losses[0],
        "last_loss": statistics.fmean(tail),
        "val_loss": val_loss,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "utilisation": {"per_stage": utilisations, "mean": statistics.fmean(utilisations)},
        "busy_seconds": [stage["busy_seconds"] for stage in stages],
        "delay": {"min": min(delays), "max": max(delays)},
        "live_weight_versions": max(stage["versions"] for stage in stages),
        "microbatches_in_flight": [stage["in_flight"] for stage in stages],
        "peak_memory_bytes": [stage["memory"] for stage in stages],
        "parameter_checksum": checksum,
        "torch": torch.__version__,
        "config": asdict(config),
    }


def _leave_behind(folder: Path, summary: dict[str, Any], stages: list[dict[str, Any]], console: Console) -> None:
    finite = json.loads(json.dumps(summary), parse_constant=lambda constant: None)
    (folder / "summary.json").write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
    spans = [[Span(Action.parse(text), start, end) for text, start, end in stage["spans"]] for stage in stages]
    trace = chrome_trace(spans, [stage["started_at"] for stage in stages])
    (folder / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    drawn = draw_losses(folder)
    per_stage = ", ".join("-" if math.isnan(u) else f"{u:.3f}" for u in summary["utilisation"]["per_stage"])
    lines = [
        f"loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f}"
        + ("" if summary["val_loss"] is None else f", validation loss {summary['val_loss']:.4f}"),
        f"{summary['tokens']:,} tokens in {summary['seconds']:.1f} s: {summary['tokens_per_second']:,.0f} tokens/s",
        f"utilisation per stage in the steady state: {per_stage}",
        f"delay {summary['delay']['min']} to {summary['delay']['max']}, "
        f"{summary['live_weight_versions']} live weight versions",
        f"{folder}: summary.json, metrics.jsonl, config.toml, trace.json" + (", loss.png" if drawn else ""),
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
