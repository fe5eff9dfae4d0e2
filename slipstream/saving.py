"""When a run saves itself, what it saves, and how it goes on from there.

    store = checkpoint_store(config, folder, attempt)
    found = newest(store, config, model, say)                the checkpoint to go on from, if there is one
    saver = Saver(config, model, transport, pipeline, ...)   in every process, beside its stage

A stage is saved after its own update c, while the others are still before or already past theirs: nothing is drained. A
checkpoint is complete when all parts of c are there.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint, Part, Store, Writer
from .checkpoint.store import MAX_STEP
from .config import Config, ConfigError, schedule_of
from .model import ModelConfig, decoder
from .optim import RECIPES
from .optim.groups import assign
from .parts import parameter_groups
from .pipeline import Pipeline, Requests, StageState, StateError, StepReport, Transport
from .pipeline.launch import INTERRUPTED, is_ignored
from .pipeline.reduction import NUM_PRODUCTS
from .pipeline.state import FACTS, TENSOR, check_names, is_tensor, merge_facts, tensor_names
from .pipeline.update import sample
from .schedule import Schedule

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""To save and leave with success; to save and go on; to save and leave, as an interrupt. A second interrupt ends a run
at once."""
WHOLE_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
TOY_SHAPE = (3, 5, 7, 11)
"""No dimension twice: a state of the same shape is one number for every number of the parameter."""


class Wishes:
    """What this process would like all of them to do: what it was told by a signal, and what its clock says."""

    def __init__(self, every_minutes: float) -> None:
        self._seconds = 60 * every_minutes
        self._saved_at = time.monotonic()
        self._save = self._stop = self.was_interrupted = False
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._hear) for n in SIGNALS if not is_ignored(n)}

    def close(self) -> None:
        """Signals mean what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """A run that stops saves itself at its end, and needs no checkpoint before."""
        self._save = self._save or number == signal.SIGUSR1
        self._stop = self._stop or number != signal.SIGUSR1
        if number == signal.SIGINT:
            self.was_interrupted = True
            signal.signal(number, self._before[signal.SIGINT])
            if os.environ.get("RANK", "0") == "0":
                print(INTERRUPTED, file=sys.stderr, flush=True)

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
        corpus: Mapping[str, Any] | None = None,
    ) -> None:
        """corpus: by which the training data are known again; None: they are not."""
        is_sharded = config.optimizer.sharded and transport.num_replicas > 1
        self._pipeline: Pipeline | None = pipeline
        self._every = config.checkpoint.every_steps
        self._at_end = config.checkpoint.at_end
        self._is_writing = transport.replica == 0 or is_sharded
        replica = f".replica-{transport.replica}" if is_sharded else ""
        self._name = f"stage-{transport.stage}{replica}"
        self._facts = {"run": batch_facts(config, model), "config": asdict(config), "corpus": corpus}
        num_parts = transport.num_stages * (transport.num_replicas if is_sharded else 1)
        self._writer = Writer(store, num_parts, say)
        self._latest: int | None = None
        self._copies: Mapping[str, Tensor] = {}
        """Of the state, from one checkpoint to the next: the writer's while it is busy."""
        self._is_owed = False
        schedule = pipeline.schedule
        self._steps_apart = 2 + max(map(schedule.delay, range(schedule.num_stages)))
        """At most so many steps lie between what processes ask for that were sent a signal at the same moment."""
        self._asked_after: int | None = None

    def after(self, report: StepReport) -> None:
        """Call it with every report, before the next one is asked for."""
        done = report.step + 1
        is_asked = report.save and (self._asked_after is None or done - self._asked_after > self._steps_apart)
        self._asked_after = done if is_asked else self._asked_after
        is_due = is_asked or (self._every > 0 and done % self._every == 0)
        if not report.busy and (is_due or self._is_owed):
            self._is_owed = False
            self._save(done)
        elif is_due:
            # All leave it out: a step that some save and others do not is no checkpoint, and were they busy in turns,
            # there would never be one. What somebody asked for is made up for.
            self._is_owed = self._is_owed or is_asked
            if self._is_writing:
                self._writer.leave_out(done)

    @property
    def is_busy(self) -> bool:
        return self._writer.is_busy

    def finish(self, was_stopped: bool) -> None:
        """At the end of a run: what is still to be saved. The others may not be done with theirs."""
        assert self._pipeline is not None, "this saver has retired"
        done = self._pipeline.versions.newest
        self._writer.wait()
        if (self._at_end or was_stopped) and self._latest != done:
            self._save(done)
        self.close()

    def retire(self) -> None:
        """Holds nothing of the pipeline any more; what is being written is written."""
        self._pipeline, self._copies = None, {}

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.close()

    def _save(self, step: int) -> None:
        if not self._is_writing:
            return
        if self._writer.is_busy:
            self._writer.leave_out(step)
            return
        assert self._pipeline is not None, "this saver has retired"
        take = self._pipeline.snapshot(self._copies)

        def make() -> Part:
            state = take()
            if self._pipeline is not None:
                self._copies = state.tensors
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
    facts: list[Any] = [part.get("run") for part in found.facts.values()]
    if not all(isinstance(part, dict) for part in facts) or not all(map(_has_state, found.facts.values())):
        raise ConfigError(f"{where} was not written by slipstream train: set run.name to another run")
    expected_facts = batch_facts(config, model)
    for key, then in ((key, part.get(key)) for key in expected_facts for part in facts):
        if then != (value := expected_facts[key]):
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
    try:
        _check_weights(found, expected)
        _check_versions(found, schedule_of(config), expected)
        _check_optimizers(found, config, expected)
        _check_products(found, len(parameter_groups(config)))
    except StateError as error:
        raise ConfigError(f"{where} does not fit the configured model: {error}") from error


