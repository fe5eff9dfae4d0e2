"""The shape of a run: into how many stages its model is cut, where, and in how many replicas.

    4               four stages
    2x2             two stages, in each of two replicas
    4/3,4,4,3       four stages of so many layers

A run may change it on its way: after given steps (`pipeline.reshape = ["100=4", "200=2x2"]`), or when it is told to
(`slipstream reshape RUN 4`). The batches stay what they were: with other replicas, each takes another share of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import Config, ConfigError, validate
from .pipeline.comm import Mesh
from .schedule import TRAITS

SHAPE = re.compile(r"([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?(?:/([0-9]{1,6}(?:,[0-9]{1,6})*))?")
MOMENT = re.compile(r"([1-9][0-9]{0,17})=(.+)")
COMMAND_NAME = "reshape.txt"
"""The file in a run's folder by which it is told to change its shape."""


@dataclass(frozen=True)
class Shape:
    stages: int
    replicas: int = 1
    layers_per_stage: tuple[int, ...] = ()
    """Empty: balanced by their cost."""

    @classmethod
    def parse(cls, text: str) -> Shape:
        found = SHAPE.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"{text.strip()[:60]!r} is no shape: write the number of stages, such as 4, replicas after an x, as in "
                "2x2, and layers of every stage after a /, as in 2/5,5"
            )
        stages, replicas, layers = found.groups()
        return cls(int(stages), int(replicas or 1), tuple(map(int, layers.split(","))) if layers else ())

    @classmethod
    def of(cls, config: Config) -> Shape:
        section = config.pipeline
        return cls(section.stages, section.replicas, section.layers_per_stage)

    def __str__(self) -> str:
        replicas = f"x{self.replicas}" if self.replicas > 1 else ""
        layers = f"/{','.join(map(str, self.layers_per_stage))}" if self.layers_per_stage else ""
        return f"{self.stages}{replicas}{layers}"

    @property
    def size(self) -> int:
        """Processes that it takes."""
        return self.stages * self.replicas

    def mesh(self, config: Config) -> Mesh:
        return Mesh(self.stages, self.replicas, config.pipeline.placement)

    def applied(self, config: Config) -> Config:
        """The configuration of a run that has this shape, makes the same steps, and does not change it."""
        section = config.pipeline
        microbatches, rest = divmod(section.microbatches * section.replicas, self.replicas)
        if rest:
            raise ConfigError(
                f"a step's {section.microbatches * section.replicas} microbatches cannot be shared by {self.replicas} "
                "replicas: use a number that divides them"
            )
        changed = dataclasses.replace(
            section,
            stages=self.stages,
            replicas=self.replicas,
            layers_per_stage=self.layers_per_stage,
            microbatches=microbatches,
            processes=num_processes(config),
            reshape=(),
        )
        applied = dataclasses.replace(config, pipeline=changed)
        validate(applied)
        return applied


@dataclass(frozen=True)
class Moment:
    """When a run is to have which shape."""

    step: int
    """Updates made by then."""
    shape: Shape


def moments(config: Config) -> list[Moment]:
    """What pipeline.reshape says, in order."""
    found: list[Moment] = []
    for text in config.pipeline.reshape:
        match = MOMENT.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"pipeline.reshape = {text[:60]!r} says no step: write a step and the shape after it, as in 100=4"
            )
        step = int(match[1])
        try:
            found.append(Moment(step, Shape.parse(match[2])))
        except ConfigError as error:
            raise ConfigError(f"pipeline.reshape = {text[:60]!r}: {error}") from error
        if step >= config.train.steps:
            raise ConfigError(
                f"pipeline.reshape = {text[:60]!r} comes when all train.steps = {config.train.steps} are made: use less"
            )
    if [moment.step for moment in found] != sorted({moment.step for moment in found}):
        raise ConfigError(f"pipeline.reshape = {list(config.pipeline.reshape)} is not in order: sort it by its steps")
    return found


def num_processes(config: Config) -> int:
    """That a run is started with."""
    section = config.pipeline
    if section.processes is not None:
        return section.processes
    return max(section.stages * section.replicas, *(moment.shape.size for moment in moments(config)), 1)


def validate_shapes(config: Config) -> None:
    """All but what the model says to them."""
    section, shapes = config.pipeline, [moment.shape for moment in moments(config)]
    size = section.stages * section.replicas
    if section.processes is not None and section.processes < (most := max([size, *(shape.size for shape in shapes)])):
        raise ConfigError(
            f"pipeline.processes = {section.processes} is less than the {most} that pipeline.stages x "
            "pipeline.replicas or pipeline.reshape come to: use as many, or leave it out"
        )
    if num_processes(config) > size or shapes:
        check_changeable(config)
    for text, shape in zip(section.reshape, shapes, strict=True):
        try:
            shape.applied(config)
        except ConfigError as error:
            raise ConfigError(f"pipeline.reshape = {text!r} cannot be: {error}") from error


def check_changeable(config: Config) -> None:
    if TRAITS[config.pipeline.schedule].steps_alone:
        others = [name for name, traits in TRAITS.items() if not traits.steps_alone]
        raise ConfigError(
            f"pipeline.schedule = {config.pipeline.schedule!r} keeps weights that belong to its stages, and cannot "
            f"change their number: leave pipeline.reshape and pipeline.processes out, or use {' or '.join(others)}"
        )


def shape_at(config: Config, step: int) -> Shape:
    """What pipeline.reshape comes to for a run that begins after so many updates."""
    passed = [moment.shape for moment in moments(config) if moment.step <= step]
    return passed[-1] if passed else Shape.of(config)


def next_moment(config: Config, step: int) -> Moment | None:
    """The first after so many updates."""
    return next((moment for moment in moments(config) if moment.step > step), None)


# ---- the command file


def write_command(folder: Path, shape: Shape) -> None:
    draft = folder / f"{COMMAND_NAME}.draft"
    draft.write_text(f"{shape}\n", encoding="utf-8")
    draft.replace(folder / COMMAND_NAME)


def parameter_of(name: str) -> str | None:
    """Whose part of the state a tensor is; None: of no parameter. See slipstream/pipeline/state.py."""
    kind, _, rest = name.partition("/")
    if kind == "products":
        return None
    return rest.split("/")[1 if kind == "working" else 0]


def destinations(holders: Sequence[Collection[str]], mesh: Mesh, name: str) -> list[int]:
    """The ranks that need a tensor of the state. holders: by stage, the parameters it holds."""
    parameter = parameter_of(name)
    stages = [0] if parameter is None else [s for s, held in enumerate(holders) if parameter in held]
    return [mesh.rank(replica, stage) for stage in stages for replica in range(mesh.num_replicas)]
