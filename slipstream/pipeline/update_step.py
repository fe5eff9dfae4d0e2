"""The update of one step, from the end of its batch to its deadline.

The schedule determines when an update must be finished. two_bw leaves time before that. Then the sums over stages, and
on a GPU the update itself, run in a background thread, on a CUDA stream of their own, while the stage continues to
compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto

import torch

from ..errors import NonFiniteError
from ..schedule import Action, Schedule
from ..transport.base import Transport
from ..transport.computing_threads import begin_computing_thread
from ..transport.streams import Event, Streams
from .clock import Activity, Clock, Mark
from .reduction import Finished, Later, Reducer, Sums
from .update import Updater
from .weight_versions import WeightVersions
from .zero1 import share


class Place(Enum):
    """Where and when the work of an update is done."""

    FOREGROUND = auto()
    """Everything at the deadline, because the schedule leaves no time before it."""
    SUMS_IN_BACKGROUND = auto()
    """The sums at once in the background, and the update at the deadline, because an evaluation still reads the
    masters, or because the device is none of OVERLAPPING."""
    BACKGROUND = auto()
    """Everything in the background, before the deadline."""


OVERLAPPING = {"cuda"}
"""Types of devices on which an update overlaps with the computation of its stage. On a CPU both need the same cores,
and two threads that take them from each other are slower than one (docs/development/decisions.md)."""


class State(Enum):
    """How far the update of a step is."""

    WAITING = auto()
    """The update has not been started, because the stage has not paused since the batch ended."""
    RUNNING = auto()
    """The background thread works on the update."""
    DONE = auto()


class UpdateMaker:
    """Makes the updates of one stage."""

    def __init__(
        self,
        transport: Transport,
        schedule: Schedule,
        versions: WeightVersions,
        updater: Updater,
        streams: Streams,
        clock: Clock,
        owners: Mapping[str, int] | None,
        reduction_dtype: torch.dtype | None,
        skip_non_finite: bool,
    ) -> None:
        """`owners` maps each parameter to the replica that steps it. None means that every replica does. With
        `skip_non_finite`, an update with an inf or nan is skipped. Otherwise it raises."""
        self._transport, self._schedule, self._versions, self._updater = transport, schedule, versions, updater
        self._owners, self._skips = owners, skip_non_finite
        self.streams, self.clock = streams, clock
        self.background = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"update of stage {transport.stage}",
            initializer=begin_computing_thread,
            initargs=(torch.get_num_threads(),),
        )
        # The last backward of a batch goes from the last stage to the first within this many steps.
        self.later = Later(self.background, 1 - (-(schedule.num_stages - 1) // schedule.num_microbatches))
        self._reducer = Reducer(
            transport,
            [group.name for group in updater.groups],
            updater.group_of,
            updater.tied,
            schedule.global_update,
            owners,
            reduction_dtype,
            self.later,
        )

    def reduce(self, step: int, finished: Finished) -> Sums:
        return self._reducer.reduce(finished, lambda: f"the sums over stages for the update of step {step + 1}")

    def apply(self, step: int, finished: Finished, sums: Sums) -> None:
        self.streams.wait_for_copies()  # a snapshot may still be copying what this overwrites
        if sums.non_finite is None:
            scales = [
                1.0 if group.clip_norm is None else min(1.0, group.clip_norm / (square**0.5 + 1e-6))
                for group, square in zip(self._updater.groups, sums.squared_norms, strict=True)
            ]
            horizon = self._schedule.horizon(self._transport.stage, step)
            self._updater.apply(step, finished.gradients, scales, horizon)
        elif self._skips:
            self._updater.skip()
        else:
            raise NonFiniteError(f"step {step + 1} stops the run: {sums.non_finite}")
        if self._owners is not None:
            waiting = lambda: f"the other replicas' part of the update of step {step + 1}"  # noqa: E731
            share(self._transport, self._owners, self._versions.next_weights(), waiting)


class UpdateStep:
    """The update of one step. The stage calls `start` when it pauses, and `finish` at the deadline."""

    def __init__(self, maker: UpdateMaker, step: int, finished: Finished, place: Place) -> None:
        self.step, self.place, self.state = step, place, State.WAITING
        self._maker, self._finished = maker, finished
        self._batch_end: Event = None if place is Place.FOREGROUND else maker.streams.now()
        self._job: Future[tuple[Sums, Event]] | None = None
        self._marks: tuple[Mark, Mark] | None = None

    def start(self) -> None:
        """Starts the background part of the update. Call it only when the stage computes or waits. Before that, the
        stage has messages to send that its neighbours wait for, and the background thread would compete for the
        interpreter."""
        if self.state is State.WAITING and self.place is not Place.FOREGROUND:
            self.state = State.RUNNING
            self._job = self._maker.background.submit(self._run)

    def _run(self) -> tuple[Sums, Event]:
        maker, finished = self._maker, self._finished
        used = [*finished.gradients.values(), *([] if finished.loss is None else [finished.loss])]
        with maker.streams.updating(self._batch_end, used):
            sums = maker.reduce(self.step, finished)
            if self.place is Place.BACKGROUND:
                start = maker.clock.mark_background(True)
                maker.apply(self.step, finished, sums)
                self._marks = start, maker.clock.mark_background(False)
            return sums, maker.streams.now()

    def finish(self, action: Action) -> Sums:
        """Waits for the background part, and makes the update if the background has not made it."""
        maker = self._maker
        if self.place is Place.FOREGROUND:
            sums = maker.reduce(self.step, self._finished)
        else:
            assert self._job is not None, f"{action} comes before the stage paused"
            sums, done = self._job.result()
            maker.streams.compute_after(done)
        if self._marks is not None:
            maker.clock.add_background(action, *self._marks)
        else:
            maker.clock.enter(Activity.UPDATE, action)
            maker.apply(self.step, self._finished, sums)
        self.state = State.DONE
        return sums
