"""What checkpoints cost a run: blocks of steps with checkpoints and without take turns in one training.

    .venv/bin/python benchmarks/checkpoint_pause.py --output benchmarks/checkpoint_pause.json

About 20 minutes on two cores. The rules, fixed before the first full run:
- What `slipstream train` makes of its defaults, but for the options below: P = 2 processes, two_bw with error feedback,
  the standard library's source as bytes, one core per stage, real compute, one sequence to a microbatch. Nothing is
  evaluated. AdamW, not Muon: it keeps more state and makes shorter steps, so that a checkpoint weighs more.
- One run. After WARM_UP steps, in which one checkpoint is saved, come pairs of blocks of --steps steps: one with
  checkpoints and one without. Which of the two comes first changes from pair to pair, so that a drift of the machine
  favours neither.
- In a block with checkpoints one is saved at its beginning, by the same `Saver` as in a run, and another after every
  --every steps; the last has as many steps to be written beside. What is written late falls into the next block: the
  page says how often, and how many checkpoints were left out because the one before was not yet on disk.
- A block's time lies between the reports of its first and of its last step, on the slower stage: copies, waits and
  whatever the writing takes from computing are all in it. A checkpoint is copied before the next report, so its copy
  falls into the block that saved it.
- Reported, pair by pair: the mean step with checkpoints over the mean step without, less one; the mean of it over pairs
  with its standard error, the median, the lowest and the highest. That mean is what is to be below 5 %. Beside it, the
  same seconds for one checkpoint, which depend little on how often it is saved.
- Also: how long the copy holds training up, the pause that idle cores would not take away; for its share of a step,
  --every steps have one copy. The bytes of all parts, the seconds of writing them, and the time of cores within. What
  the two sides of a pair differ by, beyond the copies, is what the writing takes from stages that keep all cores busy.
- No pair is left out or repeated. The machine's load before and after is told: beside other programs it means nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream import StepReport, launch
from slipstream.checkpoint import Part, Store
from slipstream.config.schema import (
    CheckpointSection,
    Config,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunSection,
    TrainSection,
)
from slipstream.observe.metrics import finite
from slipstream.pipeline import Requests
from slipstream.train.build import build_components
from slipstream.train.checkpointing import Saver
from slipstream.train.process import make_pipeline
from slipstream.transport.base import Transport

NUM_STAGES = 2
WARM_UP, DRAIN = 6, 2
"""Steps before the first block and after the last."""
WARM_UP_SAVE = 2
"""After so many steps: the first checkpoint finds everything cold, and is one of many in a long run."""
ATTEMPT = "pause"


@dataclass(frozen=True)
class Plan:
    """Which steps have checkpoints."""

    num_pairs: int
    block_steps: int
    every: int

    @property
    def num_steps(self) -> int:
        return WARM_UP + 2 * self.num_pairs * self.block_steps + DRAIN

    def block(self, step: int) -> int | None:
        """That a step belongs to."""
        index = (step - WARM_UP) // self.block_steps
        return index if 0 <= index < 2 * self.num_pairs else None

    def has_checkpoints(self, block: int) -> bool:
        """with, without; without, with; and so on."""
        return block % 4 in (0, 3)

    def saves(self, done: int) -> bool:
        """Whether the state after so many steps is saved. It is copied and written beside the step that follows."""
        block = self.block(done)
        if block is None:
            return done == WARM_UP_SAVE
        return self.has_checkpoints(block) and (done - WARM_UP) % self.block_steps % self.every == 0


@dataclass(frozen=True)
class Copied:
    """What training was held up by."""

    done: int
    """Steps when it was saved."""
    seconds: float
    core_seconds: float


@dataclass(frozen=True)
class Written:
    """A part, by one stage."""

    step: int
    began: float
    """Seconds since the stage began."""
    seconds: float
    core_seconds: float
    """Of the thread that wrote it."""
    num_bytes: int


@dataclass(frozen=True)
class StageRun:
    ends: list[float]
    """Of all steps, in seconds since the stage began."""
    copies: list[Copied]
    parts: list[Written]
    num_committed: int
    said: list[str]


class TimedStore(Store):
    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        super().__init__(folder, attempt=ATTEMPT)
        self._now = now
        self.parts: list[Written] = []

    def write(self, step: int, part: Part, num_parts: int) -> None:
        began, core_began = self._now(), time.thread_time()
        super().write(step, part, num_parts)
        seconds, core_seconds = self._now() - began, time.thread_time() - core_began
        self.parts.append(Written(step, began, seconds, core_seconds, self.needed_bytes(part)))


def run_stage(transport: Transport, config: Config, plan: Plan) -> StageRun:
    """As `train_stage`, but that the plan says when to save."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // transport.num_stages))
    components = build_components(config)
    said: list[str] = []
    began = time.perf_counter()
    store = TimedStore(Path(config.run.folder), lambda: time.perf_counter() - began)
    pipeline = make_pipeline(transport, config, components, lambda: Requests(busy=saver.writer.is_busy))
    saver = Saver(config, components.model, pipeline, store, said.append, {})
    speaks = transport.stage == transport.num_stages - 1
    ends: list[float] = []
    copies: list[Copied] = []
    for report in pipeline.run():
        if not isinstance(report, StepReport):
            continue
        ends.append(time.perf_counter() - began)
        done = report.step + 1
        if plan.saves(done):
            before, core_before = time.perf_counter(), time.thread_time()
            saver.after(report)
            copies.append(Copied(done, time.perf_counter() - before, time.thread_time() - core_before))
        if done == WARM_UP_SAVE + 1:
            while saver.writer.is_busy:  # it must not take the place of the first that is counted
                time.sleep(0.01)
        if speaks:
            _say_progress(plan, done, ends)
    saver.finish(pipeline)
    return StageRun(ends, copies, store.parts, len(store.steps()), said)


