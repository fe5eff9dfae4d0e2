"""Do slices of a GPU slow each other down? Timelines of a pipeline, above the clock and the power of the GPU.

    python benchmarks/power_on_slices.py --share 25 --output quarters          measures, and draws where matplotlib is
    python benchmarks/power_on_slices.py --draw quarters                       draws only

It runs one_f_one_b, in which stages are idle for a part of the time, and then two_bw, in which they are not, with the
decoder of `slipstream bench --device cuda` on four slices. Meanwhile nvidia-smi is asked every 20 ms what the clock and
the power are, and whether the power limit holds the clock down. On an H200 it renews its values every 100 ms.

The table gives the time of a microbatch (a forward and a backward of one stage) by the number of stages that compute
meanwhile. A slice has its own multiprocessors. So if the time grows with that number, the slices share something else:
the memory's bandwidth, or, if the clock falls too, the power.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from slipstream import Pipeline, launch
from slipstream.pipeline.clock import Activity
from slipstream.tools.bench.slices import sliced
from slipstream.tools.bench.workloads import GpuSetting, Placement, on_gpu
from slipstream.transport.base import Transport

SCHEDULES = ("one_f_one_b", "two_bw")
READINGS = ("timestamp", "clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap", "enforced.power.limit")
EVERY_MS = 20
NUM_SHOWN_STEPS = 3
COLOURS = {"forward": "#3a84c4", "backward": "#e8952c"}


@dataclass(frozen=True)
class Span:
    """A forward or a backward. Times are seconds since the epoch."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Reading:
    time: float
    clock_mhz: float
    watts: float
    is_capped: bool
    limit_watts: float


# ---- measuring


def run_stage(
    transport: Transport, setting: GpuSetting, num_microbatches: int, num_steps: int
) -> dict[str, list[Span]]:
    """Runs every schedule on one stage, and returns its spans."""
    spans = {}
    for schedule in SCHEDULES:
        workload = on_gpu(setting, Placement(transport.num_stages), transport.device)
        pipeline = Pipeline(
            transport,
            workload.model,
            data=workload.data,
            loss=workload.loss,
            optimizer=workload.optimizer,
            num_microbatches=num_microbatches,
            num_steps=num_steps,
            schedule=schedule,
            layers_per_stage=workload.sizes,
            track_alignment=False,
            prepare=workload.prepare,
            device=workload.device,
        )
        for _ in pipeline.run():
            pass
        started_at = pipeline.clock.started_at
        spans[schedule] = [
            Span(
                transport.stage,
                kind.name.lower(),
                span.action.microbatch,
                started_at + span.start,
                started_at + span.end,
            )
            for span in pipeline.clock.spans
            if (kind := span.activity) in (Activity.FORWARD, Activity.BACKWARD)
        ]
    return spans


