"""Runs one process of a run: builds its stage, trains it, saves it, and reports."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..checkpoint import Store
from ..checkpoint.files import reason
from ..checkpoint.reading import state_of
from ..checkpoint.stage_state import StageState
from ..config.defaults import may_share_a_gpu, precision_of
from ..config.layout import layout_at, next_layout_change
from ..config.models import recomputed_layers
from ..config.rules import profiled_steps, schedule_of, trains_all
from ..config.schema import Config
from ..data import Batches, Source, codec_of_corpus, text_size
from ..errors import PipelineError
from ..model.spec import on_meta
from ..observe.console import Screen
from ..observe.devices import flops_of
from ..observe.metrics import Metrics, writes_metrics
from ..observe.status_file import status_file
from ..observe.summary import gather_stages, leave_actions, leave_behind, summarise
from ..observe.torch_profile import TorchProfile
from ..pipeline import Evaluation, EvaluationPart, EvaluationReport, Pipeline, Requests, StepReport
from ..pipeline.checkpoints import StageWriter
from ..pipeline.partition import tied_names
from ..pipeline.weight_versions import cast_frozen
from ..transport.base import Transport
from ..transport.world import World
from .build import Components
from .checkpointing import Saver, SignalRequests, checkpoint_store
from .preflight import configuration_text, difference
from .reshape import Commands, Phase, Reshaping
from .resume import corpus_facts, sync_start_steps
from .run_folder import run_folder


@dataclass(frozen=True)
class LaunchFacts:
    """Facts that all processes of a launch must agree on."""

    attempt: str
    """Identifier of this launch. See `Store`."""
    resumed_at: int | None
    """Step of the checkpoint from which the run resumes. None means that the run starts from the beginning."""
    is_over: bool
    """Whether the run is already finished, so that nothing is left to do."""


def train_process(world: World, config: Config, facts: LaunchFacts, signals: SignalRequests | None = None) -> bool:
    """Trains in one process (or thread) of a run, through all layouts of the run. Returns whether SIGINT stopped it.

    signals: requests shared by all threads. None means that this process handles signals itself.
    """
    # The environment of torchrun could not tell these facts: every node counts its restarts separately.
    facts = LaunchFacts(**json.loads(world.as_first("facts", json.dumps(asdict(facts)))))
    own = configuration_text(config)
    if (message := difference(world.as_first("configuration", own), own, world.rank)) is not None:
        raise PipelineError(world.fail(message))
    if facts.is_over:
        return False
    store = checkpoint_store(config, run_folder(config), facts.attempt)
    found = None if facts.resumed_at is None else store.open(facts.resumed_at, verify=False)
    run = Run(
        config,
        store,
        signals or SignalRequests(config.checkpoint.every_minutes if world.rank == 0 else 0.0),
        Commands(config, run_folder(config), Screen().print) if world.rank == 0 else None,
        config.pipeline.sync_start_steps if found is None else sync_start_steps(found, schedule_of(config)),
        facts.resumed_at or 0,
    )
    reshaping = Reshaping(world, config, run.commands)
    start = None if found is None else state_of(found)
    for phase in reshaping.phases(layout_at(config, run.first_step), start):
        pipeline = None if phase.transport is None else run.make_pipeline(phase)
        run.reshapes += reshaping.settle(phase)
        phase.end = None if pipeline is None else train_stage(run, phase, pipeline)
        del pipeline  # frees its memory as soon as its state has been moved
    for writer in run.writers:
        writer.wait()
    return run.signals.was_interrupted


@dataclass
class Run:
    """The state of a run, in one of its processes, that remains when the layout changes."""

    config: Config
    store: Store
    signals: SignalRequests
    commands: Commands | None
    """Requests for another layout. None in all processes except the first."""
    sync_start_steps: int
    first_step: int
    """Step at which the run started or resumed."""
    started: float = field(default_factory=time.perf_counter)
    reshapes: list[dict[str, Any]] = field(default_factory=list)
    writers: list[StageWriter] = field(default_factory=list)
    """Writers of all layouts so far. That of a layout may still be writing when the next layout starts."""

    def requests(self) -> Requests:
        return self.signals()._replace(
            busy=any(writer.is_busy for writer in self.writers),
            pause=self.commands is not None and self.commands.look(),
        )

    def make_pipeline(self, phase: Phase) -> Pipeline:
        config, start = phase.layout.applied(self.config), phase.start
        phase.start = None  # the phase must not keep its tensors alive
        assert phase.transport is not None, "an idle process has no pipeline"
        if config.train.device == "cpu" and config.pipeline.transport == "process":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // phase.layout.size))
        following = next_layout_change(self.config, 0 if start is None else start.step)
        until = None if following is None else following.step
        return make_pipeline(
            phase.transport, config, phase.components, self.requests, start, self.sync_start_steps, until
        )


def train_stage(run: Run, phase: Phase, pipeline: Pipeline) -> StageState | None:
    """Trains one stage as long as the run has this layout.

    Returns the state from which the next layout continues, or None if the run is over.
    """
    transport, components, config = pipeline.transport, phase.components, phase.layout.applied(run.config)
    device = torch.device(config.train.device)
    pipeline.clock.watcher = status_file(transport.stage, transport.replica)
    tokens_per_step = components.batches.num_tokens(0)
    screen, folder = Screen(), run_folder(config)
    is_writing, text, peak = writes_metrics(transport), None, None
    if is_writing:
        if components.validation is not None:
            text = text_size(components.validation, components.tokenizer, components.tokenizer_json)
        flops = flops_of(device, 1 if may_share_a_gpu(config) else phase.layout.size, precision_of(config).compute)
        peak = None if flops is None else flops / components.model.flops_per_token()
    metrics = Metrics(
        pipeline,
        folder,
        tokens_per_step=tokens_per_step,
        log_every_steps=config.run.log_every_steps,
        sinks=config.run.sinks,
        config=asdict(run.config),
        peak_tokens_per_second=peak,
        bits_per_byte=None if text is None else text.bits_per_byte,
        screen=screen,
    )
    saver = Saver(run.config, components.model, pipeline, run.store, screen.print, corpus_facts(components.batches))
    run.writers.append(saver.writer)
    delays: list[int] = []
    losses = [row["loss"] for row in metrics.earlier if row.get("loss") is not None]
    val_loss: float | None = None
    details: dict[str, Any] = {}
    traced = folder / "profile" / f"stage-{transport.stage}.replica-{transport.replica}.json"
    profile = TorchProfile(traced, profiled_steps(run.config), screen.print)
    try:
        profile.after(pipeline.num_updates)
        for report in pipeline.run():
            if isinstance(report, StepReport):
                delays.append(report.delay)
                losses.append(report.loss)
                # Before the step is saved: a run that resumes after this step does not report it again.
                metrics.log(report, learning_rates=components.learning_rates(report.step))
                saver.after(report)
                profile.after(report.step + 1)
            else:
                val_loss, details = report.loss, _details(config, components, report)
                metrics.log(report, **details)
    except Exception as error:
        with suppress(OSError):
            leave_actions(folder, pipeline, error)
        raise
    finally:
        seconds = metrics.close()
        profile.close()
    if pipeline.end != config.train.steps and not pipeline.was_stopped:
        saver.writer.retire()
        if saver.is_owed:
            run.signals.ask_to_save()  # in the next layout
        return pipeline.state()
    saver.finish(pipeline)
    stages = gather_stages(pipeline, delays, config)
    if is_writing:
        if run.reshapes:  # the metrics cover the last layout only
            seconds = time.perf_counter() - run.started
        before = [row.get("seconds") for row in metrics.earlier if row["step"] <= run.first_step]
        earlier = sum(each for each in before if isinstance(each, (int, float)))
        summary = summarise(
            config,
            pipeline,
            stages,
            metrics.utilisation,
            num_parameters=components.model.num_parameters(),
            layers_per_stage=components.layers_per_stage,
            tokens_per_step=tokens_per_step,
            tokenizer=components.tokenizer,
            sources=_sources(config, components.batches, pipeline.end),
            losses=losses,
            val_loss=val_loss,
            val_bits_per_byte=None if text is None or val_loss is None else text.bits_per_byte(val_loss),
            val_losses=details.get("val_losses", {}),
            first_step=run.first_step,
            seconds=seconds,
            earlier_seconds=earlier,
        )
        summary |= {"reshapes": run.reshapes, "config": asdict(run.config)}
        try:
            leave_behind(folder, pipeline.schedule, summary, stages, metrics.utilisation, screen)
        except OSError as error:
            said = f"{error.filename} cannot be written ({reason(error)}): make room for it, and resume the run with "
            raise PipelineError(transport.fail(f"{said}--checkpoint.resume")) from error
    if pipeline.was_stopped or config.checkpoint.at_end:
        _check_saved(saver.writer, run.store, pipeline, device, screen.print if is_writing else None)
    return None


def _details(config: Config, components: Components, report: EvaluationReport) -> dict[str, Any]:
    """Returns the losses of an evaluation by source and its samples as text, if there are any."""
    details: dict[str, Any] = {}
    if report.part_losses:
        assert components.validation is not None
        names = [part.name for part in components.validation.parts]
        details["val_losses"] = dict(zip(names, report.part_losses, strict=True))
    if report.samples:
        codec = codec_of_corpus(components.tokenizer, components.tokenizer_json)
        details["samples"] = [
            {"prompt": prompt, "text": codec.decode(ids)}
            for prompt, ids in zip(config.evaluation.prompts, report.samples, strict=True)
        ]
    return details


def _check_saved(
    writer: StageWriter, store: Store, pipeline: Pipeline, device: torch.device, say: Callable[[str], None] | None
) -> None:
    """Reports the step after which the run stopped, if it was stopped.

    Raises a PipelineError if the last step has no checkpoint, because a process must not exit with success when nothing
    was saved. say: prints the report. None on all stages except the one that reports for all.
    """
    transport = pipeline.transport
    if transport.num_replicas > 1:  # in this replica all have finished writing: their summaries have arrived
        transport.add_replicas([torch.zeros(1, device=device)]).wait(lambda: "the other replicas' last checkpoint")
    if say is None:
        return
    step, steps = pipeline.num_updates, store.steps()
    if writer.has_failed and step in steps:  # a damaged one of the run before
        steps.remove(step)
    if step not in steps:
        newest_step = f"the newest is of step {steps[-1]}, for --checkpoint.resume" if steps else "there is no other"
        what = "stopped" if pipeline.was_stopped else "ended"
        raise PipelineError(transport.fail(f"{what} after step {step}, which has no checkpoint: {newest_step}"))
    if pipeline.was_stopped:
        say(f"stopped after step {step}, and saved: resume with --checkpoint.resume")


def make_pipeline(
    transport: Transport,
    config: Config,
    components: Components,
    requests: Callable[[], Requests] | None = None,
    start: StageState | None = None,
    sync_start_steps: int | None = None,
    until: int | None = None,
) -> Pipeline:
    """Builds the pipeline of one stage with its weights. The weights of other stages are never allocated.

    start: state to continue from. sync_start_steps: None means the configured value. until: number of steps after which
    to stop.
    """
    device = torch.device(config.train.device)
    with on_meta():
        model, loss = components.model.layers_and_loss(config.train.loss_chunk_tokens)

    def materialise(layers: nn.Sequential) -> None:
        layers.to(getattr(torch, config.train.dtype))
        cast_frozen(layers, precision_of(config).compute)
        tied = tied_names(layers)
        layers.to_empty(device=device)  # a shared parameter becomes one for each of its owners
        for first, *others in tied:
            for other in others:
                place, _, name = other.rpartition(".")
                setattr(layers.get_submodule(place), name, layers.get_parameter(first))
        # A state has no frozen weights. They are made as at the start.
        is_whole = start is not None and trains_all(config)
        components.model.initialise(layers, None if is_whole else config.train.seed)

    return Pipeline(
        transport,
        model,
        data=components.batches,
        loss=loss,
        optimizer=components.groups,
        num_microbatches=config.pipeline.microbatches,
        num_steps=config.train.steps,
        schedule=config.pipeline.schedule,
        depth=config.pipeline.depth,
        sync_start_steps=config.pipeline.sync_start_steps if sync_start_steps is None else sync_start_steps,
        learning_rate=components.learning_rate,
        loss_scale=lambda step: 1 / components.batches.num_tokens(step),
        evaluation=_evaluation(config, components),
        skip_non_finite=config.train.non_finite == "skip",
        track_alignment=config.train.track_alignment,
        layers_per_stage=components.layers_per_stage,
        precision=precision_of(config),
        shard_optimizer=config.optimizer.sharded,
        recompute=recomputed_layers(config, components.model),
        compile=config.train.compile,
        prepare=materialise,
        requests=requests,
        start=start,
        until=until,
        device=device,
    )


def _sources(config: Config, batches: Batches, num_steps: int) -> list[dict[str, Any]]:
    """Returns what a run has read of every source. Without weights, all sources count as one."""
    everything = Source(", ".join(config.data.sources), 1.0, len(batches.tokens))
    return [
        {"name": source.name, "weight": source.weight, "tokens": source.num_tokens, "epochs": epochs}
        for source, epochs in zip(batches.sources or (everything,), batches.epochs(num_steps), strict=True)
    ]


def _evaluation(config: Config, components: Components) -> Evaluation | None:
    validation = components.validation
    if validation is None:
        return None

    def scale(indices: range) -> float:
        return 1 / sum(map(validation.num_tokens, indices))

    parts = map(validation.indices, range(len(validation.parts)))
    return Evaluation(
        validation,
        len(validation),
        config.evaluation.every_steps,
        scale(range(len(validation))),
        components.samples,
        tuple(EvaluationPart(len(part), scale(part)) for part in parts) if len(validation.parts) > 1 else (),
    )
