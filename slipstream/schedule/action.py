"""Defines an action, the smallest unit of every schedule.

A schedule is data: a sequence of actions for every stage. This file defines the action, its text form, and the one rule
that says what an action must wait for. Generators, checker, simulator, figures and executor all use that rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    EVALUATE = "E"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a stage. As text, `2F5@v3` is stage 2, forward of microbatch 5 on version 3.

    microbatch  Counted from the start of the run. For UPDATE it is the last microbatch whose gradient the update
                contains, for EVALUATE the index in the evaluation set.
    version     Weights that FORWARD, BACKWARD and EVALUATE read, and that UPDATE writes. Version v contains v updates.
    """

    stage: int
    op: Op
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}@v{self.version}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = re.fullmatch(r"(\d+)([FBUE])(\d+)@v(\d+)", text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not an action: write it as 2F5@v3 (stage, one of F B U E, microbatch, version)"
            )
        stage, op, microbatch, version = match.groups()
        return cls(int(stage), Op(op), int(microbatch), int(version))

    @property
    def key(self) -> Key:
        """Returns what identifies the action among all stages. The key of an evaluation contains the version, because
        the same evaluation is repeated at later versions."""
        return Key(self.stage, self.op, self.microbatch, self.version if self.op is Op.EVALUATE else None)


class Key(NamedTuple):
    """Identifies an action. It is a tuple for speed, because checker and simulator look up several keys for every
    action."""

    stage: int
    op: Op
    microbatch: int
    version: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}" + ("" if self.version is None else f"@v{self.version}")


def requires(action: Action, num_stages: int, global_update: bool) -> list[Key]:
    """Returns the actions that must be finished, on this or another stage, before `action` can begin.

    Only data flow is listed. In addition, each stage plays its own sequence in order. With `global_update` an update
    needs the gradient of the whole batch from every stage, because three things are sums over stages: the norm for
    clipping, the gradient of tied weights, and the check for inf and nan.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.op in (Op.FORWARD, Op.EVALUATE):
        version = action.version if action.op is Op.EVALUATE else None
        return [Key(stage - 1, action.op, microbatch, version)] if stage > 0 else []
    if action.op is Op.BACKWARD:
        own = Key(stage, Op.FORWARD, microbatch)
        return [own] if stage == num_stages - 1 else [own, Key(stage + 1, Op.BACKWARD, microbatch)]
    stages = range(num_stages) if global_update else [stage]
    return [Key(other, Op.BACKWARD, microbatch) for other in stages]
