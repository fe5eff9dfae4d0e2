"""Runs what a configuration comes to: `slipstream train`.

The trainer is a user of `Pipeline` and `launch` like any other.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import secrets
import shutil
import statistics
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import Checkpoint
from .config import Config, ConfigError, schedule_of, to_toml, validate
from .expectation import Expectation
from .loss import decoder_and_loss
from .metrics import Metrics, Screen, draw_losses, finite
from .model import initialise, num_parameters
from .parts import Parts, check, recomputed_layers
from .pipeline import Pipeline, StepReport, Transport, launch, under_torchrun
from .pipeline.clock import Activity, Span
from .pipeline.comm import gather_objects
from .saving import SIGNALS, Saver, Wishes, checkpoint_store, newest, state_of, sync_start_steps
from .schedule import Action, Schedule
from .schedule.render import svg
from .trace import TraceError, chrome_trace, measured_timeline, steady_window


def run_folder(config: Config) -> Path:
    return Path(config.run.folder) / config.run.name


def train(config: Config) -> None:
    """Checks, makes the run's folder, starts the stages. Under torchrun, every rank calls this."""
    torch.set_num_threads(1)  # this process computes nothing, and one that never had a second thread is safe to fork
    is_first = int(os.environ.get("RANK", "0")) == 0
    validate(config)
    folder = run_folder(config)
    if is_first:
        _check_folder(folder, config.run.overwrite, config.checkpoint.resume)
    parts = check(config)
    store = checkpoint_store(config, folder)
    found = newest(store, config, parts.model, Screen().print) if config.checkpoint.resume else None
    if found is not None and found.step == config.train.steps:
        if is_first:
            Screen().print(f"{folder} has made its {found.step} steps: raise train.steps to go on")
        return
    if is_first:
        _make_folder(folder, config, keep=config.checkpoint.resume)
        store.clean()
        if found is not None:
            Screen().print(f"going on from the checkpoint of step {found.step}")
        replicas = f" in each of {config.pipeline.replicas} replicas" if config.pipeline.replicas > 1 else ""
        Screen().print(
            f"{num_parameters(parts.model):,} parameters on {config.pipeline.stages} stages of "
            f"{parts.layers_per_stage} layers{replicas}, {config.pipeline.schedule}, {config.train.device}; "
            f"writing {folder}"
        )
    is_threaded = config.pipeline.transport == "thread"
    launch(
        partial(
            train_stage,
            config=config,
            attempt=_attempt(),
            resumed_at=None if found is None else found.step,
            # Only a main thread is told of signals.
            wishes=Wishes(config.checkpoint.every_minutes) if is_threaded else None,
        ),
        config.pipeline.stages,
        num_replicas=config.pipeline.replicas,
        placement=config.pipeline.placement,
        threads=is_threaded,
        device=config.train.device,
        timeout_seconds=config.pipeline.timeout_seconds,
        shared_memory=config.pipeline.shared_memory,
        backend=config.pipeline.backend,
        start_method="fork" if sys.platform == "linux" and config.train.device == "cpu" else None,
        forwarded=SIGNALS,
    )


def _attempt() -> str:
    """The same for all processes of a launch."""
    if not under_torchrun():
        return secrets.token_hex(4)
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    return hashlib.sha256(" ".join(os.environ.get(name, "") for name in names).encode()).hexdigest()[:16]


def _check_folder(folder: Path, overwrite: bool, resumes: bool) -> None:
    try:
        if not (folder.exists() or folder.is_symlink()):
            return
        is_run = (folder / "config.toml").exists() and not folder.is_symlink()
    except OSError as error:
        raise _unwritable(folder, error) from error
    if resumes and is_run:
        return
    if not overwrite:
        raise ConfigError(
            f"run.name = {folder.name!r} has been used, {folder} exists: choose another, set checkpoint.resume to go "
            "on with it, or run.overwrite"
        )
    if not is_run:
        raise ConfigError(
            f"run.name = {folder.name!r} would overwrite {folder}, which has no config.toml and is no run: "
            "choose another, or remove it yourself"
        )


def _make_folder(folder: Path, config: Config, keep: bool) -> None:
    try:
        if folder.exists() and not keep:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=keep)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.folder = {str(folder.parent)!r} cannot take the folder {folder.name!r} ({error.strerror}): use another"
    )


