"""What one stage does next: the vocabulary of every schedule.

A schedule is data: for every stage a sequence of actions. This file defines the action, its text form and the one rule
that says what an action has to wait for; generators, checker, simulator, figures and executor all use that rule.
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
    """One thing a stage does, printed as it is spoken: `2F5@v3` is stage 2, forward of microbatch 5 on version 3.

    microbatch  counted from the start of the run; for UPDATE the last microbatch whose gradient it takes in, for
                EVALUATE the index in the evaluation set
    version     weights read by FORWARD, BACKWARD and EVALUATE, written by UPDATE; version v holds v updates
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
        """What identifies the action among all stages. An evaluation returns at later versions, so it keeps its own."""
        return Key(self.stage, self.op, self.microbatch, self.version if self.op is Op.EVALUATE else None)


class Key(NamedTuple):
    """A tuple, because checker and simulator look up a few of them for every action."""

    stage: int
    op: Op
    microbatch: int
    version: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}" + ("" if self.version is None else f"@v{self.version}")


def requires(action: Action, num_stages: int, global_update: bool) -> list[Key]:
    """The actions that must be finished, on this or another stage, before `action` can begin.

    Only data flow is listed; that a stage works through its own sequence in order is understood. With `global_update`
    an update needs the whole batch's gradient from every stage, because the norm for clipping, the gradient of tied
    weights and the verdict on inf and nan are sums over stages.
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
