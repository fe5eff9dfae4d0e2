"""`slipstream timeline`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from ..config.files import check_output
from ..errors import UsageError
from .parse import find_run, parse
from .schedule import SUFFIXES, draw


@dataclass(frozen=True)
class TimelineArguments:
    """Draws what the stages of a run did in a window of time, from its trace.json."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, such as runs/default, or its name below runs/."""
    start: float | None = None
    """Seconds from the beginning of the trace; by default the last steps before the pipeline drains."""
    seconds: float | None = None
    """Length of the window; by default two steps."""
    output: Path = Path("timeline.svg")
    """The file to draw, .svg or .png."""


def main(arguments: list[str]) -> None:
    from ..observe.trace import TraceError, measured_timeline, read_trace, steady_window
    from ..schedule import ScheduleError

    given = parse(TimelineArguments, arguments, "slipstream timeline")
    run = find_run(given.run)
    if given.output.suffix not in SUFFIXES:
        raise UsageError(f"output = '{given.output}' cannot be drawn: end its name in .svg or .png")
    if given.seconds is not None and not given.seconds > 0:
        raise UsageError(f"seconds = {given.seconds:g} shows nothing: use more than 0")
    try:
        trace = read_trace(run / "trace.json")
        chosen = {"start": given.start, "seconds": given.seconds}
        window = replace(steady_window(trace), **{name: value for name, value in chosen.items() if value is not None})
        timeline = measured_timeline(trace, window)
        drawn = window.within(trace)
        title = f"{run.name}: {timeline.schedule.name} from {window.start:.3f} s, in milliseconds"
        check_output(given.output)
        draw(timeline, title, given.output)
    except (TraceError, ScheduleError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"output = '{given.output}' cannot be written ({error.strerror}): choose another") from error
    print(f"drawn in {given.output}: {drawn.seconds:.3f} s from {drawn.start:.3f} s")
