"""`Schedule`: which actions every stage plays, and what it promises about them (delay, versions, drift).

schedule = Schedule("two_bw", num_stages=4, num_microbatches=4)
for action in schedule.actions(stage=0): ...          # for ever; pass num_steps for a bounded one
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import gt

from .action import Action, Op
from .traits import DEPTHS, SCHEDULES, TRAITS, Place, Traits


class ScheduleError(ValueError):
    """A schedule that cannot exist, or that breaks a promise."""


@dataclass(frozen=True)
class EvaluationSteps(Collection[int]):
    """After every so many steps (0: never) and after the last one, in order. Of a long run there are too many to list,
    or to look through at every step."""

    num_steps: int
    every: int

    @property
    def _regular(self) -> range:
        return range(self.every - 1, self.num_steps, self.every) if self.every > 0 else range(0)

    def __contains__(self, step: object) -> bool:
        return step == self.num_steps - 1 or step in self._regular

    def __iter__(self) -> Iterator[int]:
        yield from self._regular
        if self.num_steps - 1 not in self._regular:
            yield self.num_steps - 1

    def __len__(self) -> int:
        return len(self._regular) + (self.num_steps - 1 not in self._regular)


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage: in which order, for which microbatch, on which version of the weights."""

    name: str
    """Name of the schedule."""
    num_stages: int
    """Number of stages."""
    num_microbatches: int
    """Microbatches in a step, on every stage."""
    num_steps: int | None = None
    """Number of steps. None: forever."""
    depth: str = "minimum"
    """two_bw: "double" keeps twice as many warm-up forwards in flight, which hides the latency of links."""
    sync_start_steps: int = 0
    """Steps that run as one_f_one_b before the schedule begins."""
    first_step: int = 0
    """The first step to play; a resumed run has made this many updates before."""
    global_update: bool = True
    """An update waits for a sum over all stages (clipping, tied weights, inf and nan)."""
    evaluate_after: Collection[int] = field(default=())
    """Steps after which the evaluation set passes through."""
    num_evaluations: int = 0
    """Microbatches of the evaluation set."""

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ScheduleError(f"schedule {self.name!r} is unknown: choose one of {', '.join(SCHEDULES)}")
        if self.depth not in DEPTHS:
            raise ScheduleError(f"depth {self.depth!r} is unknown: choose one of {', '.join(DEPTHS)}")
        if self.depth not in self.traits.depths:
            raise ScheduleError(f"depth {self.depth!r} is made for two_bw, not for {self.name}: use depth 'minimum'")
        if self.num_stages < 1:
            raise ScheduleError(f"{self.num_stages} stages are too few: use at least 1")
        if self.num_steps is not None and self.num_steps < 1:
            raise ScheduleError(f"{self.num_steps} steps are too few: use at least 1")
        if self.first_step < 0 or (self.num_steps is not None and self.first_step > self.num_steps):
            raise ScheduleError(f"a run of {self.num_steps} steps cannot begin at step {self.first_step}")
        if self.sync_start_steps < 0:
            raise ScheduleError(f"{self.sync_start_steps} synchronous steps cannot be: use 0 or more")
        if self.num_microbatches < self.min_microbatches:
            raise ScheduleError(
                f"{self.num_microbatches} microbatches are too few for {self.name} on {self.num_stages} stages "
                f"at {self.depth} depth: use at least {self.min_microbatches}"
            )

    @property
    def traits(self) -> Traits:
        return TRAITS[self.name]

    @property
    def min_microbatches(self) -> int:
        """two_bw: one more than the first stage's warm-up, or the update of batch t comes too late for batch t + 2."""
        return self.warmup(0) + 1 if self.traits.has_slack else 1

    def warmup(self, stage: int) -> int:
        """two_bw: forwards in flight before the first backward."""
        return (self.num_stages - 1 - stage) * (2 if self.depth == "double" else 1)

    def delay(self, stage: int) -> int:
        """Updates between the weights a batch runs on and the weights its gradient is applied to."""
        return self.traits.delay(self.num_stages, stage)

    def num_versions(self, stage: int) -> int:
        """Weight versions that the stage keeps."""
        return self.delay(stage) + 1

    @property
    def max_in_flight(self) -> int:
        """Forwards without their backward, on the stage that has the most: the first."""
        ahead = self.traits.ahead(self.num_stages, self.num_microbatches, self.warmup(0))
        return max(ahead, self.num_stages - 1) + 1

    def max_drift(self, stage: int) -> int:
        """PACI: the largest number of updates between the forward and the backward of a microbatch; 0 elsewhere."""
        return -(-(self.num_stages - 1 - stage) // self.num_microbatches) if self.traits.drifts else 0

    def horizon(self, stage: int, step: int) -> int:
        """How many updates later the version that this step writes will be used: 0 while synchronous."""
        return 0 if step < self.sync_start_steps else self.delay(stage)

    def actions(self, stage: int) -> Iterator[Action]:
        num_sync = self.sync_start_steps if self.num_steps is None else min(self.sync_start_steps, self.num_steps)
        first, turn = self.first_step, max(self.first_step, num_sync)  # the schedule itself begins at the turn
        num_steps = None if self.num_steps is None else self.num_steps - turn
        shape = stage, self.num_stages, self.num_microbatches
        start = TRAITS["one_f_one_b"].generate(Place(*shape, 0, first, turn - first, 0))
        rest = self.traits.generate(Place(*shape, self.warmup(stage), turn, num_steps, num_sync))
        actions = chain(start, rest if num_steps != 0 else ())
        return self._with_evaluations(actions, stage) if self.num_evaluations and self.evaluate_after else actions

    def _with_evaluations(self, actions: Iterator[Action], stage: int) -> Iterator[Action]:
        """Lets the evaluation set pass through between two microbatches, without a drain.

        After step t, every stage holds the weights of t + 1 updates when the first microbatch of the first batch that
        knows them comes by: that is where the set goes in, at the same place among the forwards of every stage. Near
        the end no such batch comes; there it goes in before the next update. pipedream and paci have no moment at which
        all stages hold the same number of updates: they evaluate what each stage has when the next batch comes by.
        """
        # After the update that a run is taken up from, its evaluation is still to come.
        is_sorted = isinstance(self.evaluate_after, EvaluationSteps)
        steps = self.evaluate_after if is_sorted else sorted(set(self.evaluate_after))
        coming = (step for step in steps if step >= self.first_step - 1)
        due = next(coming, None)
        consistent = not self.traits.steps_alone

        def evaluate(is_known: Callable[[int], bool]) -> Iterator[Action]:
            nonlocal due
            while due is not None and is_known(due):
                for microbatch in range(self.num_evaluations):
                    yield Action(stage, Op.EVALUATE, microbatch, due + 1)
                due = next(coming, None)

        for action in actions:
            if action.op is Op.FORWARD and action.microbatch % self.num_microbatches == 0:
                step = action.microbatch // self.num_microbatches
                yield from evaluate(partial(self._is_known, stage, step, consistent))
            elif action.op is Op.UPDATE and consistent:
                yield from evaluate(partial(gt, action.version - 1))
            yield action
        if self.num_steps is not None:
            yield from evaluate(partial(gt, self.num_steps))

    def _is_known(self, stage: int, step: int, consistent: bool, evaluated: int) -> bool:
        """Whether the batch of `step` runs with weights that have seen the update of `evaluated`."""
        return evaluated + 1 + (self.horizon(stage, evaluated) if consistent else 0) <= step
