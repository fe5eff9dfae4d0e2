"""The command line: init | train | reshape | schedule | plan | profile | bench | study | report | timeline | prepare.

    slipstream init [PRESET]
    slipstream train [CONFIG.toml] [--section.field value ...]
    slipstream reshape RUN SHAPE
    slipstream schedule NAME --stages P --microbatches M
    slipstream plan [CONFIG.toml] --devices N --memory GIB
    slipstream profile [CONFIG.toml]
    slipstream bench [--only emulated|real] [--device cuda]
    slipstream study [GRID.toml]
    slipstream report RUN ...
    slipstream timeline RUN [--start S --seconds S]
    slipstream prepare SOURCE ... --output PREFIX

Each explains itself with --help. A user's mistake is one sentence and exit code 2; a stage that failed is one sentence
and exit code 1.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import io
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from .arguments import RunFailure, UsageError, find_run, parse
from .environment import under_torchrun
from .reading import check_output

LEAST_COST, MOST_COST = 1e-9, 1e9
MAX_MICROBATCHES = 50_000
"""Of a schedule to draw, over all stages and steps: a minute or two, and far more than a picture can show."""


def main() -> NoReturn:
    if not under_torchrun():  # whose stages are not ours to end
        _end_stages_on_signals()
    code = run(sys.argv[1:])
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a process group that lost a peer may hang in its destructor
    sys.exit(0)


def run(arguments: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text
    commands: dict[str, Callable[[list[str]], None]] = {
        "init": _init,
        "train": _train,
        "reshape": _reshape,
        "schedule": _schedule,
        "plan": _plan,
        "profile": _profile,
        "bench": _bench,
        "study": _study,
        "report": _report,
        "timeline": _timeline,
        "prepare": _prepare,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if arguments[0] == "--version":
        print(f"slipstream {version('slipstream')}")
        return 0
    command = arguments[0]
    try:
        if command not in commands:
            close = difflib.get_close_matches(command, commands, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(commands)}"
            raise UsageError(f"command {command!r} is unknown: {remedy}")
        commands[command](list(arguments[1:]))
        sys.stdout.flush()
    except UsageError as error:
        return _say(error, 2)
    except RunFailure as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _say(message: Exception | str, code: int) -> int:
    """One line, however many the message had."""
    console = Console()
    if console.is_terminal and code != 2:
        console.show_cursor()  # a stage that was drawing a progress bar hid it, and may be past showing it again
        console.print()
    text = " ".join(str(message).split()).removesuffix(".")
    print(f"slipstream: {text}", file=sys.stderr)
    return code


def _end_stages_on_signals() -> None:
    """SIGTERM and SIGHUP would end this process alone. As an interrupt, they end the stages too; in a stage they stay
    what they are."""
    parent = os.getpid()

    def interrupt(signum: int, frame: object) -> None:
        if os.getpid() == parent:
            raise KeyboardInterrupt
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # nohup ignores the one, and means it
            signal.signal(signum, interrupt)


# ---- train


TRAIN_HELP = """Trains a language model across pipeline stages and writes metrics, summary and trace to runs/NAME.
CONFIG.toml has the sections and fields below, steps = 200 under [train] for --train.steps 200;
an option wins over the file. `slipstream init PRESET` writes one to begin with.

The ten that matter most:
  --model.preset 135m         0.7M to 70B: tiny, small (25M), 135m, 360m, 1b, 3b,
                              8b, 10b, 70b; with experts moe-2b, moe-10b
  --data.sources FILE ...     text, JSON lines, or shards of slipstream prepare
  --data.tokenizer FILE       a tokenizer.json; bytes if left out
  --train.steps 5000          updates to make
  --train.microbatch-size 4   sequences to a microbatch: what memory allows
  --pipeline.stages 4         processes, each with a part of the layers
  --pipeline.microbatches 8   to a step: at least as many as stages
  --optimizer.learning-rate X at its peak; by optimizer if left out
  --run.name first            leaves everything in runs/first
  --checkpoint.resume         goes on with the run of that name

All of them:"""


def _train(arguments: list[str]) -> None:
    from .config import Config, ConfigError, load_toml

    try:
        default = Config()
        if arguments and not arguments[0].startswith("-"):
            default = load_toml(Path(arguments.pop(0)))
        config = parse(Config, arguments, "slipstream train [CONFIG.toml]", TRAIN_HELP, default)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    from .pipeline import NonFiniteError, PipelineError, StageFailure  # torch, which --help does not wait for
    from .trainer import run_folder, train

    try:
        train(config)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except StageFailure as failure:
        details = failure.details
        if not details and failure.__cause__ is not None and not isinstance(failure.__cause__, PipelineError):
            details = "".join(traceback.format_exception(failure.__cause__))
        raise RunFailure(f"{failure}{_keep(details, run_folder(config))}") from failure
    except (PipelineError, NonFiniteError) as error:
        raise RunFailure(str(error)) from error


def _keep(details: str, folder: Path) -> str:
    """Puts a traceback where it does not get into anyone's way, and says where."""
    if not details or not folder.is_dir():
        return ""
    path = folder / "failure.txt"
    try:
        path.write_text(details, encoding="utf-8")
    except OSError:  # a disk that is full may be what failed
        return ""
    return f" (traceback in {path})"


