"""Saves the checkpoints of a pipeline, and loads them in any number of stages.

A stage is saved after its own update c. Other stages may not have reached update c yet, or may be past it: the pipeline
is not drained. A checkpoint is complete when the parts of all stages for update c have been written.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import CheckpointError, Part, Store
from ..checkpoint.reading import FOLDER_NAME, state_of
from ..checkpoint.stage_state import StageState
from ..errors import in_one_line
from ..transport.base import Transport, gather_objects
from .pipeline import Pipeline


class StageWriter:
    """Writes the part of every checkpoint that one process has, in a background thread, one at a time.

    Problems with a disk do not reach training: the writer reports them in one sentence, and the step has no checkpoint.
    """

    def __init__(
        self, pipeline: Pipeline, store: Store, say: Callable[[str], None], facts: Mapping[str, Any] | None = None
    ) -> None:
        """facts: data in JSON that every checkpoint holds in addition to the state."""
        transport = pipeline.transport
        self.pipeline: Pipeline | None = pipeline
        self.latest: int | None = None
        """Latest step whose checkpoint was started."""
        self.has_failed = False
        """Whether the latest checkpoint could not be written. Ask when the writer is not busy."""
        self._store, self._say, self._facts = store, say, dict(facts or {})
        self._is_writing = transport.replica == 0 or pipeline.is_sharded
        """Whether this process has a part at all. Replicas have the same weights, so one of them saves."""
        self._part_name = f"stage-{transport.stage}" + (f".replica-{transport.replica}" if pipeline.is_sharded else "")
        self._num_parts = transport.num_stages * (transport.num_replicas if pipeline.is_sharded else 1)
        self._copies: Mapping[str, Tensor] = {}
        """Copies of the state, whose memory is reused from one checkpoint to the next. The thread uses them while it is
        busy."""
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._has_left_out = False

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int) -> None:
        """Starts to write the state after update `step`. Skips it if the previous one is still being written."""
        if not self._is_writing:
            return
        if self.is_busy:
            self.leave_out(step)
            return
        assert self.pipeline is not None, "this writer has retired"
        take = self.pipeline.snapshot(self._copies)
        self.latest, self.has_failed, self._began = step, True, time.perf_counter()
        # The thread is a daemon: a process that fails must not wait for a copy from a device that is gone.
        self._thread = threading.Thread(target=self._write, args=(step, take), name="checkpoint", daemon=True)
        self._thread.start()

    def leave_out(self, step: int) -> None:
        """Skips a checkpoint, because this process or another one is still writing the previous one. Reports only the
        first time."""
        if not self._is_writing or self._has_left_out:
            return
        self._has_left_out = True
        since = f" has been under way for {time.perf_counter() - self._began:.1f} s" if self.is_busy else " is not done"
        self._say(
            f"step {step} has no checkpoint, for that of step {self.latest}{since}: the disk is slower than "
            "checkpoints are asked for, save less often (further ones are left out silently)"
        )

    def _write(self, step: int, take: Callable[[], StageState]) -> None:
        try:
            state = take()
            if self.pipeline is not None:
                self._copies = state.tensors
            part = Part(self._part_name, state.tensors, {**self._facts, "state": state.facts})
            is_whole = self._store.write(step, part, self._num_parts)
            self.has_failed = False
            if is_whole:
                self._say(f"saved step {step} in {time.perf_counter() - self._began:.1f} s")
        except Exception as error:  # one of the copy would otherwise go unnoticed
            reason = error if isinstance(error, CheckpointError) else in_one_line(error)
            self._say(f"step {step} has no checkpoint: {reason}")

    def wait(self) -> None:
        """Waits until the write in progress is complete."""
        if self._thread is not None:
            self._thread.join()

    def retire(self) -> None:
        """Releases the pipeline and all copies of its state. A write in progress continues."""
        self.pipeline, self._copies = None, {}


class Checkpoints:
    """The checkpoints of a run. Every stage constructs it with the same arguments.

        with Checkpoints(transport, "runs/mine") as checkpoints:
            pipeline = Pipeline(transport, layers, start=checkpoints.load(), ...)
            for report in pipeline.run():
                if isinstance(report, StepReport) and (report.step + 1) % 100 == 0:
                    checkpoints.save(pipeline)

    transport    the connection to the other stages, from `launch`
    folder       the folder of the run; the checkpoints are in its folder `checkpoints`
    keep_last    number of newest checkpoints to keep
    keep_every   keep also checkpoints whose number of updates is divisible by this; 0 means no others
    say          called with one sentence for every checkpoint that is complete, damaged or cannot be written

    A checkpoint does not depend on the number of stages and replicas: another layout may load it. It appears in the
    folder at once, when all stages have written it. Nothing in it is unpickled.
    """

    def __init__(
        self,
        transport: Transport,
        folder: Path | str,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        self._transport, self._say = transport, say
        self._is_first = transport.stage == 0 and transport.replica == 0
        self._writer: StageWriter | None = None
        store = Store(Path(folder) / FOLDER_NAME, keep_last, keep_every)
        if self._is_first:
            store.clean()
        # The number is the same for all processes of a launch: parts of two launches must never form one checkpoint.
        attempt = self._sum(secrets.randbits(62) if self._is_first else 0)
        self._store = Store(store.folder, keep_last, keep_every, f"{attempt:016x}")

    def load(self, step: int | None = None) -> StageState | None:
        """Returns the state to pass to `Pipeline` as `start`, or None if there is no checkpoint. All stages must call
        it. step: number of updates; None means the newest checkpoint that is complete and intact."""
        if step is None:
            found = self._store.newest(self._say) if self._is_first else None
            step = self._sum((-1 if found is None else found.step) if self._is_first else 0)
        return None if step < 0 else state_of(self._store.open(step, verify=False))

    def save(self, pipeline: Pipeline) -> None:
        """Saves the pipeline after its latest update. All stages must call it after the same update: in the loop over
        `run`, after a StepReport, or after the loop. Training waits only for a copy of the state, and for the previous
        checkpoint if that is still being written."""
        if self._writer is None or self._writer.pipeline is not pipeline:
            if self._writer is not None:
                self._writer.wait()
            self._writer = StageWriter(pipeline, self._store, self._say)
        self._writer.wait()
        if self._writer.latest != pipeline.num_updates:
            self._writer.save(pipeline.num_updates)

    def close(self) -> None:
        """Waits until all stages have written the last checkpoint. All stages must call it. Raises CheckpointError if
        one of them could not write its part."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.wait()
        if self._sum(int(writer is not None and writer.has_failed)):
            raise CheckpointError(f"the last checkpoint is not complete in {self._store.folder}: a stage said why")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._writer is not None:
            self._writer.wait()

    def _sum(self, number: int) -> int:
        """Returns the sum of the numbers of all stages and replicas, when all of them have called it."""
        waiting = lambda: "the others' checkpoints"  # noqa: E731
        parts = gather_objects(self._transport, str(number).encode(), waiting)
        total = torch.tensor([sum(map(int, parts))], device=self._transport.device)
        if self._transport.num_replicas > 1:
            self._transport.add_replicas([total]).wait(waiting)
        return int(total)
