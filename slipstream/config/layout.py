"""Defines the layout of a run: the number of stages, the layers of each stage, and the number of replicas.

    4               four stages
    2x2             two stages, in each of two replicas
    4/3,4,4,3       four stages with these numbers of layers

A run can change its layout while it runs: after given steps (`pipeline.reshape = ["100=4", "200=2x2"]`), or on request
(`slipstream reshape RUN 4`). The batches stay the same. If the number of replicas changes, each replica reads another
share of every batch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError
from ..schedule import TRAITS
from ..transport.mesh import Mesh
from .rules import validate
from .schema import Config

LAYOUT = re.compile(r"([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?(?:/([0-9]{1,6}(?:,[0-9]{1,6})*))?")

CHANGE = re.compile(r"([1-9][0-9]{0,17})=(.+)")


@dataclass(frozen=True)
class Layout:
    stages: int
    replicas: int = 1
    layers_per_stage: tuple[int, ...] = ()
    """Number of layers of each stage. Empty means that layers are distributed so that stages have equal cost."""

    @classmethod
    def parse(cls, text: str) -> Layout:
        found = LAYOUT.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"{text.strip()[:60]!r} is no layout: write the number of stages, such as 4, replicas after an x, as "
                "in 2x2, and layers of every stage after a /, as in 2/5,5"
            )
        stages, replicas, layers = found.groups()
        return cls(int(stages), int(replicas or 1), tuple(map(int, layers.split(","))) if layers else ())

    @classmethod
    def of(cls, config: Config) -> Layout:
        section = config.pipeline
        return cls(section.stages, section.replicas, section.layers_per_stage)

    def __str__(self) -> str:
        replicas = f"x{self.replicas}" if self.replicas > 1 else ""
        layers = f"/{','.join(map(str, self.layers_per_stage))}" if self.layers_per_stage else ""
        return f"{self.stages}{replicas}{layers}"

    @property
    def size(self) -> int:
        """Returns the number of processes that the layout needs."""
        return self.stages * self.replicas

    def mesh(self, config: Config) -> Mesh:
        return Mesh(self.stages, self.replicas, config.pipeline.placement)

    def applied(self, config: Config) -> Config:
        """Returns the configuration of a run that has this layout from start to end and reads the same batches."""
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
class LayoutChange:
    """A layout, and the step from which a run has it."""

    step: int
    """Number of updates after which the layout changes."""
    layout: Layout


def layout_changes(config: Config) -> list[LayoutChange]:
    """Returns the layout changes of pipeline.reshape, in order."""
    found: list[LayoutChange] = []
    for text in config.pipeline.reshape:
        match = CHANGE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"pipeline.reshape = {text[:60]!r} says no step: write a step and the layout after it, as in 100=4"
            )
        step = int(match[1])
        try:
            found.append(LayoutChange(step, Layout.parse(match[2])))
        except ConfigError as error:
            raise ConfigError(f"pipeline.reshape = {text[:60]!r}: {error}") from error
        if step >= config.train.steps:
            raise ConfigError(
                f"pipeline.reshape = {text[:60]!r} comes when all train.steps = {config.train.steps} are made: use less"
            )
    if [change.step for change in found] != sorted({change.step for change in found}):
        raise ConfigError(
            f"pipeline.reshape = {list(config.pipeline.reshape)} is not in order: sort it by its steps, each step once"
        )
    return found


def _largest_size(config: Config) -> int:
    return max([Layout.of(config).size, *(change.layout.size for change in layout_changes(config))])


def num_processes(config: Config) -> int:
    """Returns the number of processes that a run is launched with."""
    return config.pipeline.processes or _largest_size(config)


def validate_layouts(config: Config) -> None:
    """Checks all layouts, as far as this is possible without the model."""
    section, largest = config.pipeline, _largest_size(config)
    if num_processes(config) < largest:
        raise ConfigError(
            f"pipeline.processes = {section.processes} is less than the {largest} that pipeline.stages x "
            "pipeline.replicas or pipeline.reshape come to: use as many, or leave it out"
        )
    if num_processes(config) > Layout.of(config).size or section.reshape:
        check_changeable(config)
    check_layout_changes(config, lambda layout: layout.applied(config))


def check_layout_changes(config: Config, check: Callable[[Layout], object]) -> None:
    """Calls a function with every layout of pipeline.reshape. A ConfigError that it raises names the change."""
    for text, change in zip(config.pipeline.reshape, layout_changes(config), strict=True):
        try:
            check(change.layout)
        except ConfigError as error:
            raise ConfigError(f"pipeline.reshape = {text!r} is invalid: {error}") from error


def check_changeable(config: Config) -> None:
    if TRAITS[config.pipeline.schedule].steps_alone:
        others = [name for name, traits in TRAITS.items() if not traits.steps_alone]
        raise ConfigError(
            f"pipeline.schedule = {config.pipeline.schedule!r} keeps weights that belong to its stages, and cannot "
            f"change their number: leave pipeline.reshape and pipeline.processes out, or use {' or '.join(others)}"
        )


def layout_at(config: Config, step: int) -> Layout:
    """Returns the layout, according to pipeline.reshape, of a run that starts after `step` updates."""
    passed = [change.layout for change in layout_changes(config) if change.step <= step]
    return passed[-1] if passed else Layout.of(config)


def next_layout_change(config: Config, step: int) -> LayoutChange | None:
    """Returns the first layout change after `step` updates, or None if there is none."""
    return next((change for change in layout_changes(config) if change.step > step), None)