def _say_progress(plan: Plan, done: int, ends: list[float]) -> None:
    block = plan.block(done - 1)
    if done == WARM_UP:
        print(f"warmed up after {ends[-1]:.0f} s; the latest step took {ends[-1] - ends[-2]:.2f} s", flush=True)
    elif block is not None and plan.block(done) != block:
        seconds = (ends[-1] - ends[-1 - plan.block_steps]) / plan.block_steps
        what = "with checkpoints" if plan.has_checkpoints(block) else "without"
        print(f"block {block + 1} of {2 * plan.num_pairs}, {what}: {seconds:.3f} s a step", flush=True)


# ---- what it comes to


@dataclass(frozen=True)
class Pair:
    """Seconds of a mean step."""

    with_checkpoints: float
    without: float

    @property
    def share(self) -> float:
        return self.with_checkpoints / self.without - 1


@dataclass(frozen=True)
class Result:
    pairs: list[Pair]
    step_seconds: float
    """Without checkpoints: the median over blocks."""
    share: float
    """What checkpoints add to a step, of a step: the mean over pairs."""
    share_error: float
    """Standard error of that mean; nan of a single pair."""
    seconds_per_checkpoint: list[float]
    """By pair that has any: what one adds to all the steps around it."""
    copy_seconds: list[float]
    """By checkpoint, on the stage that took longer."""
    copy_core_seconds: list[float]
    """By checkpoint, of all stages together; likewise below."""
    copy_share: float
    """Of a step, where `every` steps share a copy."""
    written_bytes: int
    """By a checkpoint, all parts."""
    writing_seconds: list[float]
    """By checkpoint, until the slower stage had its part on disk."""
    writing_core_seconds: list[float]
    """By checkpoint, of the threads that wrote its parts."""
    num_saved: int
    num_asked: int
    num_late: int
    """Still being written when their block was over."""


