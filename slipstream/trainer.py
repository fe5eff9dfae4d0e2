"""Runs what a configuration comes to: `slipstream train`.

The trainer is a user of `Pipeline` and `launch` like any other.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import Store
from .config import Config, ConfigError, schedule_of, to_toml, validate, with_model
from .defaults import leaves_rest_to_adamw, may_share_a_gpu, num_gpus_wanted, settled
from .devices import flops_of
from .loss import decoder_and_loss
from .metrics import Metrics, Screen
from .model import flops_per_token, initialise, num_parameters
from .parts import Parts, check, recomputed_layers
from .pipeline import (
    Crew,
    Pipeline,
    PipelineError,
    Requests,
    StageState,
    StepReport,
    Transport,
    launch_crew,
    under_torchrun,
)
from .reshaping import Commands, Reshaping, check_moments
from .resuming import changes, corpus_facts, keep_configuration
from .saving import SIGNALS, Saver, Wishes, checkpoint_store, newest, state_of, sync_start_steps
from .shape import COMMAND_NAME, Shape, moments, next_moment, num_processes, shape_at
from .status import status_file
from .summary import gather_stages, lateness, leave_actions, leave_behind, summarise

MAX_STAGES_PER_CORE = 32
"""As a process, each has torch loaded, and a few hundred megabytes."""


def run_folder(config: Config) -> Path:
    return Path(config.run.folder) / config.run.name


def train(config: Config) -> None:
    """Checks, makes the run's folder, starts the stages. Under torchrun, every rank calls this."""
    torch.set_num_threads(1)  # this process computes nothing, and one that never had a second thread is safe to fork
    is_first = int(os.environ.get("RANK", "0")) == 0
    validate(config)
    notes = [*_unused_rate(config), *_unused_gpus(config)]
    config = settled(config)
    folder = run_folder(config)
    if is_first:
        _check_folder(folder, config.run.overwrite, config.checkpoint.resume)
    parts = check(config)
    config = with_model(config, parts.model)
    check_moments(config)
    _check_processes(config)
    store = checkpoint_store(config, folder)
    # One process decides: others might look while this one puts away what a crash has left, and see something else.
    found = newest(store, config, parts.model, Screen().print) if config.checkpoint.resume and is_first else None
    is_over = found is not None and found.step == config.train.steps and _has_summary(folder, found.step)
    if is_over:
        Screen().print(f"{folder} has made its {config.train.steps} steps: raise train.steps to go on")
        if not under_torchrun():  # whose other processes have yet to hear of it
            return
    elif is_first:
        changed = [] if found is None else list(changes(found, config, parts))
        if found is not None and changed:
            keep_configuration(folder, found.step)
        _make_folder(folder, config, parts, keep=config.checkpoint.resume)
        store.clean()
        if found is not None:
            Screen().print("\n".join([f"going on from the checkpoint of step {found.step}", *changed]))
        elif config.checkpoint.resume:
            Screen().print(f"{folder} has no checkpoint to go on from: beginning with step 1")
        for note in notes:
            Screen().print(note)
        replicas = f" in each of {config.pipeline.replicas} replicas" if config.pipeline.replicas > 1 else ""
        Screen().print(
            f"{num_parameters(parts.model):,} parameters on {config.pipeline.stages} stages of "
            f"{parts.layers_per_stage} layers{replicas}: an embedding, {parts.model.num_layers} blocks, a head; "
            f"writing {folder}\n{_method(config)}\n{_reading(config, parts)}"
        )
    is_threaded = config.pipeline.transport == "thread"
    # Only a main thread is told of signals.
    wishes = Wishes(config.checkpoint.every_minutes) if is_threaded else None
    beginning = Beginning(secrets.token_hex(8), None if found is None else found.step, is_over)
    shape = Shape.of(config)
    is_fixed = num_processes(config) == shape.size and not moments(config)
    try:
        launch_crew(
            partial(train_process, config=config, beginning=beginning, wishes=wishes),
            num_processes(config),
            mesh=shape.mesh(config) if is_fixed else None,
            threads=is_threaded,
            device=config.train.device,
            timeout_seconds=config.pipeline.timeout_seconds,
            shared_memory=config.pipeline.shared_memory,
            backend=config.pipeline.backend,
            share_gpu=config.pipeline.share_gpu,
            start_method="fork" if sys.platform == "linux" and config.train.device == "cpu" else None,
            forwarded=SIGNALS,
        )
    finally:
        if wishes is not None:
            wishes.close()
    if wishes is not None and wishes.was_interrupted:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class Beginning:
    """What all processes of a launch must see alike."""

    attempt: str | None = None
    """See `Store`."""
    resumed_at: int | None = None
    """The step of the checkpoint that the run goes on from."""
    is_over: bool = False
    """There is nothing left to do."""

    def as_first(self, crew: Crew) -> Beginning:
        """The first process's. torchrun's environment would not do: its nodes count their restarts each for itself."""
        return Beginning(**json.loads(crew.as_first("beginning", json.dumps(asdict(self)))))


