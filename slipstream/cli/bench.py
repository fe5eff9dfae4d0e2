"""`slipstream bench`: runs the whole benchmark matrix and writes its results. docs/development/benchmark_rules.md has
the rules."""

from __future__ import annotations

import datetime
import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import RunFailure, UsageError
from ..observe.console import Screen
from ..observe.metrics import finite
from ..tools.bench.contenders import World
from ..tools.bench.figure import draw
from ..tools.bench.matrix import GPU_STAGES, REAL_STAGES, gpu_worlds, total_seconds, worlds
from ..tools.bench.memory import peak_memory
from ..tools.bench.progress import Bar, minutes
from ..tools.bench.results import Table, document, markdown, notes_of, rows_of, summary, text_of
from ..tools.bench.slices import Gpu, sliced
from ..tools.bench.turns import Outcome, Stopped, compete
from ..tools.bench.workloads import HEAD_DIM, GpuSetting
from ..transport.environment import under_torchrun
from .config_arguments import write_to
from .parse import parse

MAX_STAGES = 32
"""Maximum number of stages, each of them a process on this machine. With more processes the benchmark would measure the
machine."""
GPU_SIZES = [each.name for each in fields(GpuSetting) if each.name != "share"]
"""Fields of the arguments that are also fields of GpuSetting."""


@dataclass(frozen=True)
class BenchArguments:
    """Compares slipstream's schedules with those of torch.distributed.pipelining, in one interleaved run. Writes
    results.json, table.md and figure.png. It takes about half an hour. Nothing else should run on the machine."""

    only: Literal["emulated", "real"] | None = None
    """emulated: stages that sleep, which show the schedule. real: a small decoder on two stages. Both by default."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: a decoder on GPUs. By default all stages share one GPU through CUDA's MPS."""
    stages: tuple[int, ...] = ()
    """Numbers of emulated stages; 2 4 8 by default. cuda: one number; 4 by default."""
    rounds: int | None = None
    """How often every schedule runs; 3 by default."""
    quick: bool = False
    """Two stages, as many microbatches, one round and no memory: to see that it works, in half a minute. cuda: as many
    microbatches as stages, and one round."""
    output: Path | None = None
    """The folder to write; by default a new one below runs/."""
    microbatches: tuple[int, ...] = ()
    """cuda: numbers of microbatches in a step; by default 1, 2 and 4 times the stages."""
    contenders: tuple[str, ...] = ()
    """cuda: only rows with these names, or whose names contain one of these words, and the bare loop."""
    share: int | None = None
    """cuda: percent of the GPU's multiprocessors for each stage; by default an equal part."""
    clock: int | None = None
    """cuda: lock the GPU's clock at this many MHz, which needs root. By default it is not locked."""
    slices: bool = True
    """cuda: all stages share one GPU. Otherwise every stage has a GPU."""
    dim: int = GpuSetting.dim
    """cuda: width of the decoder, a multiple of 128."""
    blocks: int = GpuSetting.blocks
    """cuda: blocks of a stage, an even number."""
    sequence_length: int = GpuSetting.sequence_length
    """cuda: tokens of a sequence."""
    batch: int = GpuSetting.batch
    """cuda: sequences in a microbatch."""
    vocabulary: int = GpuSetting.vocabulary
    """cuda: entries of the vocabulary."""
    tied: bool = GpuSetting.tied
    """cuda: embedding and head share a weight, in rows that support it."""
    dtype: Literal["bfloat16", "float32"] = GpuSetting.dtype
    """cuda: type of weights and activations. float32 uses no tensor cores."""


def main(arguments: list[str]) -> None:
    given = parse(BenchArguments, arguments, "slipstream bench")
    matrix = _gpu_matrix(given) if given.device == "cuda" else _cpu_matrix(given)
    if under_torchrun():
        raise UsageError("slipstream bench starts its own processes: start it without torchrun, or unset RANK")
    started = datetime.datetime.now(datetime.UTC)
    folder = given.output or Path("runs") / f"bench-{started:%Y%m%d-%H%M%S}"
    setting = matrix[0].gpu
    with nullcontext() if setting is None else sliced(setting.share, given.clock) as gpu:
        write_to("output", folder, lambda: _make_folder(folder))
        run_matrix(matrix, folder, with_memory=gpu is None and not given.quick, started=started, gpu=gpu)