def evaluate(plan: Plan, stages: list[StageRun]) -> Result:
    """The warm-up's checkpoint is in none of the figures."""
    pairs = []
    for index in range(plan.num_pairs):
        seconds = {}
        for block in (2 * index, 2 * index + 1):
            first = WARM_UP + block * plan.block_steps
            last = first + plan.block_steps - 1
            slower = max(stage.ends[last] - stage.ends[first - 1] for stage in stages)
            seconds[plan.has_checkpoints(block)] = slower / plan.block_steps
        pairs.append(Pair(seconds[True], seconds[False]))
    asked = [done for done in range(WARM_UP, plan.num_steps) if plan.saves(done)]
    parts = {step: [part for stage in stages for part in stage.parts if part.step == step] for step in asked}
    saved = {step: its for step, its in parts.items() if len(its) == len(stages)}
    copied = {step: [copy for stage in stages for copy in stage.copies if copy.done == step] for step in saved}
    copy_seconds = [max(copy.seconds for copy in its) for its in copied.values()]
    shares = [pair.share for pair in pairs]
    step_seconds = statistics.median(pair.without for pair in pairs)
    is_late = [_is_late(plan, stage, part) for stage in stages for part in stage.parts if part.step in saved]
    return Result(
        pairs=pairs,
        step_seconds=step_seconds,
        share=statistics.fmean(shares),
        share_error=statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan,
        seconds_per_checkpoint=[
            (pair.with_checkpoints - pair.without) * plan.block_steps / count
            for pair, count in zip(pairs, _counts_by_pair(plan, saved), strict=True)
            if count
        ],
        copy_seconds=copy_seconds,
        copy_core_seconds=[sum(copy.core_seconds for copy in its) for its in copied.values()],
        copy_share=statistics.fmean(copy_seconds) / plan.every / step_seconds,
        written_bytes=max(sum(part.num_bytes for part in its) for its in saved.values()),
        writing_seconds=[max(part.seconds for part in its) for its in saved.values()],
        writing_core_seconds=[sum(part.core_seconds for part in its) for its in saved.values()],
        num_saved=len(saved),
        num_asked=len(asked),
        num_late=sum(is_late),
    )