def train_stage(
    transport: Transport,
    config: Config,
    attempt: str | None = None,
    resumed_at: int | None = None,
    wishes: Wishes | None = None,
) -> None:
    """One stage of a run, in whatever process or thread it was put. resumed_at: the step of the checkpoint that the run
    goes on from."""
    parts = check(config)
    device = torch.device(config.train.device)
    if device.type == "cpu" and config.pipeline.transport == "process":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (transport.num_stages * transport.num_replicas)))
    speaks = transport.stage == 0 and transport.replica == 0
    store = checkpoint_store(config, run_folder(config), attempt)
    found = None if resumed_at is None else store.open(resumed_at, verify=False)
    wishes = wishes or Wishes(config.checkpoint.every_minutes if speaks else 0.0)
    pipeline = make_pipeline(transport, config, parts, wishes, found)
    is_last = transport.stage == transport.num_stages - 1 and transport.replica == 0  # which speaks for all
    tokens_per_step = parts.batches.num_tokens(0)
    screen, folder = Screen(), run_folder(config)
    metrics = (
        Metrics(folder, pipeline.schedule, tokens_per_step, config.run.log_every_steps, screen) if is_last else None
    )
    saver = Saver(config, parts.model, transport, pipeline, store, screen.print)
    delays: list[int] = []
    losses = [row["loss"] for row in metrics.earlier if row.get("loss") is not None] if metrics else []
    val_loss: float | None = None
    try:
        for report in pipeline.run():
            if isinstance(report, StepReport):
                delays.append(report.delay)
                losses.append(report.loss)
                saver.after(report)
                if metrics:
                    metrics.step(report, parts.learning_rates(report.step))
            else:
                val_loss = report.loss
                if metrics:
                    metrics.evaluation(report)
    finally:
        seconds = metrics.close() if metrics else 0.0
    was_stopped = pipeline.executor.end != config.train.steps
    saved = saver.finish(was_stopped)
    stages = _gather_stages(transport, pipeline, delays, config)
    if metrics:
        summary = _summary(config, parts, stages, losses, val_loss, seconds, metrics.expectation, pipeline)
        _leave_behind(folder, pipeline.schedule, summary, stages, metrics.expectation, screen)
        if was_stopped:
            screen.print(f"stopped after step {saved}, and saved: go on with --checkpoint.resume")