# ---- schedule


@dataclass(frozen=True)
class ScheduleArguments:
    """Prints a schedule as a grid, proves what it promises, and draws it."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """two_bw, one_f_one_b, gpipe, pipedream or paci."""
    stages: int = 4
    """Parts of the pipeline."""
    microbatches: int = 4
    """To a step."""
    steps: int = 3
    """Steps to print and draw."""
    depth: str = "minimum"
    """two_bw: "double" keeps twice the forwards in flight and hides the latency of links."""
    sync_start_steps: int = 0
    """Steps played as one_f_one_b first."""
    forward: float = 1.0
    """Cost of a forward, in any unit of time."""
    backward: float = 2.0
    """Cost of a backward, in the same unit."""
    latency: float = 0.0
    """Of a link between two stages, in the same unit."""
    output: tuple[Path, ...] = ()
    """Where to draw, .svg or .png; by default NAME_pP_mM.svg and .png in this folder."""


def _schedule(arguments: list[str]) -> None:
    from .schedule import Schedule, ScheduleError, waits_for_sum
    from .schedule.command import show
    from .schedule.simulate import Costs

    given = parse(ScheduleArguments, arguments, "slipstream schedule", inspect.getdoc(ScheduleArguments) or "")
    for name in ("forward", "backward", "latency"):
        if not 0 <= getattr(given, name) < math.inf:
            raise UsageError(f"{name} = {getattr(given, name)} is no time: use a finite number of 0 or more")
    if given.stages * given.microbatches * given.steps > MAX_MICROBATCHES:
        raise UsageError(
            f"{given.stages} stages x {given.microbatches} microbatches x {given.steps} steps are too many to draw: "
            f"use fewer, {MAX_MICROBATCHES:,} at most in all"
        )
    for name in ("forward", "backward", "latency"):
        if 0 < (cost := getattr(given, name)) < math.inf and not LEAST_COST <= cost <= MOST_COST:
            raise UsageError(f"{name} = {cost} cannot be drawn: use 0, or {LEAST_COST:g} to {MOST_COST:g}")
    if given.sync_start_steps > given.steps:
        raise UsageError(f"sync_start_steps = {given.sync_start_steps} is more than steps = {given.steps}: use fewer")
    try:
        schedule = Schedule(
            given.name,
            given.stages,
            given.microbatches,
            given.steps,
            depth=given.depth,
            sync_start_steps=given.sync_start_steps,
        )
        schedule = replace(schedule, global_update=waits_for_sum(given.name))  # the name is a known one by now
        costs = Costs(forward=given.forward, backward=given.backward, latency=given.latency)
        drawings = list(given.output) or _drawings(given)
        for path in drawings:
            check_output(path)
        print(show(schedule, costs, drawings, max_width=_width()))
    except ScheduleError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(_cannot_write(error, "output")) from error


def _width() -> int:
    """A file has no edge to run into."""
    console = Console()
    return console.width if console.is_terminal else 250


def _drawings(given: ScheduleArguments) -> list[Path]:
    stem = f"{given.name}_p{given.stages}_m{given.microbatches}"
    suffixes = [".svg", ".png"] if importlib.util.find_spec("matplotlib") else [".svg"]
    return [Path(f"{stem}{suffix}") for suffix in suffixes]


def _cannot_write(error: OSError, field: str) -> str:
    return f"{field} = {str(error.filename)!r} cannot be written ({error.strerror}): choose another"


# ---- study


@dataclass(frozen=True)
class StudyArguments:
    """Trains every cell of a grid, each in one process and delayed as a pipeline would delay it, and compares them:
    optimizers x {sync, async, async with error feedback}. A finished cell is not run again. Without GRID.toml, the
    built-in grid: AdamW and Muon on a CPU, in minutes."""

    output: Path | None = None
    """Where cells, table and figures go; by default runs/study-NAME, with the grid's name."""
    only: tuple[str, ...] = ()
    """Run no other optimizers than these; the table still shows every cell that is done."""
    jobs: int | None = None
    """Cells at a time; by default one per core, or one on a GPU."""


