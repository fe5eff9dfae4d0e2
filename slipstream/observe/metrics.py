"""Writes metrics.jsonl and the progress line while a run trains."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..checkpoint.files import write_file
from ..pipeline import EvaluationReport, Pipeline, StepReport
from ..pipeline.clock import TimeSplit
from ..transport.base import Transport
from .console import Screen
from .sinks import Guarded, JsonLines, sink_classes
from .utilisation import UtilisationReport, explain_utilisation

NUM_RECENT_STEPS = 16
"""Number of recent steps whose measured costs the expected utilisation and the speed are computed from."""

BAR_WIDTH = 12
"""Number of columns of the progress bar."""


class Metrics:
    """Writes the metrics of a run: one row of metrics.jsonl per update and one per evaluation, and a progress line.
    Every stage constructs it with the same arguments. The last stage writes for all of them.

        with Metrics(pipeline, "runs/mine", tokens_per_step=1024, sinks=["tensorboard"]) as metrics:
            for report in pipeline.run():
                metrics.log(report)

    pipeline                 the pipeline of this stage; if it resumes, metrics.jsonl continues after the same step
    folder                   the folder of the run
    tokens_per_step          number of tokens, or of other samples, in a step of all replicas
    log_every_steps          number of steps between two lines, where the output is no terminal
    sinks                    where rows go in addition: "tensorboard", "wandb", "trackio", or the import path of a class
    config                   settings of the run, for W&B and trackio
    peak_tokens_per_second   the speed if all devices did nothing but the model's matrix products, at the speed of their
                             data sheets; None means unknown, and then no MFU is shown
    bits_per_byte            function that converts the loss of an evaluation; None means that it is not converted
    screen                   the console to print to; None means the standard output
    """

    def __init__(
        self,
        pipeline: Pipeline,
        folder: Path | str,
        *,
        tokens_per_step: int,
        log_every_steps: int = 10,
        sinks: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        peak_tokens_per_second: float | None = None,
        bits_per_byte: Callable[[float], float] | None = None,
        screen: Console | None = None,
    ) -> None:
        folder, schedule, screen = Path(folder), pipeline.schedule, screen or Screen()
        self.earlier: list[dict[str, Any]] = []
        """Rows of the steps before the one at which this part of the run starts."""
        self.utilisation: UtilisationReport | None = None
        """Utilisation, computed from the latest steps for which it could be computed."""
        self._started = self._last = time.perf_counter()
        self._sinks: list[JsonLines | Guarded] = []
        self._is_writing = writes_metrics(pipeline.transport)
        if not self._is_writing:
            return
        classes = sink_classes(sinks)
        folder.mkdir(parents=True, exist_ok=True)
        num_steps = schedule.num_steps or 0
        path = folder / "metrics.jsonl"
        self.earlier = _rows_before(path, schedule.first_step)
        write_file(path, ["".join(json.dumps(row) + "\n" for row in self.earlier).encode()])
        self._sinks = [
            JsonLines(path, screen.print),
            *(Guarded(cls, folder, config or {}, screen.print) for cls in classes),
        ]
        self._first_step = schedule.first_step
        self._num_steps, self._tokens_per_step, self._log_every = num_steps, tokens_per_step, log_every_steps
        self._screen, self._peak = screen, peak_tokens_per_second
        self._bits_per_byte = bits_per_byte
        self._schedule = schedule
        self._recent: deque[tuple[TimeSplit, ...]] = deque(maxlen=NUM_RECENT_STEPS)
        self._seconds: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        """Seconds of each of the last steps, without those that an evaluation made longer."""
        self._evaluation_seconds: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        """Seconds by which each of the last evaluations made a step longer."""
        self._evaluations_per_step = len(schedule.evaluate_after) / num_steps if num_steps else 0.0
        self._has_evaluated = False
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.description}"),
            console=screen,
            disable=not screen.is_terminal,
        )
        self._task = self._progress.add_task("filling the pipeline", total=num_steps, completed=self._first_step)
        self._progress.start()

    def log(self, report: StepReport | EvaluationReport, **values: Any) -> None:
        """Writes a row for a report. `values` are added to the row: numbers, or dictionaries and lists of numbers. The
        progress line shows the first of `learning_rates`, a dictionary by parameter group. `samples` of an evaluation
        are printed: a list of dictionaries with a prompt and the text that continues it."""
        if not self._is_writing:
            return
        if isinstance(report, EvaluationReport):
            self._evaluation(report, values)
        else:
            self._step(report, values)

    def _step(self, report: StepReport, values: dict[str, Any]) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        done = report.step + 1
        if self._first_step + 1 < done < self._num_steps:  # the first step fills the pipeline, the last drains it
            if self._has_evaluated and self._seconds and self._evaluations_per_step < 0.5:
                self._evaluation_seconds.append(max(0.0, seconds - statistics.fmean(self._seconds)))
            else:
                self._seconds.append(seconds)
        self._has_evaluated = False
        self._expect(report)
        self._write(
            step=done,
            time=round(time.time(), 3),
            loss=report.loss,
            # If there is no sum over stages, this process knows only the share of the last stage.
            gradient_norms=report.gradient_norms if self._schedule.global_update else {},
            update_cosines={name: alignment.cosine for name, alignment in report.alignments.items()},
            best_error_feedback={name: alignment.best_coefficient for name, alignment in report.alignments.items()},
            utilisations=report.utilisations,
            expected_utilisation=self.utilisation and self.utilisation.expected,
            stage_seconds=[split._asdict() for split in report.splits],
            delay=report.delay,
            skipped=report.skipped,
            tokens=done * self._tokens_per_step,
            seconds=seconds,
            tokens_per_second=self._tokens_per_step / seconds,
            mfu=self._mfu(),
            memory_bytes=report.memory,
            **{"learning_rates": {}} | values,
        )
        said = self._said(report, values.get("learning_rates") or {})
        if self._screen.is_terminal:
            width = self._screen.width - len(f"step {self._num_steps}/{self._num_steps}") - BAR_WIDTH - 2
            self._progress.update(self._task, completed=done, description=_fitted(said, width))
        elif done % self._log_every == 0 or done in (self._first_step + 1, self._num_steps):
            self._screen.print("  ".join([f"step {done}/{self._num_steps}", *said]))

    def _said(self, report: StepReport, learning_rates: Mapping[str, float]) -> dict[str, int]:
        """Returns what the progress line says, in order. Each text has the number of others that matter more where a
        terminal is too narrow for all."""
        norms = report.gradient_norms.values() if self._schedule.global_update else ()
        busy = [u for u in report.utilisations if math.isfinite(u)]
        possible = f" ({self.utilisation.expected:.0%} possible)" if self.utilisation else ""
        speed, mfu, left = self._speed(), self._mfu(), self._seconds_left(report.step + 1)
        said = {
            f"loss {report.loss:.4f}": 0,
            f"lr {next(iter(learning_rates.values())):.3g}" if learning_rates else "": 6,
            f"grad norm {math.hypot(*norms):.3g}" if norms else "": 7,
            "" if speed is None else f"{speed:,.0f} tokens/s": 2,
            "" if mfu is None else f"MFU {mfu:.0%}": 3,
            f"memory {max(report.memory) / 2**30:.1f} GiB": 4,
            f"stages busy {sum(busy) / len(busy):.0%}{possible}" if busy else "": 5,
            f"{_time(left)} left" if left else "": 1,
        }
        return {text: rank for text, rank in said.items() if text}

    def _seconds_left(self, done: int) -> float:
        """Returns how long the rest of the run takes, if its steps and evaluations take as long as the last ones. 0
        means unknown, or that nothing is left."""
        evaluation = statistics.fmean(self._evaluation_seconds) if self._evaluation_seconds else 0.0
        step = statistics.fmean(self._seconds) if self._seconds else 0.0
        return (step + evaluation * self._evaluations_per_step) * (self._num_steps - done)

    def _mfu(self) -> float | None:
        """Returns the model FLOPs utilisation over the last steps: the model's FLOPs divided by what all devices could
        do."""
        speed = self._speed()
        return None if speed is None or self._peak is None else speed / self._peak

    def _speed(self) -> float | None:
        """Returns the tokens per second over the last steps, without evaluations."""
        return self._tokens_per_step / statistics.fmean(self._seconds) if self._seconds else None

    def _expect(self, report: StepReport) -> None:
        """Computes the expected utilisation after steps 1, 2, 4, 8 and so on, and after the last.

        The simulation takes a moment, and the measured costs hardly change.
        """
        if all(map(math.isfinite, report.utilisations)) and report.step >= self._schedule.sync_start_steps:
            self._recent.append(report.splits)
        done = report.step + 1
        if len(self._recent) > 1 and (done & (done - 1) == 0 or done == self._num_steps):
            self.utilisation = explain_utilisation(self._schedule, list(self._recent))

    def _evaluation(self, report: EvaluationReport, values: dict[str, Any]) -> None:
        self._has_evaluated = True
        if report.loss is not None:
            converted = {} if self._bits_per_byte is None else {"val_bits_per_byte": self._bits_per_byte(report.loss)}
            self._write(step=report.step + 1, time=round(time.time(), 3), val_loss=report.loss, **converted | values)
            said = loss_said(report.loss, converted.get("val_bits_per_byte"))
            parts = ", ".join(f"{Path(name).name} {loss:.4f}" for name, loss in values.get("val_losses", {}).items())
            said += f" after step {report.step + 1}" + (f": {parts}" if parts else "")
            self._screen.print(f"validation loss {said}")
            for sample in values.get("samples", ()):
                self._screen.print(f"  {sample['prompt']!r} -> {sample['text']!r}")

    def _write(self, **values: Any) -> None:
        row = finite(values)
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> float:
        """Closes all sinks. Returns the seconds since this object was created."""
        if self._is_writing:
            self._progress.stop()
        for sink in self._sinks:
            sink.close()
        return time.perf_counter() - self._started

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def writes_metrics(transport: Transport) -> bool:
    """Returns whether this stage writes the metrics of all stages."""
    return transport.stage == transport.num_stages - 1 and transport.replica == 0


def loss_said(loss: float, bits_per_byte: float | None) -> str:
    """Returns a validation loss as text, with its bits per byte if they are known."""
    return f"{loss:.4f}" + ("" if bits_per_byte is None else f" ({bits_per_byte:.4f} bits per byte)")


def _fitted(texts: Mapping[str, int], width: int) -> str:
    """Returns as many texts as fit into a line. Those with the largest numbers are left out first."""
    kept = dict(texts)
    while len(kept) > 1 and len("  ".join(kept)) > width:
        del kept[max(kept, key=kept.__getitem__)]
    return "  ".join(kept)


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


def _rows_before(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl that a resumed run will not write again.

    These are the rows of updates up to `first_step`, and of evaluations before the one after update `first_step`, which
    is repeated.
    """
    if first_step == 0 or not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError, RecursionError):  # the last line, cut short in a killed process
            row = json.loads(line)
            is_evaluation = "val_loss" in row
            numbers = [row["val_loss"]] if is_evaluation else [row["loss"], row["tokens"]]
            if row["step"] <= first_step - is_evaluation and all(map(_is_drawn, numbers)):
                rows.append(row)
    return rows


def _is_drawn(value: Any) -> bool:
    """Returns whether a value can be drawn. None is accepted: it is the loss of an update that was skipped."""
    return value is None or (type(value) in (int, float) and abs(value) < 1e300)


def finite(value: Any) -> Any:
    """Replaces every number that is not finite by None, because JSON has no nan."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
