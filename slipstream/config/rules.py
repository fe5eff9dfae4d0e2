"""Checks a configuration, and derives from it what does not depend on data.

Every mistake raises a `ConfigError` with one sentence that names the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..model.presets import PRESETS
from ..schedule import DEPTHS, SCHEDULES, TRAITS, Schedule, ScheduleError
from .schema import Config, OptimizerSection


def has_experts(config: Config) -> bool:
    num_experts = config.model.num_experts
    if config.model.name != "decoder":
        return False
    return bool(PRESETS[config.model.preset].num_experts if num_experts is None else num_experts)


def schedule_of(config: Config) -> Schedule:
    section = config.pipeline
    return Schedule(
        section.schedule,
        section.stages,
        section.microbatches,
        config.train.steps,
        depth=section.depth,
        sync_start_steps=section.sync_start_steps,
    )


# ---- invalid values
LIMITS: dict[str, tuple[float, float]] = {
    "train.steps": (1, 10**9),
    "train.microbatch_size": (1, math.inf),
    "train.loss_chunk_tokens": (0, math.inf),
    "train.recompute_every": (0, math.inf),
    "adapter.rank": (1, 2**16),
    "adapter.alpha": (-math.inf, 1e30),
    "pipeline.stages": (1, math.inf),
    "pipeline.replicas": (1, math.inf),
    "pipeline.processes": (1, math.inf),
    "pipeline.microbatches": (1, 2**16),
    "pipeline.sync_start_steps": (0, math.inf),
    "pipeline.timeout_seconds": (0.01, 10**6),
    "optimizer.error_feedback": (0, 1e30),
    "optimizer.weight_decay": (0, 1e30),
    "optimizer.clip_norm": (0, 1e30),
    "optimizer.learning_rate": (0, 1e30),
    "optimizer.adamw_learning_rate": (0, 1e30),
    "optimizer.balance_rate": (0, 1e30),
    "optimizer.final_fraction": (0, 1),
    "optimizer.horizon_steps": (1, math.inf),
    "optimizer.newton_schulz_steps": (1, 1000),
    "evaluation.every_steps": (0, math.inf),
    "evaluation.batches": (0, 2**20),
    "evaluation.sample_tokens": (1, 2**20),
    "checkpoint.every_steps": (0, math.inf),
    "checkpoint.every_minutes": (0, math.inf),
    "checkpoint.keep_last": (1, math.inf),
    "checkpoint.keep_every": (0, math.inf),
    "run.log_every_steps": (1, math.inf),
    "run.trace_actions": (0, math.inf),
}
"""Least and largest values. The largest are far beyond any useful value, but small enough that a run does not seem to
hang, that float32 can hold them, and that every clock can wait so long."""


def validate(config: Config) -> None:
    """Checks everything that does not depend on data or model. The rest is checked when those are built."""
    from ..optim.learning_rate import SCHEDULES as LEARNING_RATES  # imported here, because this imports torch

    values = dict(_walk(config))
    for path, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path} = {value} is not finite: write a number that is")
        if isinstance(value, str) and not is_unicode(value):
            raise ConfigError(f"{path} = {value!r} is not Unicode: write it in UTF-8")
    for path, (least, most) in LIMITS.items():
        if values[path] is not None and values[path] < least:
            raise ConfigError(f"{path} = {values[path]} is too small: use {least} or more")
        if values[path] is not None and values[path] > most:
            raise ConfigError(
                f"{path} = {values[path]} is too large: use {most if most < 1e9 else f'{most:g}'} or less"
            )
    choose("model.preset", config.model.preset, PRESETS)
    choose("pipeline.schedule", config.pipeline.schedule, SCHEDULES)
    choose("pipeline.depth", config.pipeline.depth, DEPTHS)
    choose("optimizer.schedule", config.optimizer.schedule, LEARNING_RATES)
    _validate_pipeline(config)
    _validate_optimizer(config)
    _validate_adapter(config)
    train = config.train
    if (train.compute_dtype, train.dtype) == ("float64", "float32"):
        raise ConfigError(
            f"train.compute_dtype = {train.compute_dtype!r} is finer than train.dtype = {train.dtype!r}: set that to "
            "'float64' too, or leave train.compute_dtype out"
        )
    profiled_steps(config)
    name = config.run.name
    if not name or Path(name).name != name or name == ".." or not name.isprintable():
        raise ConfigError(f"run.name = {name!r} is not the name of a folder: use letters, digits, - and _")
    if not config.run.folder or not config.run.folder.isprintable():
        raise ConfigError(f"run.folder = {config.run.folder!r} is not a path: name a folder to keep runs in")


def profiled_steps(config: Config) -> tuple[int, int] | None:
    """Returns the first and the last step that torch's profiler records, counted from 1. None means no step."""
    text = config.run.profile_steps
    if not text:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,9}):([1-9][0-9]{0,9})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(
            f"run.profile_steps = {text!r} is invalid: write the first and the last step to record, such as 20:23"
        )
    if int(found[2]) > config.train.steps:
        raise ConfigError(
            f"run.profile_steps = {text!r} ends after train.steps = {config.train.steps}: record earlier steps"
        )
    if config.pipeline.transport == "thread":
        raise ConfigError(
            f"run.profile_steps = {text!r} records one stage in a process, and pipeline.transport = 'thread' has all "
            "in one: set pipeline.transport = 'process'"
        )
    return int(found[1]), int(found[2])


