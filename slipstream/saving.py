"""When a run saves itself, what it saves, and how it goes on from there.

    store = checkpoint_store(config, folder, attempt)
    found = newest(store, config, model, say)                the checkpoint to go on from, if there is one
    saver = Saver(config, transport, store, wishes, say)     in every process, beside its stage

A stage is saved after its own update c, while the others are still before or already past theirs: nothing is drained. A
checkpoint is complete when all parts of c are there.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, Part, Store, Writer
from .config import Config, ConfigError
from .model import ModelConfig, decoder
from .pipeline import Pipeline, Requests, StageState, StateError, StepReport, Transport
from .pipeline.state import check_names, tensor_names
from .schedule import Schedule

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""To save and leave with success; to save and go on."""


class Wishes:
    """What this process would like all of them to do: what it was told by a signal, and what its clock says."""

    def __init__(self, every_minutes: float) -> None:
        self._seconds = 60 * every_minutes
        self._saved_at = time.monotonic()
        self._save = self._stop = False
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._save = True
        self._stop = self._stop or number == signal.SIGTERM

    def __call__(self) -> Requests:
        is_due = 0 < self._seconds <= time.monotonic() - self._saved_at
        requests = Requests(save=self._save or is_due, stop=self._stop)
        if requests.save:
            self._save, self._saved_at = False, time.monotonic()
        return requests


def checkpoint_store(config: Config, folder: Path, attempt: str | None = None) -> Store:
    section = config.checkpoint
    return Store(folder / "checkpoints", section.keep_last, section.keep_every, attempt)


def batch_facts(config: Config, model: ModelConfig) -> dict[str, Any]:
    """What decides which text a step reads: as long as it stays, a run can go on in another shape."""
    microbatches = config.pipeline.microbatches * config.pipeline.replicas
    return {
        "sequences_per_step": microbatches * config.train.microbatch_size,
        "sequence_length": model.sequence_length,
        "seed": config.train.seed,
    }


class Saver:
    """Of one process."""

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        transport: Transport,
        pipeline: Pipeline,
        store: Store,
        say: Callable[[str], None],
    ) -> None:
        is_sharded = config.optimizer.sharded and transport.num_replicas > 1
        self._pipeline, self._every = pipeline, config.checkpoint.every_steps
        self._at_end = config.checkpoint.at_end
        self._is_writing = transport.replica == 0 or is_sharded
        replica = f".replica-{transport.replica}" if is_sharded else ""
        self._name = f"stage-{transport.stage}{replica}"
        self._facts = {"run": batch_facts(config, model), "config": asdict(config)}
        num_parts = transport.num_stages * (transport.num_replicas if is_sharded else 1)
        self._writer = Writer(store, num_parts, say)
        self._latest: int | None = None

    def after(self, report: StepReport) -> None:
        """Call it with every report, before the next one is asked for."""
        done = report.step + 1
        if report.save or (self._every and done % self._every == 0):
            self._save(done)

    def finish(self, was_stopped: bool) -> int | None:
        """At the end of a run: what is still to be saved, and the step of the latest checkpoint if it is complete."""
        done = self._pipeline.versions.newest
        self._writer.wait()
        if (self._at_end or was_stopped) and self._latest != done:
            self._save(done)
        self._writer.close()
        return self._latest

    def _save(self, step: int) -> None:
        if not self._is_writing:
            return
        take = self._pipeline.snapshot()

        def make() -> Part:
            state = take()
            return Part(self._name, state.tensors, {**self._facts, "state": state.facts})

        if self._writer.submit(step, make):
            self._latest = step


# ---- going on


class _Tensors(Mapping[str, Tensor]):
    """Those of a checkpoint, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._names = checkpoint, checkpoint.names()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._checkpoint.read([name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def newest(store: Store, config: Config, model: ModelConfig, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest complete checkpoint, once it is clear that this configuration can go on from it."""
    found = store.newest(lambda damage: say(f"{damage}: the checkpoint before it is taken"))
    if found is not None:
        check_fits(found, config, model)
    return found


def check_fits(found: Checkpoint, config: Config, model: ModelConfig) -> None:
    """Raises a ConfigError that names what does not."""
    where = f"the checkpoint of step {found.step}"
    try:
        facts = [part["run"] for part in found.facts.values()] + [part["state"] for part in found.facts.values()]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{where} was not written by slipstream train: set run.name to another run") from error
    for key, value in batch_facts(config, model).items():
        if (then := facts[0].get(key)) != value:
            raise ConfigError(
                f"{where} was made with {key.replace('_', ' ')} {then}, and this configuration comes to {value}: make "
                "pipeline.microbatches x pipeline.replicas x train.microbatch_size, model.sequence_length and "
                "train.seed what they were"
            )
    if found.step > config.train.steps:
        raise ConfigError(
            f"train.steps = {config.train.steps} is less than the {found.step} steps that are made already: use more, "
            "or another run.name"
        )
    with torch.device("meta"):
        expected = {name: parameter.shape for name, parameter in decoder(model).named_parameters()}
    masters = {
        name.removeprefix("master/"): torch.Size(shape)
        for name, (_, shape) in found.names().items()
        if name.startswith("master/")
    }
    try:
        check_names(masters, expected)
        _check_optimizer(found, expected)
    except StateError as error:
        raise ConfigError(f"{where} does not fit the configured model: {error}") from error


def _check_optimizer(found: Checkpoint, expected: Mapping[str, torch.Size]) -> None:
    kept = _state_facts(found)["optimizer"]
    missing = [f"the optimizer's state of {name} is missing" for name in expected if name not in kept]
    names = found.names()
    missing += [f"{name} is missing" for value in kept.values() for name in tensor_names(value) if name not in names]
    if missing:
        raise StateError("; ".join(missing))


def _state_facts(found: Checkpoint) -> dict[str, Any]:
    merged: dict[str, Any] = {"optimizer": {}, "groups": {}, "coefficients": {}}
    for part in found.facts.values():
        for kind, values in merged.items():
            values |= part["state"][kind]
    return merged


def state_of(found: Checkpoint) -> StageState:
    """Of all stages together: each takes what it needs."""
    return StageState(found.step, _Tensors(found), _state_facts(found))


def sync_start_steps(found: Checkpoint, schedule: Schedule) -> int:
    """A run that was synchronous has no older versions to be late with: it goes on as after a synchronous start."""
    lags = {int(name.split("/")[1]) for name in found.names() if name.startswith("working/")}
    needed = max(map(schedule.delay, range(schedule.num_stages)))
    is_late = found.step > schedule.sync_start_steps
    return found.step if is_late and not lags.issuperset(range(1, needed + 1)) else schedule.sync_start_steps