def _method(config: Config) -> str:
    """Schedule, optimizer and precision, in words."""
    schedule, optimizer, train = schedule_of(config), config.optimizer, config.train
    delays = [schedule.delay(stage) for stage in range(schedule.num_stages)]
    late = "on weights that change meanwhile" if schedule.traits.drifts else lateness(min(delays), max(delays))
    feedback = f", error feedback {optimizer.error_feedback:g}" if optimizer.error_feedback and max(delays) else ""
    rest = ", adamw for the rest" if leaves_rest_to_adamw(optimizer) else ""
    dtype = train.compute_dtype or train.dtype
    masters = f" with masters in {train.dtype}" if dtype != train.dtype else ""
    return f"{schedule.name}, gradients {late}; {optimizer.name}{rest}{feedback}; {dtype}{masters} on {train.device}"


def _reading(config: Config, parts: Parts) -> str:
    """How much text, and how often: a run that goes round a small corpus many times learns it by heart."""
    per_step, corpus = parts.batches.num_tokens(0), len(parts.batches.tokens)
    times = per_step * config.train.steps / corpus
    read = f"{times:.1%} of the {corpus:,} tokens" if times < 1 else f"the {corpus:,} tokens {times:,.1f} times"
    replicas = f"{config.pipeline.replicas} replicas x " if config.pipeline.replicas > 1 else ""
    return (
        f"{per_step:,} tokens a step: {replicas}{config.pipeline.microbatches} microbatches x "
        f"{config.train.microbatch_size} sequences x {parts.model.sequence_length}, of a vocabulary of "
        f"{parts.model.vocab_size:,}; the run reads {read}"
    )


def _unused_rate(config: Config) -> Iterator[str]:
    rate, section = config.optimizer.adamw_learning_rate, config.optimizer
    if rate is not None and not leaves_rest_to_adamw(section):
        yield f"optimizer.adamw_learning_rate = {rate:g} is not used: {section.name} takes all parameters by itself"


def _unused_gpus(config: Config) -> Iterator[str]:
    if config.train.device == "auto" and settled(config).train.device == "cpu" and torch.cuda.is_available():
        yield (
            f"training on the CPU: {num_gpus_wanted(config)} stages want a GPU each, and there are "
            f"{torch.cuda.device_count()}; pipeline.transport = 'thread' puts them on one"
        )


def _check_processes(config: Config) -> None:
    """A slip in a number of replicas must not take the machine down."""
    most, is_threaded = MAX_STAGES_PER_CORE * (os.cpu_count() or 1), config.pipeline.transport == "thread"
    if (is_threaded or not under_torchrun()) and (count := num_processes(config)) > most:
        raise ConfigError(
            f"pipeline.stages x pipeline.replicas (or pipeline.reshape, pipeline.processes) come to {count} "
            f"{'threads' if is_threaded else 'processes'}, more than the {most} that this machine's cores are trusted "
            "with: use fewer, or torchrun on more machines"
        )


def _has_summary(folder: Path, step: int) -> bool:
    """A run may be killed between its last checkpoint and its end, and owe a summary."""
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["steps"] == step
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_folder(folder: Path, overwrite: bool, resumes: bool) -> None:
    try:
        if not (folder.exists() or folder.is_symlink()):
            return
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):  # of a run that was killed there
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