def _walk(section: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value with its path. The items of a list or a table are yielded one by one."""
    for member in dataclasses.fields(section):
        value, path = getattr(section, member.name), f"{where}{member.name}"
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{path}.")
        elif isinstance(value, dict):
            yield from ((f"{path}.{key}", item) for key, item in value.items())
        elif isinstance(value, tuple):
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
        else:
            yield path, value


def is_unicode(text: str) -> bool:
    """Returns whether a text can be written in UTF-8. A command line argument that could not be decoded contains
    surrogates, which cannot."""
    return text.encode(errors="ignore").decode() == text


def choose(path: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ConfigError(f"{path} = {value!r} is unknown: choose one of {', '.join(known)}")


def _validate_pipeline(config: Config) -> None:
    section = config.pipeline
    traits, name = TRAITS[section.schedule], section.schedule
    if section.depth not in traits.depths:
        raise ConfigError(
            f"pipeline.depth = {section.depth!r} is made for two_bw, not for {name}: set pipeline.depth = 'minimum'"
        )
    if traits.drifts and config.optimizer.error_feedback != 0:
        raise ConfigError(
            f"optimizer.error_feedback = {config.optimizer.error_feedback:g} needs a weight version to predict into, "
            f"and {name} keeps none: set optimizer.error_feedback = 0, or pipeline.schedule = 'two_bw'"
        )
    if traits.drifts and config.train.recompute_every:
        raise ConfigError(
            f"train.recompute_every = {config.train.recompute_every} computes blocks again with the weights of their "
            f"forward, and {name} has overwritten them: set train.recompute_every = 0, or pipeline.schedule = 'two_bw'"
        )
    if traits.drifts and config.train.compile:
        raise ConfigError(
            "train.compile = true leaves it to the compiler what a backward keeps of the forward's weights, and under "
            f"{name} it must read the newest: set train.compile = false, or pipeline.schedule = 'two_bw'"
        )
    if traits.drifts and config.checkpoint.resume:
        raise ConfigError(
            f"checkpoint.resume = true needs the weights that microbatches in flight have read, and {name} overwrites "
            "them: begin anew, or use another schedule"
        )
    try:
        schedule_of(config)
    except ScheduleError as error:
        # All other errors that a schedule can raise have been excluded above.
        raise ConfigError(f"pipeline.microbatches = {section.microbatches} is invalid: {error}") from error


def _validate_optimizer(config: Config) -> None:
    from ..optim.recipes import RECIPES

    section, steps = config.optimizer, config.optimizer.horizon_steps or config.train.steps
    whose = "train.steps" if section.horizon_steps is None else "optimizer.horizon_steps"
    for name in ("momentum", "beta1", "beta2"):
        value = getattr(section, name)
        if not 0 <= value < 1:
            raise ConfigError(f"optimizer.{name} = {value} is invalid: use at least 0 and less than 1")
    if section.lookahead is not None and not 0 <= section.lookahead * (1 - section.momentum) <= 1 + 1e-9:
        most = 1 / (1 - section.momentum)
        raise ConfigError(
            f"optimizer.lookahead = {section.lookahead} is invalid: use 0 to {most:g}, where with optimizer.momentum = "
            f"{section.momentum} the newest gradient is all that counts"
        )
    if section.balance_rate is not None and not has_experts(config):
        raise ConfigError(
            f"optimizer.balance_rate = {section.balance_rate} balances experts, and model.preset = "
            f"{config.model.preset!r} has none: leave it out, or set model.num_experts"
        )
    for name in ("warmup_steps", "decay_steps"):
        value = getattr(section, name)
        if value is not None and not 0 <= value <= steps:
            raise ConfigError(
                f"optimizer.{name} = {value} does not fit into {whose} = {steps}: use 0 to {steps}, or leave it out"
            )
    if section.schedule in ("wsd", "1-sqrt") and section.warmup_steps and section.decay_steps:
        left = steps - section.warmup_steps
        if section.decay_steps > left:
            raise ConfigError(
                f"optimizer.decay_steps = {section.decay_steps} is more than the {left} of {whose} = {steps} that "
                f"optimizer.warmup_steps = {section.warmup_steps} leaves: use at most {left}"
            )
    if section.arguments and section.name in ("muon", "adamw"):
        raise ConfigError(
            f"optimizer.arguments = {section.arguments} is for other optimizers, and {section.name} has fields of its "
            "own: use those"
        )
    for name, own in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if name in section.arguments:
            raise ConfigError(
                f"optimizer.arguments.{name} = {section.arguments[name]} has a field of its own: set optimizer.{own}"
            )
    if section.name in RECIPES:
        _validate_recipe(section, RECIPES[section.name].arguments)


def _validate_adapter(config: Config) -> None:
    section = config.adapter
    for name in ("alpha", "targets"):
        if section.rank is None and getattr(section, name):
            raise ConfigError(
                f"adapter.{name} = {getattr(section, name)} belongs to adapters, and there are none: set adapter.rank"
            )
    if section.alpha is not None and section.alpha <= 0:
        raise ConfigError(f"adapter.alpha = {section.alpha:g} is too small: use more than 0, such as twice the rank")


def trains_all(config: Config) -> bool:
    """Returns whether all parameters are trained."""
    return config.adapter.rank is None and not config.train.freeze


def _validate_recipe(section: OptimizerSection, known: Mapping[str, float]) -> None:
    """Checks the arguments of a recipe here, because the optimizer classes silently ignore arguments they do not
    know."""
    for name, value in section.arguments.items():
        if name not in known:
            raise ConfigError(
                f"optimizer.arguments.{name} = {value:g} means nothing to {section.name}: it has {', '.join(known)}"
            )
        if isinstance(known[name], int) and value != int(value):
            raise ConfigError(f"optimizer.arguments.{name} = {value:g} is invalid: write a whole number")