def _has_state(part: Mapping[str, Any]) -> bool:
    state = part.get("state")
    return isinstance(state, dict) and all(isinstance(state.get(kind), dict) for kind in FACTS)


def _check_weights(found: Checkpoint, expected: Mapping[str, torch.Size]) -> None:
    """Masters of all parameters, and older versions of some."""
    masters: dict[str, torch.Size] = {}
    for name, (dtype, shape) in found.names().items():
        kind, _, rest = name.partition("/")
        if kind == "working":
            lag, _, rest = rest.partition("/")
            if not WHOLE_NUMBER.fullmatch(lag) or rest not in expected:
                raise StateError(f"{name[:200]!r} is no older version of a parameter")
            if shape != expected[rest]:
                raise StateError(f"{name} is {shape}, not {tuple(expected[rest])}")
        if kind == "sample" and shape != (size := _sample_shape(expected.get(rest))):
            raise StateError(f"{name[:200]} is {shape}, not {size}")
        if kind == "master":
            masters[rest] = torch.Size(shape)
        if kind in ("master", "working", "sample") and not dtype.is_floating_point:
            raise StateError(f"{name} is of {dtype}")
    check_names(masters, expected)


def _check_products(found: Checkpoint, num_groups: int) -> None:
    products = {name: about for name, about in found.names().items() if name.startswith("products/")}
    if not products:
        raise StateError("the products of the latest updates are missing")
    for name, (dtype, shape) in products.items():
        if (dtype, shape) != (torch.float64, (num_groups, NUM_PRODUCTS)):
            raise StateError(f"{name[:200]} is {shape} of {dtype}, not {(num_groups, NUM_PRODUCTS)} of torch.float64")


def _check_versions(found: Checkpoint, schedule: Schedule, expected: Mapping[str, torch.Size]) -> None:
    """That the versions which the next batches run on are there. Where stages step alone, each has versions of its own
    number, and says itself what it misses."""
    if schedule.traits.steps_alone:
        return
    start, names = sync_start_steps(found, schedule), found.names()
    for lag in range(1, max(map(schedule.delay, range(schedule.num_stages))) + 1):
        missing = [name for name in expected if f"working/{lag}/{name}" not in names]
        if missing and found.step - lag >= start:
            raise StateError(
                f"version {found.step - lag} of {len(missing)} parameters is missing, {missing[0]} among them, which "
                f"{schedule.name} goes on with"
            )