def _make_folder(folder: Path, config: Config, parts: Parts, keep: bool) -> None:
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        if folder.exists() and not keep:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (COMMAND_NAME, "summary.json"):  # of an earlier part of the run
            (folder / stale).unlink(missing_ok=True)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        if parts.tokenizer_json is not None:
            (folder / "tokenizer.json").write_bytes(parts.tokenizer_json)
    except OSError as error:
        for parent in made:  # a refusal leaves nothing behind
            with suppress(OSError):
                parent.rmdir()
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.folder = {str(folder.parent)!r} cannot take the folder {folder.name!r} ({error.strerror}): use another"
    )


def train_process(crew: Crew, config: Config, beginning: Beginning, wishes: Wishes | None = None) -> None:
    """A run in whatever shapes it takes on, as one of its processes or threads sees it."""
    beginning = beginning.as_first(crew)
    if beginning.is_over:
        return
    store = checkpoint_store(config, run_folder(config), beginning.attempt)
    found = None if beginning.resumed_at is None else store.open(beginning.resumed_at, verify=False)
    run = Run(
        config,
        store,
        wishes or Wishes(config.checkpoint.every_minutes if crew.rank == 0 else 0.0),
        Commands(config, run_folder(config), Screen().print) if crew.rank == 0 else None,
        config.pipeline.sync_start_steps if found is None else sync_start_steps(found, schedule_of(config)),
        beginning.resumed_at or 0,
    )
    reshaping = Reshaping(crew, config, run.commands)
    shape = shape_at(config, beginning.resumed_at or 0)
    start = None if found is None else state_of(found)
    parts = check(shape.applied(config))
    transport = crew.take_places(shape.mesh(config))
    pipeline = None if transport is None else run.make_pipeline(transport, shape, parts, start)
    while True:
        state = None if pipeline is None else train_stage(run, shape, parts, pipeline)
        turn = reshaping.next_turn(shape, parts, state)
        if turn is None:
            break
        del pipeline  # its memory goes with its state, once that has moved on
        shape, parts, moved = turn.shape, turn.parts, reshaping.move(turn, state)
        transport = crew.take_places(shape.mesh(config), moved.order)
        pipeline = None if transport is None else run.make_pipeline(transport, shape, parts, moved.state)
        del moved, state
        run.reshapes.append(reshaping.settle(turn))
        gc.collect()  # the old pipeline refers to itself
    run.finish_writing()


@dataclass
class Run:
    """What stays of a run, in one of its processes, when its shape changes."""

    config: Config
    store: Store
    wishes: Wishes
    commands: Commands | None
    """Of the first process."""
    sync_start_steps: int
    first_step: int
    """Where it was taken up."""
    started: float = field(default_factory=time.perf_counter)
    reshapes: list[dict[str, Any]] = field(default_factory=list)
    savers: list[Saver] = field(default_factory=list)
    """Of all shapes: one may still be writing when the next is taken on."""

    def requests(self) -> Requests:
        return self.wishes()._replace(
            busy=any(saver.is_busy for saver in self.savers),
            pause=self.commands is not None and self.commands.look(),
        )

    def make_pipeline(self, transport: Transport, shape: Shape, parts: Parts, start: StageState | None) -> Pipeline:
        config = shape.applied(self.config)
        if config.train.device == "cpu" and config.pipeline.transport == "process":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // shape.size))
        following = next_moment(self.config, 0 if start is None else start.step)
        until = None if following is None else following.step
        return make_pipeline(transport, config, parts, self.requests, start, self.sync_start_steps, until)

    def finish_writing(self) -> None:
        for saver in self.savers:
            saver.close()