@contextmanager
def read_gpu() -> Iterator[list[Reading]]:
    """Appends to the list what nvidia-smi says, as long as the `with` block lasts."""
    readings: list[Reading] = []

    def read(lines: Iterable[str]) -> None:
        for line in lines:
            when, clock, watts, capped, limit = (word.strip() for word in line.split(","))
            at = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            with suppress(ValueError):  # nvidia-smi prints [N/A] for an unknown value
                readings.append(Reading(at, float(clock), float(watts), capped == "Active", float(limit)))

    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(READINGS)}", "--format=csv,noheader,nounits"]
    with subprocess.Popen([*command, f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield readings
        finally:
            process.terminate()
            reader.join()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    setting = GpuSetting(dim=arguments.dim, batch=arguments.batch, dtype=arguments.dtype, share=arguments.share)
    worker = partial(run_stage, setting=setting, num_microbatches=arguments.microbatches, num_steps=arguments.steps)
    with sliced(arguments.share), read_gpu() as readings:
        stages = launch(worker, arguments.stages, device="cuda", share_gpu=True, start_method="spawn")
    spans = {name: [asdict(span) for stage in stages for span in stage[name]] for name in SCHEDULES}
    given = {key: value for key, value in vars(arguments).items() if key not in ("output", "draw")}
    return {"setting": given, "spans": spans, "readings": [asdict(reading) for reading in readings]}


# ---- what it says


@dataclass(frozen=True)
class Course:
    """The steady part of a run: its last steps before the pipeline drains."""

    schedule: str
    start: float
    end: float
    num_steps: int
    spans: list[Span]
    readings: list[Reading]

    @property
    def num_computing(self) -> float:
        """Returns the number of stages that compute, on average."""
        return sum(span.end - span.start for span in self.spans) / (self.end - self.start)


def courses(record: dict[str, Any]) -> list[Course]:
    found, m = [], record["setting"]["microbatches"]
    for schedule, given in record["spans"].items():
        spans = [Span(**span) for span in given]
        ends = [  # of the first stage's last backward of every step
            span.end for span in spans if span.stage == 0 and span.kind == "backward" and (span.microbatch + 1) % m == 0
        ]
        steady = ends[len(ends) // 2 : -2]  # two_bw drains in its last two steps
        start, end = steady[0], steady[-1]
        readings = [reading for each in record["readings"] if start <= (reading := Reading(**each)).time <= end]
        inside = [span for span in spans if span.end > start and span.start < end]
        cut = [
            Span(span.stage, span.kind, span.microbatch, max(span.start, start), min(span.end, end)) for span in inside
        ]
        found.append(Course(schedule, start, end, len(steady) - 1, cut, readings))
    return found


def company(course: Course) -> dict[int, float]:
    """Returns the milliseconds of a microbatch by the number of stages that computed meanwhile, on average and rounded,
    the own stage included. Spans at the edges of the steady part are left out, because they are cut."""
    by_number: dict[tuple[str, int], list[float]] = {}
    for span in course.spans:
        if span.start <= course.start or span.end >= course.end:
            continue
        seconds = span.end - span.start
        others = sum(
            max(0.0, min(span.end, o.end) - max(span.start, o.start)) for o in course.spans if o.stage != span.stage
        )
        by_number.setdefault((span.kind, round(1 + others / seconds)), []).append(1000 * seconds)
    means = {key: fmean(values) for key, values in by_number.items()}
    numbers = sorted({number for _, number in means})
    return {
        n: means["forward", n] + means["backward", n]
        for n in numbers
        if {("forward", n), ("backward", n)} <= set(means)
    }


def table(found: Sequence[Course]) -> str:
    numbers = sorted({number for course in found for number in company(course)})
    head = ["schedule", "step, ms", "stages that compute", *(f"microbatch, ms, {n} computing" for n in numbers)]
    head += ["clock, MHz", "power, W", "limit, W", "time at the limit"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for course in found:
        times, readings = company(course), course.readings
        row = [
            course.schedule,
            f"{1000 * (course.end - course.start) / course.num_steps:.0f}",
            f"{course.num_computing:.2f}",
        ]
        row += [f"{times[n]:.1f}" if n in times else "" for n in numbers]
        if readings:
            row += [
                f"{median(each.clock_mhz for each in readings):,.0f}",
                f"{median(each.watts for each in readings):.0f}",
            ]
            row += [f"{readings[0].limit_watts:.0f}", f"{fmean(each.is_capped for each in readings):.0%}"]
        else:
            row += [""] * 4
        lines.append(row)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(found: Sequence[Course], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    options = {"height_ratios": [3, 1, 1]}
    figure, columns = pyplot.subplots(
        3, len(found), figsize=(12, 6), squeeze=False, sharex=True, sharey="row", gridspec_kw=options
    )
    for column, course in enumerate(found):
        timeline, clock, power = columns[:, column]
        num_shown = min(NUM_SHOWN_STEPS, course.num_steps)
        begin = course.end - num_shown * (course.end - course.start) / course.num_steps
        for span in course.spans:
            if span.end > begin:
                start = max(span.start, begin)
                timeline.barh(
                    span.stage, span.end - start, left=start - begin, color=COLOURS[span.kind], edgecolor="white"
                )
        shown = [reading for reading in course.readings if reading.time >= begin]
        times = [reading.time - begin for reading in shown]
        clock.plot(times, [reading.clock_mhz for reading in shown], color="black")
        power.plot(times, [reading.watts for reading in shown], color="black")
        if shown:
            power.axhline(shown[0].limit_watts, color="crimson", linestyle="--")
        timeline.set_title(f"{course.schedule}: {course.num_computing:.1f} stages compute")
        power.set_xlabel("seconds")
    timeline, clock, power = columns[:, 0]
    timeline.set_yticks(sorted({span.stage for course in found for span in course.spans}))
    timeline.invert_yaxis()
    for axes, label in ((timeline, "stage"), (clock, "clock, MHz"), (power, "power, W\n(dashed: limit)")):
        axes.set_ylabel(label)
    figure.suptitle("Forwards (blue) and backwards (orange) of the stages, and the GPU that they share")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=25, help="percent of the multiprocessors for each stage")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16, help="of each schedule")
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1, help="sequences in a microbatch")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--output", type=Path, default=Path("power_on_slices"), help="folder for the results")
    parser.add_argument("--draw", type=Path, help="folder with results to draw, instead of measuring")
    arguments = parser.parse_args(words)
    if arguments.steps < 10:
        parser.error(f"steps = {arguments.steps} leaves no steady part: use 10 or more")
    folder: Path = arguments.draw or arguments.output
    path = folder / "timeline.json"
    if arguments.draw is None:
        if not torch.cuda.is_available():
            parser.error("this measures a GPU, and torch finds none here.")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(arguments)), encoding="utf-8")
    elif not path.exists():
        parser.error(f"draw = {folder} has no timeline.json: measure first, with --output {folder}")
    found = courses(json.loads(path.read_text(encoding="utf-8")))
    print(table(found))
    if importlib.util.find_spec("matplotlib") is None:
        print(f"draw it where matplotlib is installed: python benchmarks/power_on_slices.py --draw {folder}")
        return
    draw(found, folder / "timeline.png")


if __name__ == "__main__":
    main()
