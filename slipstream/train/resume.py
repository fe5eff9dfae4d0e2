"""Finds the checkpoint to resume from, checks that the configuration fits it, and lists what has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint, CheckpointError, Store
from ..checkpoint.reading import state_of
from ..checkpoint.stage_state import TENSOR, StateError, check_names, is_tensor
from ..config.defaults import peak_rates_of
from ..config.optimizers import learning_rate, parameter_groups, peak_rates
from ..config.rules import schedule_of
from ..config.schema import Config
from ..config.toml import build, flat
from ..data import Batches, Tokens
from ..errors import ConfigError, first_of
from ..model.spec import ModelSpec
from ..optim import RECIPES
from ..optim.groups import assign
from ..schedule import Schedule
from .build import Components
from .checkpointing import base_facts, batch_facts
from .run_folder import unwritable

UNTOLD = ("checkpoint.resume", "run.name", "run.folder", "run.overwrite")
"""Settings that describe how the run is launched, not the run itself. Changes of these are not reported."""

MODEL_SETTINGS = ("adapter.rank", "adapter.alpha", "adapter.targets", "train.freeze", "train.dtype")
"""Settings that decide which weights a checkpoint has, and what they mean."""

SAMPLE_TOKENS = 2**16


def corpus_facts(batches: Batches) -> dict[str, Any]:
    """Returns facts that identify a corpus: its length, and a hash of its first and last tokens. If sources are mixed,
    these facts about each of them follow."""
    facts, start = text_facts(batches.tokens, 0, len(batches.tokens)), 0
    for source in batches.sources:
        facts.setdefault("sources", []).append(text_facts(batches.tokens, start, start + source.num_tokens))
        start += source.num_tokens
    return facts


def text_facts(tokens: Tokens, start: int, stop: int) -> dict[str, Any]:
    """Returns the number of these tokens, and a hash of the first and last of them."""
    ends = tokens.read(start, min(start + SAMPLE_TOKENS, stop)), tokens.read(max(start, stop - SAMPLE_TOKENS), stop)
    return {"tokens": stop - start, "sample": hashlib.sha256(np.concatenate(ends).tobytes()).hexdigest()[:16]}


def changes(found: Checkpoint, config: Config, components: Components) -> Iterator[str]:
    """Yields a line for everything that differs from the configuration and corpus that the checkpoint was made with."""
    facts: Mapping[str, Any] = next(iter(found.facts.values()))
    tree = facts.get("config")
    then, now = flat(tree if isinstance(tree, dict) else {}), flat(asdict(config))
    for name in sorted(then.keys() & now.keys()):
        if then[name] != now[name] and name not in UNTOLD:
            yield f"{name} was {then[name]!r} until step {found.step}, and is {now[name]!r} from here on"
    corpus = facts.get("corpus")
    if isinstance(corpus, dict) and corpus != (current := corpus_facts(components.batches)):
        yield (
            f"the corpus is another than until step {found.step}: {corpus.get('tokens')} tokens then, "
            f"{current['tokens']} now"
        )
    yield from _rate_changes(found, tree, config)


def _rate_changes(found: Checkpoint, tree: Any, config: Config) -> Iterator[str]:
    """Yields a line if the learning rate of the next update changes although the peak rates are the same."""
    try:
        before = build(Config, tree, "")
        then, now = learning_rate(before)(found.step), learning_rate(config)(found.step)
        is_same_peak = peak_rates(before) == peak_rates(config)
    except (ConfigError, ValueError, TypeError):  # a configuration written by another version of the program
        return
    if is_same_peak and abs(then - now) > 1e-6 * now:
        peak, _ = peak_rates_of(config.optimizer)
        steps = before.optimizer.horizon_steps or before.train.steps
        yield (
            f"the learning rate is {peak * now:.4g} from here on, and would have been {peak * then:.4g} as it was laid "
            f"out: set optimizer.horizon_steps = {steps} to keep to that"
        )


def keep_configuration(folder: Path, step: int) -> None:
    """Renames config.toml, so that the configuration of the steps so far is kept. If one is kept for this step already,
    the run was resumed there before, and what it did after that is lost."""
    kept = folder / f"config.until-step-{step}.toml"
    try:
        with suppress(FileNotFoundError):
            if not kept.exists():
                (folder / "config.toml").replace(kept)
    except OSError as error:
        raise unwritable(folder, error) from error


TOY_SHAPE = (3, 5, 7, 11)
"""Shape of a toy parameter. All dimensions differ, so a tensor of the optimizer's state that has this shape has one
number for every number of the parameter."""


# ---- resuming
def newest(store: Store, config: Config, model: ModelSpec, say: Callable[[str], None]) -> Checkpoint | None:
    """Returns the newest complete checkpoint, or None if there is none.

    Raises a ConfigError if this configuration cannot resume from it, or if all are damaged: a new run would take the
    place of the old one.
    """
    damaged: list[str] = []
    try:
        found = store.newest(damaged.append)
    except CheckpointError as error:
        raise ConfigError(f"{error}: make it readable, or choose another run.name") from error
    if damaged and found is None:
        raise ConfigError(f"{damaged[-1]}, and no other checkpoint is whole: start anew with --run.overwrite")
    for damage in damaged:
        say(f"{damage}: the checkpoint before it is taken")
    if found is not None:
        check_fits(found, config, model)
    return found


def check_fits(found: Checkpoint, config: Config, model: ModelSpec) -> None:
    """Raises a ConfigError that names what in a checkpoint does not fit the configuration."""
    where = f"the checkpoint of step {found.step}"
    if not all({"run", "state"} <= part.keys() for part in found.facts.values()):
        raise ConfigError(f"{where} was not written by slipstream train: set run.name to another run")
    facts = [part["run"] for part in found.facts.values()]
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
    _check_settings(found, config, model, where)
    expected = {name: p.shape for name, p in model.meta_layers().named_parameters() if p.requires_grad}
    try:
        _check_weights(found, expected)
        _check_versions(found, schedule_of(config), expected)
        _check_optimizers(found, config, expected)
    except StateError as error:
        raise ConfigError(
            f"{where} does not fit the configured model: {error}: make model and optimizer what they were, or set "
            "run.name to another run"
        ) from error


def _check_settings(found: Checkpoint, config: Config, model: ModelSpec, where: str) -> None:
    """Raises a ConfigError if other weights are frozen than before, if frozen weights have changed, or if the masters
    have another dtype."""
    facts = next(iter(found.facts.values()))
    usual, tree = flat(asdict(Config())), facts.get("config")
    then, now = usual | flat(tree if isinstance(tree, dict) else {}), flat(asdict(config))
    folders = ("model.initial", "model.hf") if facts.get("base") != base_facts(model) else ()
    for name in (*MODEL_SETTINGS, *folders):
        if then[name] != now[name]:
            raise ConfigError(
                f"{where} was made with {name} = {then[name]!r}, and this configuration has {now[name]!r}: make it "
                "what it was, or export the run and start another from it"
            )
    check_base(found, model)


def check_base(found: Checkpoint, model: ModelSpec) -> None:
    """Raises a ConfigError unless frozen weights are read from the same files as when the checkpoint was made."""
    before = next(iter(found.facts.values())).get("base")
    if before != base_facts(model):
        raise ConfigError(
            f"the checkpoint of step {found.step} has no frozen weights, and the folder {str(model.weight_folder)!r} "
            "that they are read from has other files than then: restore it"
        )


def _check_weights(found: Checkpoint, expected: Mapping[str, torch.Size]) -> None:
    shapes = {name: torch.Size(shape) for name, (_, shape) in found.names().items()}
    check_names({name[7:]: shape for name, shape in shapes.items() if name.startswith("master/")}, expected)


def _check_versions(found: Checkpoint, schedule: Schedule, expected: Mapping[str, torch.Size]) -> None:
    """Checks that the checkpoint holds the weight versions that the next batches use.

    If every stage updates independently, stages keep different numbers of versions. Then nothing is checked here, and
    each stage reports what it misses.
    """
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


def _check_optimizers(found: Checkpoint, config: Config, expected: Mapping[str, torch.Size]) -> None:
    """Compares the optimizer state with the state that the configured optimizers have after one step with toy
    parameters.

    For an optimizer class that is given by its import path, it is unknown whether its state has the same keys for every
    size. For such a class only the keys found in the checkpoint are compared.
    """
    is_known = config.optimizer.name in ("muon", "adamw", *RECIPES)
    tensors, kept = found.names(), state_of(found).facts["optimizer"]
    if missing := [f"the optimizer's state of {name} is missing" for name in expected if name not in kept]:
        raise StateError(first_of(missing))
    toys = [(name, nn.Parameter(torch.ones(TOY_SHAPE[: len(shape)]))) for name, shape in expected.items()]
    for _, toy in toys:
        toy.grad = torch.ones_like(toy)
    for group, members in assign(toys, parameter_groups(config)):
        if not members:
            continue
        optimizer = group.optimizer([toy for _, toy in members])
        optimizer.step()
        for name, toy in members:
            state = {key: value for key, value in optimizer.state[toy].items() if is_known or key in kept[name]}
            _check_state(kept[name], state, toy.shape, expected[name], tensors, name)


def _check_state(
    kept: Mapping[str, Any],
    wanted: Mapping[str, Any],
    toy_shape: torch.Size,
    shape: torch.Size,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    name: str,
) -> None:
    """Checks the optimizer state of one parameter.

    An empty state belongs to a parameter that was never updated, and is accepted. State that an optimizer adds in later
    steps is unknown here, and is not checked.
    """
    whose = f"the optimizer's state of {name}"
    for key, value in wanted.items() if kept else ():
        if key not in kept:
            raise StateError(f"{whose} has no {key!r}, which the configured optimizer keeps")
        if is_tensor(kept[key]) != isinstance(value, Tensor):
            raise StateError(f"{whose} has a {key!r} of another kind than the configured optimizer's")
        if isinstance(value, Tensor):
            _, its_shape = tensors[kept[key][TENSOR]]
            is_same = value.shape == toy_shape
            if value.ndim != len(its_shape) or (is_same and its_shape != shape):
                raise StateError(f"{whose} has a {key!r} of shape {its_shape}, where the parameter has {tuple(shape)}")


def sync_start_steps(found: Checkpoint, schedule: Schedule) -> int:
    """Returns the number of synchronous steps at the start of the schedule.

    A run that was synchronous so far has saved no older weight versions for delayed steps to use. It resumes as if all
    its steps had been a synchronous start.
    """
    lags = {int(name.split("/")[1]) for name in found.names() if name.startswith("working/")}
    needed = max(map(schedule.delay, range(schedule.num_stages)))
    is_late = found.step > schedule.sync_start_steps
    return found.step if is_late and not lags.issuperset(range(1, needed + 1)) else schedule.sync_start_steps