def make_pipeline(
    transport: Transport,
    config: Config,
    parts: Parts,
    wishes: Wishes | None = None,
    found: Checkpoint | None = None,
) -> Pipeline:
    """One stage of what a configuration comes to, with its weights. Of the other stages' it never holds any. found: a
    checkpoint to go on from."""
    device = torch.device(config.train.device)
    with torch.device("meta"):
        model, loss = decoder_and_loss(parts.model, config.train.loss_chunk_tokens)

    def materialise(layers: nn.Sequential) -> None:
        layers.to(getattr(torch, config.train.dtype))
        layers.to_empty(device=device)
        initialise(layers, parts.model, config.train.seed)

    sync_start = config.pipeline.sync_start_steps if found is None else sync_start_steps(found, schedule_of(config))
    validation = parts.validation
    num_validation_tokens = sum(map(validation.num_tokens, range(len(validation)))) if validation else 1
    return Pipeline(
        transport,
        model,
        data=parts.batches,
        loss=loss,
        optimizer=parts.groups,
        num_microbatches=config.pipeline.microbatches,
        num_steps=config.train.steps,
        schedule=config.pipeline.schedule,
        depth=config.pipeline.depth,
        sync_start_steps=sync_start,
        learning_rate=parts.learning_rate,
        loss_scale=lambda step: 1 / parts.batches.num_tokens(step),
        evaluation=validation,
        num_evaluations=len(validation) if validation else 0,
        evaluate_every=config.evaluation.every_steps,
        evaluation_scale=1 / num_validation_tokens,
        skip_non_finite=config.train.non_finite == "skip",
        track_alignment=config.train.track_alignment,
        layers_per_stage=parts.layers_per_stage,
        dtype=_dtype(config.train.compute_dtype),
        gradient_dtype=_dtype(config.train.gradient_dtype or config.train.dtype),
        reduction_dtype=_dtype(config.train.reduction_dtype),
        shard_optimizer=config.optimizer.sharded,
        recompute=recomputed_layers(config, parts.model),
        compile=config.train.compile,
        prepare=materialise,
        requests=wishes,
        start=None if found is None else state_of(found),
        device=device,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _gather_stages(transport: Transport, pipeline: Pipeline, delays: list[int], config: Config) -> list[dict[str, Any]]:
    """What every stage knows of itself, on every stage."""
    executor, schedule = pipeline.executor, pipeline.schedule
    hashes = {
        name: hashlib.sha256(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
        for name, weight in pipeline.weights().items()
        if name not in pipeline.tied or pipeline.tied[name].name == name  # a tied weight is one weight
    }
    num_early = schedule.sync_start_steps + schedule.delay(transport.stage)
    late = delays[num_early:]  # the first have nothing to be late for
    clock = executor.clock
    own = {
        "utilisation": clock.split().utilisation,
        "time_split": clock.split().shares()._asdict(),
        "overhead": clock.split().other / clock.num_actions if clock.num_actions else math.nan,
        "background_update": clock.background_seconds / clock.num_background_updates
        if clock.num_background_updates
        else 0.0,
        "delays": sorted(set(late or delays)),
        "versions": executor.peak_versions,
        "in_flight": executor.peak_in_flight,
        "memory": _peak_memory(torch.device(config.train.device)),
        "parameters": hashes,
        "started_at": clock.started_at,
        "spans": _latest(list(clock.spans), config.run.trace_actions),
    }
    parts = gather_objects(transport, json.dumps(own).encode(), lambda: "the other stages' summaries")
    return [json.loads(part) for part in parts]


def _latest(spans: list[Span], num_actions: int) -> list[tuple[Any, ...]]:
    """The latest actions, and the waits between them."""
    places = [i for i, span in enumerate(spans) if span.activity.is_compute]
    first = places[-num_actions] if len(places) >= num_actions > 0 else 0 if num_actions else len(spans)
    return [(str(span.action), int(span.activity), *span[2:]) for span in spans[first:]]


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
    expectation: Expectation | None,
    pipeline: Pipeline,
) -> dict[str, Any]:
    first_step, end = pipeline.schedule.first_step, pipeline.executor.end or 0
    parameters = dict(sorted(item for stage in stages for item in stage["parameters"].items()))
    checksum = hashlib.sha256("".join(f"{name}={digest};" for name, digest in parameters.items()).encode()).hexdigest()
    utilisations = [stage["utilisation"] for stage in stages]
    delays = [delay for stage in stages for delay in stage["delays"]]
    tokens = parts.batches.num_tokens(0) * (end - first_step)
    tail = losses[-max(1, len(losses) // 20) :]
    return {
        "schedule": config.pipeline.schedule,
        "stages": config.pipeline.stages,
        "replicas": config.pipeline.replicas,
        "layers_per_stage": parts.layers_per_stage,
        "microbatches": config.pipeline.microbatches,
        "steps": end,
        "resumed_at": first_step or None,
        "parameters": num_parameters(parts.model),
        "tokens": tokens,
        "first_loss": losses[0],
        "last_loss": statistics.fmean(tail),
        "val_loss": val_loss,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "utilisation": {"per_stage": utilisations, "mean": statistics.fmean(utilisations)},
        "expected_utilisation": expectation
        and {"per_stage": expectation.expected_by_stage, "mean": expectation.expected},
        "time_split": [stage["time_split"] for stage in stages],
        "background_update_seconds": [stage["background_update"] for stage in stages],
        "executor_microseconds_per_action": [1e6 * stage["overhead"] for stage in stages],
        "delay": {"min": min(delays), "max": max(delays)},
        "live_weight_versions": max(stage["versions"] for stage in stages),
        "microbatches_in_flight": [stage["in_flight"] for stage in stages],
        "peak_memory_bytes": [stage["memory"] for stage in stages],
        "parameter_checksum": checksum,
        "torch": torch.__version__,
        "config": asdict(config),
    }


def _leave_behind(
    folder: Path,
    schedule: Schedule,
    summary: dict[str, Any],
    stages: list[dict[str, Any]],
    expectation: Expectation | None,
    screen: Screen,
) -> None:
    (folder / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n", encoding="utf-8")
    spans = [
        [Span(Action.parse(text), Activity(activity), *rest) for text, activity, *rest in stage["spans"]]
        for stage in stages
    ]
    trace = chrome_trace(schedule, spans, [stage["started_at"] for stage in stages])
    (folder / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    with suppress(TraceError):  # of a run too short to have a steady state
        timeline = measured_timeline(trace, steady_window(trace))
        title = f"{folder.name}: {schedule.name}, measured, in milliseconds"
        (folder / "timeline.svg").write_text(svg(timeline, title), encoding="utf-8")
    draw_losses(folder)
    per_stage = ", ".join("-" if math.isnan(u) else f"{u:.3f}" for u in summary["utilisation"]["per_stage"])
    lines = [
        f"loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f}"
        + ("" if summary["val_loss"] is None else f", validation loss {summary['val_loss']:.4f}"),
        f"{summary['tokens']:,} tokens in {summary['seconds']:.1f} s: {summary['tokens_per_second']:,.0f} tokens/s",
        f"utilisation per stage in the steady state: {per_stage}",
        *([f"over the last steps: {expectation}"] if expectation else []),
        f"delay {summary['delay']['min']} to {summary['delay']['max']}, "
        f"{summary['live_weight_versions']} live weight versions",
        f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.is_file()))}",
        f"as a page: slipstream report {folder}",
    ]
    screen.print("\n".join(lines))