def _gpu_matrix(given: BenchArguments) -> list[World]:
    if given.only is not None:
        raise UsageError(f"only = {given.only!r} is for device = 'cpu': leave it out, or use device = 'cpu'")
    if len(given.stages) > 1:
        raise UsageError(f"stages = {' '.join(map(str, given.stages))} is more than one number: give one on cuda")
    [num_stages] = given.stages or (GPU_STAGES,)
    _check_stages(num_stages)
    for name in ("rounds", "clock", "sequence_length", "batch", "vocabulary"):
        _check_positive(given, name)
    if any(m < 1 for m in given.microbatches):
        raise UsageError(f"microbatches = {' '.join(map(str, given.microbatches))} has less than 1: use 1 or more")
    if given.dim < 1 or given.dim % HEAD_DIM:
        raise UsageError(f"dim = {given.dim} is not made of heads of {HEAD_DIM}: use a multiple of {HEAD_DIM}")
    if given.blocks < 2 or given.blocks % 2:
        raise UsageError(f"blocks = {given.blocks} cannot be cut into two equal chunks: use an even number")
    if given.share is not None and not given.slices:
        raise UsageError(f"share = {given.share} is of a GPU that stages share: leave it out, or leave out --no-slices")
    if given.share is not None and not 1 <= given.share <= 100:
        raise UsageError(f"share = {given.share} is no part of a GPU: use 1 to 100 percent")
    num_gpus = torch.cuda.device_count()
    if num_gpus < 1:
        raise UsageError("device = 'cuda' finds no CUDA device here: use device = 'cpu'")
    if not given.slices and num_gpus < num_stages:
        raise UsageError(
            f"stages = {num_stages} need a GPU each without slices, and there are {num_gpus}: leave out --no-slices, "
            "or use fewer stages"
        )
    sizes = {name: getattr(given, name) for name in GPU_SIZES}
    setting = GpuSetting(**sizes, share=(given.share or 100 // num_stages) if given.slices else None)
    factors = (1,) if given.quick else (1, 2, 4)
    microbatches = given.microbatches or [factor * num_stages for factor in factors]
    matrix = gpu_worlds(setting, num_stages, list(dict.fromkeys(microbatches)), _num_rounds(given), given.contenders)
    if len(matrix[0].contenders) == 1:
        raise UsageError(
            f"contenders = {' '.join(given.contenders)} is in the name of no row: leave it out to see them all"
        )
    return matrix


def _cpu_matrix(given: BenchArguments) -> list[World]:
    defaults = BenchArguments()
    for name in ("microbatches", "contenders", "share", "clock", "slices", *GPU_SIZES):
        if getattr(given, name) != getattr(defaults, name):
            raise UsageError(f"{name} = {getattr(given, name)} is for GPUs: leave it out, or use device = 'cuda'")
    for num_stages in given.stages:
        _check_stages(num_stages)
    if given.only == "real" and given.stages not in ((), (REAL_STAGES,)):
        raise UsageError(
            f"stages = {' '.join(map(str, given.stages))} is for emulated compute, and real compute has {REAL_STAGES}: "
            "leave stages or only = 'real' out"
        )
    _check_positive(given, "rounds")
    stages = given.stages or ((2,) if given.quick else (2, 4, 8))
    emulated_stages = [] if given.only == "real" else list(dict.fromkeys(stages))
    return worlds(emulated_stages, given.only != "emulated", _num_rounds(given), given.quick)


def _check_stages(num_stages: int) -> None:
    if not 2 <= num_stages <= MAX_STAGES:
        raise UsageError(f"stages = {num_stages} cannot be compared: use 2 to {MAX_STAGES}")


def _check_positive(given: BenchArguments, name: str) -> None:
    if (value := getattr(given, name)) is not None and value < 1:
        raise UsageError(f"{name} = {value} measures nothing: use 1 or more")


def _num_rounds(given: BenchArguments) -> int:
    return given.rounds or (1 if given.quick else 3)


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "results.json").exists():
        raise UsageError(f"output = {str(folder)!r} has results already: choose another folder")
    (folder / "table.md").write_text("", encoding="utf-8")


def run_matrix(
    matrix: list[World], folder: Path, with_memory: bool, started: datetime.datetime, gpu: Gpu | None
) -> None:
    """Runs all worlds in order. Writes all results so far after every world, also when the user interrupts a world."""
    screen = Screen()
    guess = minutes(sum(map(total_seconds, matrix)))
    screen.print(f"{len(matrix)} table{'s' * (len(matrix) > 1)}, {guess} where nothing else runs; writing {folder}")
    tables: list[Table] = []
    gpu_facts: dict[str, Any] | None = None if gpu is None else {**gpu.describe(), "readings": []}
    for index, world in enumerate(matrix):
        interrupt: BaseException | None = None
        try:
            outcomes = compete(world, Bar(matrix, index), *([] if gpu is None else [gpu.restart]))
        except Stopped as stopped:
            outcomes, interrupt, with_memory = stopped.outcomes, stopped.__cause__, False
        readings = {} if gpu is None else gpu.take_readings()
        screen.show_cursor()  # a stage that failed had no time to show it again
        memory: list[int | None] = [None] * len(outcomes)
        if with_memory and world.workload == "real":
            memory = _memory(world, outcomes, screen)
        rows = rows_of(world, outcomes, memory)
        tables.append(Table(world, outcomes, rows, notes_of(world, outcomes, readings)))
        if gpu_facts is not None:
            gpu_facts["readings"].append({name: asdict(spread) for name, spread in readings.items()})
        screen.print(text_of(tables[-1]))
        written = _write(tables, folder, started, gpu_facts)
        if interrupt is not None:
            raise interrupt
    screen.print("\n".join([*summary(tables), f"{folder}: {', '.join(written)}"]))
    if not any(row.step_seconds for table in tables for row in table.rows):
        raise RunFailure(f"no contender ran: {folder / 'table.md'} says why")


def _memory(world: World, outcomes: list[Outcome], screen: Screen) -> list[int | None]:
    memory = []
    for number, outcome in enumerate(outcomes, 1):
        if screen.is_terminal:
            screen.print(f"memory of contender {number} of {len(outcomes)}", end="\r")
        memory.append(peak_memory(outcome.contender, world) if outcome.rounds else None)
    return memory


def _write(tables: list[Table], folder: Path, started: datetime.datetime, gpu: dict[str, Any] | None) -> list[str]:
    everything = document(tables, started, gpu)
    (folder / "results.json").write_text(json.dumps(finite(everything), indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(tables), encoding="utf-8")
    drawn = draw(tables, folder / "figure.png")
    return ["results.json", "table.md", *(["figure.png"] if drawn else [])]
