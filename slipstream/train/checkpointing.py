"""Decides when a run saves a checkpoint. `StageWriter` of pipeline/checkpoints.py writes it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from ..checkpoint import Store
from ..checkpoint.hugging_face import fingerprint
from ..checkpoint.reading import FOLDER_NAME
from ..config.schema import Config
from ..model.spec import ModelSpec
from ..pipeline import Pipeline, Requests, StepReport
from ..pipeline.checkpoints import StageWriter
from ..transport.environment import is_first_process
from ..transport.stage_processes import INTERRUPTED, is_ignored

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
"""Signals that a run handles. SIGTERM and SIGHUP: save and exit with success. SIGUSR1: save and continue. SIGINT: save
and exit as interrupted. A second SIGINT ends the run at once."""


class SignalRequests:
    """Collects the requests of this process to all processes: to save or to stop, after a signal or when a checkpoint
    is due."""

    def __init__(self, every_minutes: float) -> None:
        self._seconds = 60 * every_minutes
        self._saved_at = time.monotonic()
        self._save = self._stop = self.was_interrupted = False
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._hear) for n in SIGNALS if not is_ignored(n)}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them while stages start

    def close(self) -> None:
        """Restores the signal handlers that were installed before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal.

        A request to stop needs no request to save, because a run that stops saves a checkpoint at its end.
        """
        self._save = self._save or number == signal.SIGUSR1
        self._stop = self._stop or number != signal.SIGUSR1
        if number == signal.SIGINT:
            self.was_interrupted = True
            signal.signal(number, self._before[signal.SIGINT])
            if is_first_process():
                print(INTERRUPTED, file=sys.stderr, flush=True)

    def ask_to_save(self) -> None:
        """Makes the next request one to save, as SIGUSR1 does."""
        self._save = True

    def __call__(self) -> Requests:
        is_due = 0 < self._seconds <= time.monotonic() - self._saved_at
        requests = Requests(save=self._save or is_due, stop=self._stop)
        if requests.save:
            self._save, self._saved_at = False, time.monotonic()
        return requests


def checkpoint_store(config: Config, folder: Path, attempt: str | None = None) -> Store:
    section = config.checkpoint
    return Store(folder / FOLDER_NAME, section.keep_last, section.keep_every, attempt)


def batch_facts(config: Config, model: ModelSpec) -> dict[str, Any]:
    """Returns the settings that decide which text a step reads.

    A run can resume in another layout as long as these stay the same.
    """
    microbatches = config.pipeline.microbatches * config.pipeline.replicas
    return {
        "sequences_per_step": microbatches * config.train.microbatch_size,
        "sequence_length": model.sequence_length,
        "seed": config.train.seed,
    }


def base_facts(model: ModelSpec) -> dict[str, str] | None:
    """Returns facts that identify the folder that frozen weights are read from: a checkpoint does not have them. None
    means that there is no such folder."""
    folder = model.weight_folder
    return None if folder is None or not model.num_frozen_parameters() else fingerprint(folder)


class Saver:
    """Saves the part of every checkpoint that one process writes, when a checkpoint is due."""

    def __init__(
        self,
        config: Config,
        model: ModelSpec,
        pipeline: Pipeline,
        store: Store,
        say: Callable[[str], None],
        corpus: Mapping[str, Any],
    ) -> None:
        """corpus: facts that identify the training data (see `corpus_facts`)."""
        self._settings = config.checkpoint
        facts = {
            "run": batch_facts(config, model),
            "config": asdict(config),
            "corpus": corpus,
            "base": base_facts(model),
        }
        self.writer = StageWriter(pipeline, store, say, facts)
        self.is_owed = False
        """Whether a checkpoint that was requested is still to be saved, because the one before was being written."""
        schedule = pipeline.schedule
        self._steps_apart = 2 + max(map(schedule.delay, range(schedule.num_stages)))
        """Upper bound on the number of steps between the requests of processes that received a signal at the same
        moment. Requests that are not further apart count as one."""
        self._asked_after: int | None = None

    def after(self, report: StepReport) -> None:
        """Saves a checkpoint if one is due after this update.

        Call this with every report, before the next report is requested from the pipeline.
        """
        done = report.step + 1
        is_asked = report.save and (self._asked_after is None or done - self._asked_after > self._steps_apart)
        self._asked_after = done if is_asked else self._asked_after
        every = self._settings.every_steps
        is_due = is_asked or (every > 0 and done % every == 0)
        if not report.busy and (is_due or self.is_owed):
            self.is_owed = False
            self.writer.save(done)
        elif is_due:
            # All processes skip this checkpoint: a step that only some processes save is no checkpoint. If each process
            # skipped it on its own, and they were busy at different times, no checkpoint would ever be complete. A
            # checkpoint that was requested is saved later.
            self.is_owed = self.is_owed or is_asked
            self.writer.leave_out(done)

    def finish(self, pipeline: Pipeline) -> None:
        """Saves the last checkpoint of a run, if it is wanted or owed and not yet saved, and waits until it is written.

        Other processes may still be writing their parts.
        """
        self.writer.wait()
        is_wanted = self._settings.at_end or pipeline.was_stopped or self.is_owed
        if is_wanted and self.writer.latest != pipeline.num_updates:
            self.writer.save(pipeline.num_updates)
        self.writer.wait()
