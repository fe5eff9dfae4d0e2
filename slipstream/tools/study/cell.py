"""One cell of a study: a configuration of `slipstream train`, and settings that only a study has.

Two cells that would compute the same numbers have the same id, and only one of them runs. For example, error feedback
has no effect on a synchronous run, so a grid over its coefficient has only one synchronous run.
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
from ...config.rules import choose, schedule_of
from ...config.schema import Config, OptimizerSection
from ...errors import ConfigError
from ...schedule import TRAITS
from .predictors import find_predictor

COMPUTE_DTYPES = ("bfloat16", "float32", "float64")
COMPILE_MODES = ("default", "reduce-overhead")


@dataclass(frozen=True)
class Cell:
    config: Config
    mode: str = ""
    """Name of the mode in the table: sync, async, ef, or a name that the grid defines."""
    setting: dict[str, Any] = field(default_factory=dict)
    """Values of the grid's axes for this cell, by dotted field, without mode, optimizer and seed."""
    delays: tuple[int, ...] = ()
    """Delay of each stage. Empty means the delays of the schedule."""
    predictor: str = ""
    """Name or import path of the predictor of the next update, for error feedback (predictors.py). Empty means
    the predictor of a pipeline."""
    predictor_weight: float = 0.5
    """Weight k of a predictor that has one."""
    compute_dtype: str | None = None
    """Dtype of forward and backward. The masters keep train.dtype. None means train.dtype."""
    compile_mode: str | None = None
    """How forward and backward are compiled. "default" compiles them. "reduce-overhead" also captures both in one CUDA
    graph, on a GPU and except for PACI and mixtures of experts. None means neither."""

    def validate(self) -> None:
        """Checks the settings that only a study has. `build_components` checks the configuration."""
        pipeline, train, optimizer = self.config.pipeline, self.config.train, self.config.optimizer
        choice = find_predictor(self.predictor) if self.predictor else None
        for name, known in (("compute_dtype", COMPUTE_DTYPES), ("compile_mode", COMPILE_MODES)):
            if (value := getattr(self, name)) is not None:
                choose(name, value, known)
        if self.delays:
            delays, stages = f"delays = {list(self.delays)}", pipeline.stages
            if len(self.delays) != stages:
                raise ConfigError(f"{delays} has not one entry for each of pipeline.stages = {stages}: give {stages}")
            if not all(0 <= delay <= train.steps for delay in self.delays):
                raise ConfigError(f"{delays} is invalid: use 0 to train.steps = {train.steps} for every stage")
            if TRAITS[pipeline.schedule].drifts:
                raise ConfigError(
                    f"{delays} are those of weight versions, and paci keeps none: leave them out, or use another "
                    "schedule"
                )
        if pipeline.replicas > 1:
            raise ConfigError(
                f"pipeline.replicas = {pipeline.replicas} shares the batch among pipelines, and a study has none: "
                "multiply pipeline.microbatches instead, which comes to the same"
            )
        for name in ("compute_dtype", "gradient_dtype", "reduction_dtype"):
            if (value := getattr(train, name)) is not None:
                raise ConfigError(
                    f"train.{name} = {value!r} is a pipeline's: leave it out, and write compute_dtype at the top of "
                    "the study"
                )
        if optimizer.sharded:
            raise ConfigError("optimizer.sharded is for replicas, and a study has none: leave it out")
        if not math.isfinite(self.predictor_weight):
            raise ConfigError(f"predictor_weight = {self.predictor_weight} is not finite: write a number that is")
        if choice is not None and choice.reads_optimizer and optimizer.name not in ("muon", "adamw"):
            raise ConfigError(
                f"predictor = {self.predictor!r} looks into muon and adamw, not into optimizer.name = "
                f"{optimizer.name!r}: use another predictor"
            )
        if train.compile:
            raise ConfigError(
                "train.compile = true is for the stages of a pipeline, and a study has none: set compile_mode = "
                "'default' instead"
            )
        if train.non_finite == "skip":
            raise ConfigError(
                "train.non_finite = 'skip' asks the device after every step, which a study never does: leave it out"
            )

    @property
    def stage_delays(self) -> tuple[int, ...]:
        schedule = schedule_of(self.config)
        return self.delays or tuple(map(schedule.delay, range(schedule.num_stages)))

    @property
    def drift_warmups(self) -> tuple[int, ...] | None:
        """Returns for PACI the number of forwards ahead of the first backward, per stage. None for other schedules."""
        schedule = schedule_of(self.config)
        return tuple(map(schedule.warmup, range(schedule.num_stages))) if schedule.traits.drifts else None

    @property
    def is_synchronous(self) -> bool:
        return not any((*self.stage_delays, *(self.drift_warmups or ())))

    def synchronous(self) -> Cell:
        """Returns the synchronous cell with which this one is compared."""
        # The depth is reset because one_f_one_b has no double depth.
        pipeline = dataclasses.replace(self.config.pipeline, schedule="one_f_one_b", depth="minimum")
        config = dataclasses.replace(self.config, pipeline=pipeline)
        return dataclasses.replace(self, config=config, mode="sync", delays=())

    @property
    def id(self) -> str:
        """Digest of all settings that determine the numbers of the cell, and of nothing else. Settings that are off,
        zero or not given are left out, so that a new field that is off by default does not change old ids."""
        sections: dict[str, Any] = {name: _set_fields(section) for name, section in vars(self.config).items()}
        for name in ("run", "pipeline", "checkpoint", *([] if sections["adapter"] else ["adapter"])):
            del sections[name]
        for name in ("track_alignment", "non_finite"):
            sections["train"].pop(name, None)
        for name in ("prompts", "sample_tokens"):
            sections["evaluation"].pop(name, None)
        for section, choice, usual in (("model", "name", "decoder"), ("data", "loader", "files")):
            if sections[section].get(choice) == usual:  # the only possible value in studies before this field existed
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
                # By the last word of an import path: a predictor that moves to another module stays the same.
                sections["predictor"] = self.predictor.rpartition(".")[2] or _predictor(self.config.optimizer)
                if self.predictor and find_predictor(self.predictor).has_weight:
                    sections["predictor_weight"] = self.predictor_weight
            if len(set(self.stage_delays)) > 1 or self.drift_warmups:
                sections["cut"] = (pipeline.stages, pipeline.layers_per_stage)
                sections["delays"] = (self.stage_delays, self.drift_warmups)
                if recompute_every and not pipeline.layers_per_stage:  # the balanced cut depends on block costs
                    sections["recompute_every"] = recompute_every
            else:
                sections["delays"] = self.stage_delays[0]
        return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def name(self) -> str:
        """Name of the folder of the cell; also shown on the screen."""
        return f"{self.config.optimizer.name.rpartition('.')[2]}-seed{self.config.train.seed}-{self.id}"


def _predictor(section: OptimizerSection) -> str:
    """Returns the name of the predictor that a pipeline uses."""
    has_adamw = section.name == "adamw" or leaves_rest_to_adamw(section)
    return adamw_predictor(section) if has_adamw and not section.adamw_nesterov else "last"


def _set_fields(section: Any) -> dict[str, Any]:
    """Returns the fields that are not off, zero or not given. Where "not given" stands for a value from elsewhere, an
    explicit zero is kept."""
    may_be_missing = {member.name for member in dataclasses.fields(section) if member.default is None}
    return {
        name: value
        for name, value in dataclasses.asdict(section).items()
        if value not in (None, False, "", (), {}) or (name in may_be_missing and value is not None)
    }