def train_stage(run: Run, shape: Shape, parts: Parts, pipeline: Pipeline) -> StageState | None:
    """One stage, for as long as the run has this shape. Returns the state to go on from, or None when it is over."""
    transport, config = pipeline.transport, shape.applied(run.config)
    device = torch.device(config.train.device)
    pipeline.executor.clock.watcher = status_file(transport.stage, transport.replica)
    is_last = transport.stage == transport.num_stages - 1 and transport.replica == 0  # which speaks for all
    tokens_per_step = parts.batches.num_tokens(0)
    screen, folder = Screen(), run_folder(config)
    metrics = None
    if is_last:
        dtype = getattr(torch, config.train.compute_dtype or config.train.dtype)
        flops = flops_of(device, 1 if may_share_a_gpu(config) else shape.size, dtype)
        peak = None if flops is None else flops / flops_per_token(parts.model)
        metrics = Metrics(folder, pipeline.schedule, tokens_per_step, config.run.log_every_steps, screen, peak)
    corpus = corpus_facts(parts.batches.tokens)
    saver = Saver(run.config, parts.model, transport, pipeline, run.store, screen.print, corpus)
    run.savers.append(saver)
    delays: list[int] = []
    losses = [row["loss"] for row in metrics.earlier if row.get("loss") is not None] if metrics else []
    val_loss: float | None = None
    try:
        for report in pipeline.run():
            if isinstance(report, StepReport):
                delays.append(report.delay)
                losses.append(report.loss)
                if metrics:  # before the step is saved: a run that goes on from there does not say it again
                    metrics.step(report, parts.learning_rates(report.step))
                saver.after(report)
            else:
                val_loss = report.loss
                if metrics:
                    metrics.evaluation(report)
    except Exception as error:
        with suppress(OSError):
            leave_actions(folder, transport, pipeline, error)
        raise
    finally:
        seconds = metrics.close() if metrics else 0.0
    was_stopped = pipeline.executor.end != config.train.steps and pipeline.executor.stop_was_asked
    if pipeline.executor.end != config.train.steps and not was_stopped:
        saver.retire()
        return pipeline.state()
    saver.finish(was_stopped)
    stages = gather_stages(transport, pipeline, delays, config)
    if metrics:
        if run.reshapes:  # the metrics are of the last shape
            seconds = time.perf_counter() - run.started
        before = [row.get("seconds") for row in metrics.earlier if row["step"] <= run.first_step]
        earlier = sum(each for each in before if isinstance(each, (int, float)))
        summary = summarise(
            config, parts, stages, losses, val_loss, run.first_step, seconds, earlier, metrics.expectation, pipeline
        )
        summary |= {"reshapes": run.reshapes, "config": asdict(run.config)}
        leave_behind(folder, pipeline.schedule, summary, stages, metrics.expectation, screen)
    if was_stopped:
        _say_where_it_stopped(transport, run.store, pipeline.versions.newest, device, screen.print if metrics else None)
    return None


def _say_where_it_stopped(
    transport: Transport, store: Store, step: int, device: torch.device, say: Callable[[str], None] | None
) -> None:
    """say: of the stage that speaks for all. To leave with success without having saved would be a lie."""
    if transport.num_replicas > 1:  # of this replica, all have finished writing: their summaries are here
        transport.add_replicas([torch.zeros(1, device=device)]).wait(lambda: "the other replicas' last checkpoint")
    if say is None:
        return
    steps = store.steps()
    if step not in steps:
        newest_step = f"the newest is of step {steps[-1]}" if steps else "there is no other"
        raise PipelineError(transport.fail(f"stopped after step {step}, which has no checkpoint: {newest_step}"))
    say(f"stopped after step {step}, and saved: go on with --checkpoint.resume")


def make_pipeline(
    transport: Transport,
    config: Config,
    parts: Parts,
    requests: Callable[[], Requests] | None = None,
    start: StageState | None = None,
    sync_start_steps: int | None = None,
    until: int | None = None,
) -> Pipeline:
    """One stage of what a configuration comes to, with its weights. Of the other stages' it never holds any. start: a
    state to go on from. sync_start_steps: None, as configured. until: steps after which to leave off."""
    device = torch.device(config.train.device)
    with torch.device("meta"):
        model, loss = decoder_and_loss(parts.model, config.train.loss_chunk_tokens)

    def materialise(layers: nn.Sequential) -> None:
        layers.to(getattr(torch, config.train.dtype))
        layers.to_empty(device=device)
        initialise(layers, parts.model, config.train.seed if start is None else None)

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
        sync_start_steps=config.pipeline.sync_start_steps if sync_start_steps is None else sync_start_steps,
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
        requests=requests,
        start=start,
        until=until,
        device=device,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
