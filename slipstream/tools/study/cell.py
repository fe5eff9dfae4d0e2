"""One cell of a study: a configuration as `slipstream train` takes it, and what only a study may choose.

Two cells that would compute the same numbers have the same id, and are run once: a synchronous run, for one, does not
care about error feedback, so a grid over its coefficient runs one of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

from ...config.defaults import leaves_rest_to_adamw
from ...config.optimizers import adamw_predictor
from ...config.rules import schedule_of
from ...config.schema import Config, OptimizerSection
from ...errors import ConfigError
from ...schedule import TRAITS
from .predictors import LOOK_INSIDE, PREDICTORS, WEIGHTED

COMPUTE_DTYPES = ("bfloat16", "float32", "float64")
COMPILE_MODES = ("default", "reduce-overhead")


@dataclass(frozen=True)
class Cell:
    config: Config
    mode: str = ""
    """What the table calls it: sync, async, ef, or a name from the grid."""
    setting: dict[str, Any] = field(default_factory=dict)
    """The axes that put it where it is in the grid, by dotted field; mode, optimizer and seed aside."""
    delays: tuple[int, ...] = ()
    """Per stage; empty: those of the schedule."""
    predictor: str = ""
    """What foretells the next update, for error feedback: see study.predictors. Empty: what a pipeline expects."""
    predictor_weight: float = 0.5
    """k of two_term and damped."""
    compute_dtype: str | None = None
    """Of forward and backward; the masters keep train.dtype. None: that one."""
    compile_mode: str | None = None
    """default: forward and backward are compiled; reduce-overhead: and on a GPU, PACI and mixtures of experts aside,
    one CUDA graph together. None: neither."""

    def validate(self) -> None:
        """What is the study's own; the configuration is checked by `build_components`."""
        if self.predictor and self.predictor not in PREDICTORS:
            raise ConfigError(f"predictor = {self.predictor!r} is unknown: choose one of {', '.join(PREDICTORS)}")
        for name, known in (("compute_dtype", COMPUTE_DTYPES), ("compile_mode", COMPILE_MODES)):
            if getattr(self, name) not in (None, *known):
                raise ConfigError(f"{name} = {getattr(self, name)!r} is unknown: choose one of {', '.join(known)}")
        stages = self.config.pipeline.stages
        if self.delays and len(self.delays) != stages:
            raise ConfigError(
                f"delays = {list(self.delays)} has not one entry for each of pipeline.stages = {stages}: give {stages}"
            )
        steps = self.config.train.steps
        if any(not 0 <= delay <= steps for delay in self.delays):
            raise ConfigError(f"delays = {list(self.delays)} cannot be: use 0 to train.steps = {steps} for every stage")
        if (replicas := self.config.pipeline.replicas) > 1:
            raise ConfigError(
                f"pipeline.replicas = {replicas} shares the batch among pipelines, and a study has none: multiply "
                "pipeline.microbatches instead, which comes to the same"
            )
        for name in ("compute_dtype", "gradient_dtype", "reduction_dtype"):
            if (value := getattr(self.config.train, name)) is not None:
                raise ConfigError(
                    f"train.{name} = {value!r} is a pipeline's: leave it out, and write compute_dtype at the top of "
                    "the study"
                )
        if self.config.optimizer.sharded:
            raise ConfigError("optimizer.sharded is for replicas, and a study has none: leave it out")
        if not math.isfinite(self.predictor_weight):
            raise ConfigError(f"predictor_weight = {self.predictor_weight} is not finite: write a number that is")
        if self.delays and TRAITS[self.config.pipeline.schedule].drifts:
            raise ConfigError(
                f"delays = {list(self.delays)} are those of weight versions, and paci keeps none: leave them out, or "
                "use another schedule"
            )
        if self.predictor in LOOK_INSIDE and self.config.optimizer.name not in ("muon", "adamw"):
            raise ConfigError(
                f"predictor = {self.predictor!r} looks into muon and adamw, not into optimizer.name = "
                f"{self.config.optimizer.name!r}: use another predictor"
            )
        if self.config.train.compile:
            raise ConfigError(
                "train.compile = true is for the stages of a pipeline, and a study has none: set compile_mode = "
                "'default' instead"
            )
        if self.config.train.non_finite == "skip":
            raise ConfigError(
                "train.non_finite = 'skip' asks the device after every step, which a study never does: leave it out"
            )

    @property
    def stage_delays(self) -> tuple[int, ...]:
        schedule = schedule_of(self.config)
        return self.delays or tuple(schedule.delay(stage) for stage in range(schedule.num_stages))

    @property
    def drift_warmups(self) -> tuple[int, ...] | None:
        """PACI: forwards ahead of the first backward, per stage."""
        schedule = schedule_of(self.config)
        if not schedule.traits.drifts:
            return None
        return tuple(schedule.num_stages - 1 - stage for stage in range(schedule.num_stages))

    @property
    def is_synchronous(self) -> bool:
        return not any(self.stage_delays) and not any(self.drift_warmups or ())

    def synchronous(self) -> Cell:
        """The cell this one is measured against."""
        # depth: one_f_one_b has no double one.
        pipeline = dataclasses.replace(self.config.pipeline, schedule="one_f_one_b", depth="minimum")
        config = dataclasses.replace(self.config, pipeline=pipeline)
        return dataclasses.replace(self, config=config, mode="sync", delays=())

    @property
    def id(self) -> str:
        """Of everything that decides its numbers, and of nothing else. What is off, zero or not given does not count:
        a new field that is off by default leaves old ids alone."""
        sections: dict[str, Any] = {name: _set_fields(section) for name, section in vars(self.config).items()}
        for name in ("run", "pipeline", "checkpoint"):
            del sections[name]
        for name in ("track_alignment", "non_finite"):
            sections["train"].pop(name, None)
        for section, choice, usual in (("model", "name", "decoder"), ("data", "loader", "files")):
            if sections[section].get(choice) == usual:  # as in all studies before there was a choice
                del sections[section][choice]
        sections["optimizer"].pop("adamw_predictor", None)
        recompute_every = sections["train"].pop("recompute_every", 0)
        pipeline = self.config.pipeline
        sections["microbatches"] = pipeline.microbatches
        sections["compute"] = (self.compute_dtype or self.config.train.dtype, self.compile_mode)
        if self.is_synchronous:
            sections["optimizer"].pop("error_feedback", None)
        else:
            sections["sync_start_steps"] = pipeline.sync_start_steps
            if self.config.optimizer.error_feedback != 0:
                sections["predictor"] = self.predictor or _predictor(self.config.optimizer)
                if self.predictor in WEIGHTED:
                    sections["predictor_weight"] = self.predictor_weight
            if len(set(self.stage_delays)) > 1 or self.drift_warmups:
                sections["cut"] = (pipeline.stages, pipeline.layers_per_stage)
                sections["delays"] = (self.stage_delays, self.drift_warmups)
                if recompute_every and not pipeline.layers_per_stage:  # the cut is balanced by what blocks cost
                    sections["recompute_every"] = recompute_every
            else:
                sections["delays"] = self.stage_delays[0]
        return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def name(self) -> str:
        """Of its folder, and on the screen."""
        return f"{self.config.optimizer.name.rpartition('.')[2]}-seed{self.config.train.seed}-{self.id}"


def _predictor(section: OptimizerSection) -> str:
    """What a pipeline expects of the next update."""
    has_adamw = section.name == "adamw" or leaves_rest_to_adamw(section)
    return adamw_predictor(section) if has_adamw and not section.adamw_nesterov else "last"


def _set_fields(section: Any) -> dict[str, Any]:
    """Those that are not off, zero or not given. Where not given means a value found elsewhere, zero is another one."""
    may_be_missing = {member.name for member in dataclasses.fields(section) if member.default is None}
    return {
        name: value
        for name, value in dataclasses.asdict(section).items()
        if value not in (None, False, (), {}) or (name in may_be_missing and value is not None)
    }