def _counts_by_pair(plan: Plan, saved: Iterable[int]) -> list[int]:
    pairs = [(step - WARM_UP) // (2 * plan.block_steps) for step in saved]
    return [pairs.count(index) for index in range(plan.num_pairs)]


def _is_late(plan: Plan, stage: StageRun, part: Written) -> bool:
    block = plan.block(part.step)
    assert block is not None
    return part.began + part.seconds > stage.ends[WARM_UP + (block + 1) * plan.block_steps - 1]


def table(result: Result, every: int) -> str:
    step = result.step_seconds
    shares = [100 * pair.share for pair in result.pairs]
    without = [pair.without for pair in result.pairs]
    rows = [
        ("step without checkpoints", f"{_spread(without, '.3f')} s", "", "by pair"),
        ("step with checkpoints", f"{_spread([p.with_checkpoints for p in result.pairs], '.3f')} s", "", "by pair"),
        (
            f"**added to a step, one checkpoint in {every}**",
            f"{result.share * step:.3f} s",
            f"**{100 * result.share:.2f} % ± {100 * result.share_error:.2f}**",
            f"mean of pairs; median {_spread(shares, '.2f')} %",
        ),
        (
            "of that, the copy alone",
            f"{result.copy_share * step:.3f} s",
            f"{100 * result.copy_share:.2f} %",
            "the pause that idle cores would leave",
        ),
        _row("added by one checkpoint in all", result.seconds_per_checkpoint, step, "by pair"),
        _row("copy of one checkpoint", result.copy_seconds, step, "training waits; slower stage"),
        _row("core time of that", result.copy_core_seconds, step, "both stages together"),
        _row("writing one checkpoint", result.writing_seconds, step, "beside training; slower stage"),
        _row("core time of that", result.writing_core_seconds, step, "both stages together"),
    ]
    lines = ["| what | seconds | of a step | |", "|---|---:|---:|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _row(what: str, seconds: list[float], step: float, note: str) -> tuple[str, str, str, str]:
    share = 100 * statistics.median(seconds) / step
    return what, f"{_spread(seconds, '.3f')} s", f"{share:.1f} %", note


def _spread(values: list[float], form: str) -> str:
    middle = format(statistics.median(values), form)
    return f"{middle} ({min(values):{form}} - {max(values):{form}})" if len(values) > 1 else middle


def page(facts: dict[str, Any], result: Result, command: str) -> str:
    plan, (before, after) = facts["plan"], facts["load"]
    return "\n".join(
        [
            "# What checkpoints cost a run",
            "",
            f"    {command}        # the rules stand at its top",
            "",
            f"{facts['cores']} cores ({facts['machine']}), P = {NUM_STAGES}, m = {facts['microbatches']}, torch "
            f"{facts['torch']}, Python {facts['python']}. {facts['preset']}, {facts['parameters']:,} parameters, "
            f"sequences of {facts['sequence_length']}; a checkpoint has {result.written_bytes / 1e6:,.0f} MB. "
            f"{plan['num_pairs']} pairs of blocks of {plan['block_steps']} steps. Middle figures are medians, with the "
            "lowest and the highest.",
            "",
            table(result, plan["every"]),
            "",
            f"{result.num_saved} of {result.num_asked} checkpoints were saved; {result.num_late} parts were still being"
            f" written when their block was over. Load of the machine, over a minute: {before:.1f} before, {after:.1f} "
            "after.",
            "",
        ]
    )


def leave_behind(output: Path, facts: dict[str, Any], result: Result, stages: list[StageRun], command: str) -> None:
    everything = {**facts, "result": asdict(result), "stages": [asdict(stage) for stage in stages]}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(finite(everything), indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(page(facts, result, command), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", help="of the model (default: small, 25M parameters)")
    parser.add_argument("--sequence-length", type=int, help="tokens in a sequence; without it the preset's")
    parser.add_argument("--microbatches", type=int, default=2, help="of one sequence each, to a step")
    parser.add_argument("--blocks", type=int, default=16, help="with checkpoints and without, together: an even number")
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="whose disk gets the checkpoints")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures, and FILE.md with the table")
    arguments = parser.parse_args()
    if arguments.blocks < 2 or arguments.blocks % 2 or arguments.every < 1 or arguments.steps % arguments.every:
        parser.error("--blocks must be even and at least 2, and --steps a multiple of --every")
    plan = Plan(arguments.blocks // 2, arguments.steps, arguments.every)
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        config = Config(
            model=ModelSection(preset=arguments.preset, sequence_length=arguments.sequence_length),
            pipeline=PipelineSection(stages=NUM_STAGES, microbatches=arguments.microbatches),
            optimizer=OptimizerSection(name="adamw", learning_rate=0.001),
            train=TrainSection(steps=plan.num_steps, microbatch_size=1, device="cpu"),
            evaluation=EvaluationSection(batches=0),
            checkpoint=CheckpointSection(every_steps=1, at_end=False),  # the plan asks for some of them
            run=RunSection(folder=folder),
        )
        model = build_components(config).model
        print(
            f"{model.num_parameters():,} parameters, {arguments.blocks} blocks of {plan.block_steps} steps", flush=True
        )
        load_before = os.getloadavg()[0]
        is_forked = sys.platform == "linux"
        worker = partial(run_stage, config=config, plan=plan)
        stages = launch(worker, NUM_STAGES, start_method="fork" if is_forked else None)
    for text in dict.fromkeys(text for stage in stages for text in stage.said):
        print(text)
    if not any(part.step >= WARM_UP for stage in stages for part in stage.parts):
        sys.exit("no checkpoint was saved")
    result = evaluate(plan, stages)
    facts = {
        "preset": arguments.preset,
        "parameters": model.num_parameters(),
        "sequence_length": model.sequence_length,
        "microbatches": arguments.microbatches,
        "plan": asdict(plan),
        "cores": os.cpu_count(),
        "load": [load_before, os.getloadavg()[0]],
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    options = {name: getattr(arguments, name) for name in ("preset", "microbatches", "blocks", "steps", "every")}
    options |= {"sequence-length": arguments.sequence_length} if arguments.sequence_length else {}
    told = " ".join(f"--{name} {value}" for name, value in options.items())
    command = f"python benchmarks/checkpoint_pause.py {told}"
    print(page(facts, result, command))
    if arguments.output:
        leave_behind(arguments.output, facts, result, stages, command)


if __name__ == "__main__":
    main()