def _sample_shape(shape: torch.Size | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(sample(torch.empty(shape, device="meta")).shape)


def _check_optimizers(found: Checkpoint, config: Config, expected: Mapping[str, torch.Size]) -> None:
    """Against the state that the configured optimizers have after a step of toys. Of a class by its import path nobody
    knows whether it keeps the same for every size."""
    is_known = config.optimizer.name in ("muon", "adamw", *RECIPES)
    facts, tensors = _state_facts(found), found.names()
    kept = facts["optimizer"]
    if missing := [f"the optimizer's state of {name} is missing" for name in expected if name not in kept]:
        raise StateError("; ".join(missing))
    for name, value in kept.items():
        if not isinstance(value, dict) or is_tensor(value):
            raise StateError(f"the optimizer's state of {name[:200]} is none")
        for tensor in tensor_names(value):
            if not isinstance(tensor, str) or tensor not in tensors:
                raise StateError(f"{str(tensor)[:200]} of {name[:200]} is missing")
    toys = [(name, nn.Parameter(torch.ones(TOY_SHAPE[: len(shape)]))) for name, shape in expected.items()]
    for group, members in assign(toys, parameter_groups(config)):
        for ndim in {toy.ndim for _, toy in members}:
            alike = [name for name, toy in members if toy.ndim == ndim]
            toy = next(toy for _, toy in members if toy.ndim == ndim)
            toy.grad = torch.ones_like(toy)
            optimizer = group.optimizer([toy])
            optimizer.step()
            for name in alike:
                state = {key: value for key, value in optimizer.state[toy].items() if is_known or key in kept[name]}
                _check_state(kept[name], state, toy.shape, expected[name], tensors, name)
            _check_group(facts["groups"].get(group.name), optimizer, group.name)
        coefficient = facts["coefficients"].get(group.name)
        if coefficient is not None and type(coefficient) not in (int, float):
            raise StateError(f"the coefficient of group {group.name!r} is {str(coefficient)[:60]!r}, and no number")


def _check_state(
    kept: Mapping[str, Any],
    wanted: Mapping[str, Any],
    toy_shape: torch.Size,
    shape: torch.Size,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    name: str,
) -> None:
    """Of one parameter. None at all is that of a parameter which was never stepped; what an optimizer adds later is not
    known here."""
    whose = f"the optimizer's state of {name}"
    for key, value in wanted.items() if kept else ():
        if key not in kept:
            raise StateError(f"{whose} has no {key!r}, which the configured optimizer keeps")
        if is_tensor(kept[key]) != isinstance(value, Tensor):
            raise StateError(f"{whose} has a {key!r} of another kind than the configured optimizer's")
        if isinstance(value, Tensor):
            dtype, its_shape = tensors[kept[key][TENSOR]]
            is_same = value.shape == toy_shape
            if value.ndim != len(its_shape) or (is_same and its_shape != shape):
                raise StateError(f"{whose} has a {key!r} of shape {its_shape}, where the parameter has {tuple(shape)}")
            if dtype.is_floating_point != value.is_floating_point():
                raise StateError(f"{whose} has a {key!r} of {dtype}")
        elif isinstance(value, (int, float)) and not _is_number(kept[key], key):
            raise StateError(f"{whose} has {str(kept[key])[:60]!r} as {key!r}, and no number")


def _is_number(value: Any, key: str) -> bool:
    """Where steps are counted, at least one has been made: optimizers divide by them."""
    return type(value) in (bool, int, float) and (key != "step" or 1 <= value <= MAX_STEP)


def _check_group(kept: Any, optimizer: torch.optim.Optimizer, name: str) -> None:
    if kept is None:
        return
    whole = isinstance(kept, list) and all(isinstance(group, dict) for group in kept)
    if not whole or len(kept) != len(optimizer.param_groups):
        raise StateError(f"what is kept of group {name!r} is not the configured optimizer's")
    for group in kept:
        if "step" in group and not _is_number(group["step"], "step"):
            raise StateError(f"group {name!r} has made {str(group['step'])[:60]!r} steps, which is no number")


def _state_facts(found: Checkpoint) -> dict[str, Any]:
    return merge_facts(part["state"] for part in found.facts.values())


def state_of(found: Checkpoint) -> StageState:
    """Of all stages together: each takes what it needs."""
    return StageState(found.step, _Tensors(found), _state_facts(found))


def sync_start_steps(found: Checkpoint, schedule: Schedule) -> int:
    """A run that was synchronous has no older versions to be late with: it goes on as after a synchronous start."""
    lags = {int(name.split("/")[1]) for name in found.names() if name.startswith("working/")}
    needed = max(map(schedule.delay, range(schedule.num_stages)))
    is_late = found.step > schedule.sync_start_steps
    return found.step if is_late and not lags.issuperset(range(1, needed + 1)) else schedule.sync_start_steps