def _study(arguments: list[str]) -> None:
    from .config import ConfigError
    from .study.command import StudyFailure, run_study
    from .study.grid import BUILTIN, load_grid

    path = BUILTIN
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
    given = parse(StudyArguments, arguments, "slipstream study [GRID.toml]", inspect.getdoc(StudyArguments) or "")
    if given.jobs is not None and given.jobs < 1:
        raise UsageError(f"jobs = {given.jobs} is too small: use 1 or more")
    try:
        grid = load_grid(path)
        run_study(grid, path, given.output or Path("runs") / f"study-{grid.name}", given.only, given.jobs)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except StudyFailure as failure:
        raise RunFailure(str(failure)) from failure


# ---- init, reshape, plan, profile, bench, report: each beside what it runs


def _init(arguments: list[str]) -> None:
    from .init import init

    init(arguments)


def _reshape(arguments: list[str]) -> None:
    from .reshaping import reshape

    reshape(arguments)


def _plan(arguments: list[str]) -> None:
    from .plan.command import plan

    plan(arguments)


def _profile(arguments: list[str]) -> None:
    from .plan.command import profile

    profile(arguments)


def _bench(arguments: list[str]) -> None:
    from .bench.command import bench

    bench(arguments)


def _report(arguments: list[str]) -> None:
    from .report.command import report

    report(arguments)


# ---- timeline


@dataclass(frozen=True)
class TimelineArguments:
    """Draws a window of what the stages of a run did, from its trace.json, as `slipstream schedule` draws a plan."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, such as runs/default, or its name below runs."""
    start: float | None = None
    """Seconds from the beginning of the trace; left out: the last steps before the pipeline drains."""
    seconds: float | None = None
    """How long a window; left out: two steps."""
    output: Path = Path("timeline.svg")
    """.svg or .png"""


def _timeline(arguments: list[str]) -> None:
    from .schedule import ScheduleError
    from .schedule.render import png, svg
    from .trace import TraceError, Window, measured_timeline, read_trace, steady_window

    given = parse(TimelineArguments, arguments, "slipstream timeline", inspect.getdoc(TimelineArguments) or "")
    run = find_run(given.run)
    if given.output.suffix not in (".svg", ".png"):
        raise UsageError(f"output = '{given.output}' cannot be drawn: end its name in .svg or .png")
    if given.seconds is not None and not given.seconds > 0:
        raise UsageError(f"seconds = {given.seconds:g} shows nothing: use more than 0")
    try:
        trace = read_trace(run / "trace.json")
        steady = steady_window(trace)
        window = Window(
            steady.start if given.start is None else given.start,
            steady.seconds if given.seconds is None else given.seconds,
        )
        timeline = measured_timeline(trace, window)
        drawn = window.within(trace)
        title = f"{run.name}: {timeline.schedule.name} from {window.start:.3f} s, in milliseconds"
        check_output(given.output)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        if given.output.suffix == ".svg":
            given.output.write_text(svg(timeline, title), encoding="utf-8")
        else:
            png(timeline, title, given.output)
    except (TraceError, ScheduleError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"output = '{given.output}' cannot be written ({error.strerror}): choose another") from error
    print(f"drawn in {given.output}: {drawn.seconds:.3f} s from {drawn.start:.3f} s")


# ---- prepare


@dataclass(frozen=True)
class PrepareArguments:
    """Turns text into token shards, once, so that training maps them instead of tokenising.

    Train on them with --data.sources PREFIX.train.*.bin --data.validation-sources PREFIX.validation.*.bin.
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE ...")]
    """Text or JSONL files, folders or globs."""
    output: str
    """Path and beginning of the shards' names: data/web gives data/web.train.00000.bin and so on."""
    tokenizer: str = "bytes"
    """"bytes", or a tokenizer.json or its folder."""
    end_of_text: str | None = None
    """The tokenizer's token that ends a document; found by its usual names if left out. "none": it has no end."""
    shard_tokens: int = 100_000_000
    """Tokens in a shard, the last one aside."""
    validation_fraction: float = 0.05
    """The part held out: the end of the tokens."""
    text_field: str = "text"
    """The field of a JSONL object that holds its text."""
    overwrite: bool = False
    """Replace earlier shards of the same name."""


def _prepare(arguments: list[str]) -> None:
    from .data import DataError, prepare

    given = parse(PrepareArguments, arguments, "slipstream prepare", inspect.getdoc(PrepareArguments) or "")
    console = Console(stderr=True)
    progress = Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("preparing", total=None)
    try:
        with progress:
            shards = prepare(
                given.sources,
                given.tokenizer,
                given.output,
                given.shard_tokens,
                given.validation_fraction,
                lambda done, total: progress.update(task, completed=done, total=total),
                text_field=given.text_field,
                end_of_text=given.end_of_text,
                overwrite=given.overwrite,
                tell=lambda line: print(line, file=sys.stderr),
            )
    except DataError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(_cannot_write(error, "output")) from error
    for shard in shards:
        print(shard)
