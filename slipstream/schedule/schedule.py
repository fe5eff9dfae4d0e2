"""Defines `Schedule`: the actions of every stage, and the properties it promises (delay, versions, drift).

    schedule = Schedule("two_bw", num_stages=4, num_microbatches=4)
    for action in schedule.actions(stage=0): ...          # forever; pass num_steps for a bounded one

check.py verifies that a schedule has these properties.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from .action import Action, Op
from .generators import Place, one_f_one_b
from .traits import DEPTHS, SCHEDULES, TRAITS, Traits


class ScheduleError(ValueError):
    """Raised for a schedule that cannot exist, or that breaks a promise."""


@dataclass(frozen=True)
class EvaluationSteps(Collection[int]):
    """The steps after which a run evaluates, in order: every `every` steps (0 means none of these), and after the last
    step.

    In a long run there are too many to list them, or to search a list at every step.
    """

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
    """The actions of every stage: their order, their microbatches, and the versions of the weights they use."""

    name: str
    """Name of the schedule."""
    num_stages: int
    """Number of stages."""
    num_microbatches: int
    """Number of microbatches in a step, on every stage."""
    num_steps: int | None = None
    """Number of steps. None means forever."""
    depth: str = "minimum"
    """Depth of two_bw. "double" keeps twice as many warm-up forwards in flight, which hides the latency of links."""
    sync_start_steps: int = 0
    """Number of steps that run as one_f_one_b before the schedule begins."""
    first_step: int = 0
    """First step to play. A resumed run has made this many updates before."""
    global_update: bool = True
    """Whether an update waits for a sum over all stages (clipping, tied weights, inf and nan)."""
    evaluate_after: Collection[int] = ()
    """Steps after which the evaluation set passes through the pipeline."""
    num_evaluations: int = 0
    """Number of microbatches of the evaluation set."""

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
            raise ScheduleError(f"{self.sync_start_steps} synchronous steps are too few: use 0 or more")
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
        """Returns the smallest number of microbatches in a step.

        For two_bw it is one more than the warm-up of the first stage. With fewer, the update of batch t would come too
        late for batch t + 2.
        """
        return self.warmup(0) + 1 if self.traits.has_slack else 1

    def warmup(self, stage: int) -> int:
        """Returns the number of forwards in flight before the first backward, for two_bw."""
        return (self.num_stages - 1 - stage) * (2 if self.depth == "double" else 1)

    def delay(self, stage: int) -> int:
        """Returns the number of updates between the weights a batch runs on and the weights its gradient is applied
        to."""
        return self.traits.delay(self.num_stages, stage)

    def num_versions(self, stage: int) -> int:
        """Returns the number of weight versions that the stage keeps."""
        return self.delay(stage) + 1

    @property
    def max_in_flight(self) -> int:
        """Returns an upper bound on the number of microbatches in flight on the first stage, which has the most."""
        ahead = self.traits.ahead(self.num_stages, self.num_microbatches, self.warmup(0))
        return max(ahead, self.num_stages - 1) + 1

    def max_drift(self, stage: int) -> int:
        """Returns the largest number of updates between the forward and the backward of a microbatch. It is 0 for all
        schedules except PACI."""
        return -(-(self.num_stages - 1 - stage) // self.num_microbatches) if self.traits.drifts else 0

    def horizon(self, stage: int, step: int) -> int:
        """Returns the number of updates after which the version that this step writes will be used. It is 0 in the
        synchronous start."""
        return 0 if step < self.sync_start_steps else self.delay(stage)

    def actions(self, stage: int) -> Iterator[Action]:
        num_sync = self.sync_start_steps if self.num_steps is None else min(self.sync_start_steps, self.num_steps)
        first, turn = self.first_step, max(self.first_step, num_sync)  # the schedule itself begins at `turn`
        num_steps = None if self.num_steps is None else self.num_steps - turn
        shape = stage, self.num_stages, self.num_microbatches
        start = one_f_one_b(Place(*shape, 0, first, turn - first, 0))
        rest = self.traits.generate(Place(*shape, self.warmup(stage), turn, num_steps, num_sync))
        actions = chain(start, rest if num_steps != 0 else ())
        return self._with_evaluations(actions, stage) if self.num_evaluations and self.evaluate_after else actions

    def _with_evaluations(self, actions: Iterator[Action], stage: int) -> Iterator[Action]:
        """Inserts the evaluation set between two microbatches, without draining the pipeline.

        The evaluation after step t uses the weights of t + 1 updates. Every stage has these weights when the first
        microbatch of the first batch that runs with them arrives. The set is inserted there, at the same place among
        the forwards of every stage. Near the end no such batch follows, so the set is inserted before the next update.
        In pipedream and paci the stages never have the same number of updates at the same time. There each stage
        evaluates with the weights it has when the next batch arrives.
        """
        # A resumed run still has to make the evaluation after the update it resumes from.
        is_sorted = isinstance(self.evaluate_after, EvaluationSteps)
        steps = self.evaluate_after if is_sorted else sorted(set(self.evaluate_after))
        coming = (step for step in steps if step >= self.first_step - 1)
        due = next(coming, None)
        consistent = not self.traits.steps_alone

        def evaluate(step: int, waits: bool = False) -> Iterator[Action]:
            """Yields the evaluations after steps before `step`. With `waits`, only those after updates that the weights
            of the batch of `step` contain."""
            nonlocal due
            while due is not None and due + (self.horizon(stage, due) if waits else 0) < step:
                for microbatch in range(self.num_evaluations):
                    yield Action(stage, Op.EVALUATE, microbatch, due + 1)
                due = next(coming, None)

        for action in actions:
            if action.op is Op.FORWARD and action.microbatch % self.num_microbatches == 0:
                yield from evaluate(action.microbatch // self.num_microbatches, waits=consistent)
            elif action.op is Op.UPDATE and consistent:
                yield from evaluate(action.version - 1)
            yield action
        if self.num_steps is not None:
            yield from evaluate(self.num_steps)
