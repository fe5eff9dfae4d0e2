"""One cell of a study: a configuration as `slipstream train` takes it, and what only a study may choose.

Two cells that would compute the same numbers have the same id, and are run once: a synchronous run, for one, does not
care about error feedback, so a grid over its coefficient runs one of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ..config import Config, ConfigError, schedule_of
from .predictors import PREDICTORS

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
    predictor: str = "last"
    """What foretells the next update, for error feedback: see study.predictors."""
    predictor_weight: float = 0.5
    """two_term: how much of the change between the last two updates is expected to happen again."""
    compute_dtype: str | None = None
    """Of forward and backward; the masters keep train.dtype. None: that one."""
    compile_mode: str | None = None
    """torch.compile's, of forward and backward: default, or reduce-overhead for CUDA graphs. None: not compiled."""

    def validate(self) -> None:
        """What is the study's own; the configuration is looked at by `parts.check`."""
        if self.predictor not in PREDICTORS:
            raise ConfigError(f"predictor = {self.predictor!r} is unknown: choose one of {', '.join(PREDICTORS)}")
        for name, known in (("compute_dtype", COMPUTE_DTYPES), ("compile_mode", COMPILE_MODES)):
            if getattr(self, name) not in (None, *known):
                raise ConfigError(f"{name} = {getattr(self, name)!r} is unknown: choose one of {', '.join(known)}")
        stages = self.config.pipeline.stages
        if self.delays and len(self.delays) != stages:
            raise ConfigError(
                f"delays = {list(self.delays)} has not one entry for each of pipeline.stages = {stages}: give {stages}"
            )
        if any(delay < 0 for delay in self.delays):
            raise ConfigError(f"delays = {list(self.delays)} cannot be: use 0 or more for every stage")
        if self.delays and self.config.pipeline.schedule == "paci":
            raise ConfigError("delays are those of weight versions, and paci keeps none: use another schedule")
        if self.predictor == "momentum" and self.config.optimizer.name not in ("muon", "adamw"):
            raise ConfigError(
                f"predictor = 'momentum' looks into muon and adamw, not into optimizer.name = "
                f"{self.config.optimizer.name!r}: use another predictor"
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
        if schedule.name != "paci":
            return None
        return tuple(schedule.num_stages - 1 - stage for stage in range(schedule.num_stages))

    @property
    def is_synchronous(self) -> bool:
        return not any(self.stage_delays) and not any(self.drift_warmups or ())

    def synchronous(self) -> Cell:
        """The cell this one is measured against."""
        config = self.config
        return dataclasses.replace(
            self,
            config=dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, schedule="one_f_one_b")),
            mode="sync",
            delays=(),
        )

    @property
    def id(self) -> str:
        """Of everything that decides its numbers, and of nothing else."""
        sections = dataclasses.asdict(self.config)
        for name in ("run", "pipeline"):
            del sections[name]
        for name in ("track_alignment", "non_finite"):
            del sections["train"][name]
        pipeline = self.config.pipeline
        sections["microbatches"] = pipeline.microbatches
        sections["compute"] = (self.compute_dtype or self.config.train.dtype, self.compile_mode)
        if self.is_synchronous:
            del sections["optimizer"]["error_feedback"]
        else:
            sections["sync_start_steps"] = pipeline.sync_start_steps
            if self.config.optimizer.error_feedback != 0:
                sections["predictor"] = self.predictor
                if self.predictor == "two_term":
                    sections["predictor_weight"] = self.predictor_weight
            if len(set(self.stage_delays)) > 1 or self.drift_warmups:
                sections["cut"] = (pipeline.stages, pipeline.layers_per_stage)
                sections["delays"] = (self.stage_delays, self.drift_warmups)
            else:
                sections["delays"] = self.stage_delays[0]
        return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def name(self) -> str:
        """Of its folder, and on the screen."""
        return f"{self.config.optimizer.name.rpartition('.')[2]}-seed{self.config.train.seed}-{self.id}"
