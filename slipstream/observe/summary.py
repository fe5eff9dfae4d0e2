"""Writes the files that a run leaves when it ends: summary.json, trace.json and drawings.

When a run fails, writes the last actions of each stage.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import reason, write_file
from ..config.schema import Config
from ..pipeline import Pipeline
from ..pipeline.clock import Activity, Span
from ..pipeline.peak_memory import peak_memory
from ..schedule import Action, Schedule
from ..schedule.render import svg
from ..transport.base import gather_objects
from .console import Screen
from .metrics import finite, loss_said
from .plots import draw_losses
from .trace import TraceError, chrome_trace, measured_timeline, steady_window
from .utilisation import UtilisationReport

NUM_LAST_ACTIONS = 40
"""Number of spans that a stage writes when the run fails."""


def gather_stages(pipeline: Pipeline, delays: list[int], config: Config) -> list[dict[str, Any]]:
    """Gathers the facts that every stage knows about itself. All stages receive all of them."""
    transport, schedule, clock = pipeline.transport, pipeline.schedule, pipeline.clock
    hashes = {
        name: hashlib.sha256(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
        for name, weight in pipeline.weights().items()
        if name not in pipeline.tied or pipeline.tied[name].name == name  # count a tied weight once
    }
    num_early = schedule.sync_start_steps + schedule.delay(transport.stage)
    late = delays[num_early:]  # the first updates have less delay
    own = {
        "utilisation": clock.split().utilisation,
        "time_split": clock.split().shares()._asdict(),
        "executor": clock.executor_seconds_per_action,
        "background_update": clock.background_seconds / clock.num_background_updates
        if clock.num_background_updates
        else 0.0,
        "delays": sorted(set(late or delays)),
        "versions": pipeline.peak_versions,
        "in_flight": pipeline.peak_in_flight,
        "memory": peak_memory(torch.device(config.train.device)),
        "parameters": hashes,
        "started_at": clock.started_at,
        "spans": _latest(list(clock.spans), config.run.trace_actions),
    }
    parts = gather_objects(transport, json.dumps(own).encode(), lambda: "the other stages' summaries")
    return [json.loads(part) for part in parts]


def _latest(spans: list[Span], num_actions: int) -> list[tuple[Any, ...]]:
    """Returns the latest `num_actions` actions, and the waits between them."""
    places = [i for i, span in enumerate(spans) if span.activity.is_compute]
    first = places[-num_actions] if len(places) >= num_actions > 0 else 0 if num_actions else len(spans)
    return [(str(span.action), int(span.activity), *span[2:]) for span in spans[first:]]


def summarise(
    config: Config,
    pipeline: Pipeline,
    stages: list[dict[str, Any]],
    utilisation: UtilisationReport | None,
    *,
    num_parameters: int,
    layers_per_stage: list[int],
    tokens_per_step: int,
    tokenizer: str,
    sources: list[dict[str, Any]],
    losses: list[float],
    val_loss: float | None,
    val_bits_per_byte: float | None,
    val_losses: dict[str, float],
    first_step: int,
    seconds: float,
    earlier_seconds: float,
) -> dict[str, Any]:
    """Returns the content of summary.json.

    sources: name, weight and number of tokens of every source, and how many times the run has read it. val_losses:
    validation loss by source, if the run evaluates each. first_step, seconds: first step and duration of the training
    since this process started, in all its layouts.
    earlier_seconds: duration of the steps before, if the run was resumed.
    """
    end = pipeline.end
    parameters = dict(sorted(item for stage in stages for item in stage["parameters"].items()))
    checksum = hashlib.sha256("".join(f"{name}={digest};" for name, digest in parameters.items()).encode()).hexdigest()
    utilisations = [stage["utilisation"] for stage in stages]
    # If a run was killed after its last update, the resumed run makes no update and writes only this summary.
    delays = [delay for stage in stages for delay in stage["delays"]] or [0]
    tokens, whole_seconds = tokens_per_step * end, earlier_seconds + seconds
    tail = losses[-max(1, len(losses) // 20) :]
    return {
        "schedule": config.pipeline.schedule,
        "stages": config.pipeline.stages,
        "replicas": config.pipeline.replicas,
        "layers_per_stage": layers_per_stage,
        "microbatches": config.pipeline.microbatches,
        "steps": end,
        "resumed_at": first_step or None,
        "parameters": num_parameters,
        "tokens": tokens,
        "sources": sources,
        "first_loss": losses[0] if losses else None,
        "last_loss": statistics.fmean(tail) if tail else None,
        "val_loss": val_loss,
        "val_bits_per_byte": val_bits_per_byte,
        **({"val_losses": val_losses} if val_losses else {}),
        "seconds": whole_seconds,
        "tokens_per_second": tokens / whole_seconds,
        "since_start": {"tokens": tokens_per_step * (end - first_step), "seconds": seconds},
        "utilisation": {"per_stage": utilisations, "mean": statistics.fmean(utilisations)},
        "expected_utilisation": utilisation
        and {"per_stage": utilisation.expected_by_stage, "mean": utilisation.expected},
        "time_split": [stage["time_split"] for stage in stages],
        "background_update_seconds": [stage["background_update"] for stage in stages],
        "executor_microseconds_per_action": [1e6 * stage["executor"][0] for stage in stages],
        "executor_cpu_microseconds_per_action": [1e6 * stage["executor"][1] for stage in stages],
        "delay": {"min": min(delays), "max": max(delays)},
        "live_weight_versions": max(stage["versions"] for stage in stages),
        "microbatches_in_flight": [stage["in_flight"] for stage in stages],
        "peak_memory_bytes": [stage["memory"] for stage in stages],
        "parameter_checksum": checksum,
        "tokenizer": tokenizer,
        "torch": torch.__version__,
    }


def leave_behind(
    folder: Path,
    schedule: Schedule,
    summary: dict[str, Any],
    stages: list[dict[str, Any]],
    utilisation: UtilisationReport | None,
    screen: Screen,
) -> None:
    """Writes the files of a run that has ended, and prints its last lines.

    Raises an OSError if summary.json cannot be written. The run is complete without the other files.
    """
    write_file(folder / "summary.json", [(json.dumps(finite(summary), indent=2) + "\n").encode()])
    try:
        _leave_drawings(folder, schedule, stages)
    except OSError as error:
        screen.print(f"{error.filename} cannot be written ({reason(error)}): the run is complete without it")
    per_stage = ", ".join("-" if math.isnan(u) else f"{u:.1%}" for u in summary["utilisation"]["per_stage"])
    late = summary["delay"]
    lines = [
        *_loss_line(summary),
        f"{summary['tokens']:,} tokens in {summary['seconds']:.1f} s: {summary['tokens_per_second']:,.0f} tokens/s",
        f"by stage, since the pipeline filled: {per_stage} busy",
        *([str(utilisation)] if utilisation else []),
        f"gradients {lateness(late['min'], late['max'])}; at most {summary['live_weight_versions']} weight versions",
        f"{folder}: {', '.join(sorted(path.name + '/' * path.is_dir() for path in folder.iterdir()))}",
        f"to look at it: slipstream report {folder}",
    ]
    screen.print("\n".join(lines))


def _leave_drawings(folder: Path, schedule: Schedule, stages: list[dict[str, Any]]) -> None:
    spans = [
        [Span(Action.parse(text), Activity(activity), *rest) for text, activity, *rest in stage["spans"]]
        for stage in stages
    ]
    trace = chrome_trace(schedule, spans, [stage["started_at"] for stage in stages])
    write_file(folder / "trace.json", [json.dumps(trace).encode()])
    with suppress(TraceError):  # a short run has no steady state
        timeline = measured_timeline(trace, steady_window(trace))
        title = f"{folder.name}: {schedule.name}, measured, in milliseconds"
        write_file(folder / "timeline.svg", [svg(timeline, title).encode()])
    draw_losses(folder)


def lateness(least: int, most: int) -> str:
    if most == 0:
        return "without delay"
    return f"{least if least == most else f'{least} to {most}'} update{'s' * (most > 1)} late"


def leave_actions(folder: Path, pipeline: Pipeline, error: Exception) -> None:
    """Writes the last actions of this stage to a file. They add detail to the one error sentence that all stages
    share."""
    transport = pipeline.transport
    replica = f".replica-{transport.replica}" if transport.num_replicas > 1 else ""
    spans = sorted(pipeline.clock.latest, key=lambda span: span.end)[-NUM_LAST_ACTIONS:]
    lines = [
        f"stage {transport.stage} of replica {transport.replica}, process {os.getpid()}",
        f"{type(error).__name__}: {error}",
        f"updates made: {pipeline.num_updates}; at: {pipeline.current_action}",
        "",
        "   start s       end s  activity          action",
    ]
    for span in spans:
        beside = " (in the background)" if span.in_background else ""
        activity = span.activity.name.lower()
        lines.append(f"{span.start:10.4f}  {span.end:10.4f}  {activity:<16}  {span.action}{beside}")
    write_file(folder / f"stage-{transport.stage}{replica}.actions.txt", [("\n".join(lines) + "\n").encode()])


def _loss_line(summary: dict[str, Any]) -> list[str]:
    first, last, loss = summary["first_loss"], summary["last_loss"], summary["val_loss"]
    if first is None:  # all metrics of the run are lost
        return []
    held_out = "" if loss is None else f"; validation loss {loss_said(loss, summary['val_bits_per_byte'])}"
    return [f"loss {first:.4f} at first, {last:.4f} over the last twentieth of the steps{held_out}"]
