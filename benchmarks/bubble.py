"""How much of the time a stage computes: slipstream beside torch.distributed.pipelining, in one interleaved run.

    make bench-bubble                                       everything, about ten minutes
    .venv/bin/python benchmarks/bubble.py --only emulated   stages that sleep: the schedule, and nothing else
    .venv/bin/python benchmarks/bubble.py --only real       a decoder on two cores

`slipstream bench` has more rivals and the same code (slipstream/bench/); these tables stay, to be compared with earlier
ones.

The rules. Some were changed after first results were seen; the dated page says which, and what they gave before:
- One world of processes per table; the rivals take turns in it, round after round, so noise hits all of them.
- Emulated: a forward takes 10 ms and a backward 20 ms, on every stage, and since `slipstream bench` came the layer's
  arithmetic lies inside that time (before, it came on top of it); utilisation = m (f + b) / step time with the nominal
  f and b, so that whatever the schedule, the messages, Python or the timer add counts as idle, for every rival alike.
  The bare loop is what the machine allows: every process runs the same layer forward and backward, alone, with no
  message.
- Step time: mean over the steady steps of a round on the slowest stage; two_bw's fill and drain are left out, and the
  first two steps of the others. Reported: median over rounds, and the lowest and highest round.
- Where cores are fewer than stages, every process keeps to one of them and neighbours to different ones; the layer's
  backward is one node of autograd; and torch.distributed lives only while a rival of torch's runs, for its threads wake
  a hundred times a second. All three since the fourth measurement, for every rival alike.
- slipstream's stages share one machine here and exchange messages in shared memory; "gloo links" is a world of its own,
  beside torch's 1F1B, whose messages always go over gloo.
- No rival clips unless its row says so; diagnostics are off.
- Real: the ratio of step times of torch's Schedule1F1B and two_bw in the same round, AdamW, one thread per stage, and
  plain BLAS for both: oneDNN is slower at these shapes on ARM, and more so when both cores are busy.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from slipstream.tools.bench.contenders import BARE_LOOP, Rival
from slipstream.tools.bench.turns import World, compete
from slipstream.tools.bench.workloads import BACKWARD_SECONDS, FORWARD_SECONDS


def run_table(console: Console, world: World) -> list[dict[str, Any]]:
    console.print(
        f"{world.workload}, {world.num_stages} stages: {len(world.rivals)} rivals, {world.num_rounds} rounds of "
        f"{world.num_steps} steps ..."
    )
    rows = []
    for outcome in compete(world):
        if outcome.failure:
            sys.exit(f"{outcome.rival.name}: {outcome.failure}")
        measured = {"num_stages": world.num_stages, "seconds_per_step": outcome.seconds_per_step}
        rows.append(asdict(outcome.rival) | measured)
    return rows


def emulated_tables(console: Console, num_rounds: int) -> list[dict[str, Any]]:
    everything = []
    for p, num_steps in ((4, 14), (8, 10)):
        rivals = (
            Rival(BARE_LOOP, p),
            Rival("torch GPipe", p, "ScheduleGPipe"),
            Rival("torch 1F1B", p, "Schedule1F1B"),
            Rival("slipstream 1F1B", p, "one_f_one_b"),
            Rival("slipstream 2BW", p, "two_bw"),
            Rival("slipstream 2BW, clipping", p, "two_bw", clip_norm=1.0),
            Rival("2BW, 3 ms links", 2 * p, "two_bw", latency_seconds=0.003, clip_norm=1.0),
            Rival("2BW deep, 3 ms links", 2 * p, "two_bw", depth="double", latency_seconds=0.003, clip_norm=1.0),
        )
        over_gloo = (Rival("torch 1F1B", p, "Schedule1F1B"), Rival("slipstream 2BW, gloo links", p, "two_bw"))
        rows = run_table(console, World("emulated", p, rivals, num_rounds, num_steps))
        rows += run_table(console, World("emulated", p, over_gloo, num_rounds, num_steps, shared_memory=False))[1:]
        table = Table(title=f"emulated stages, P = {p}: share of the time spent computing")
        for column in ("schedule", "m", "utilisation", "lowest - highest round", "ideal"):
            table.add_column(column, justify="left" if column == "schedule" else "right")
        for row in rows:
            m = row["num_microbatches"]
            busy = m * (FORWARD_SECONDS + BACKWARD_SECONDS)
            shares = sorted(busy / seconds for seconds in row["seconds_per_step"])
            row["utilisation"] = statistics.median(shares)
            flushes = row["schedule"] not in ("", "two_bw")
            ideal = f"{m / (m + p - 1):.3f}" if flushes else "1.000"
            table.add_row(
                row["name"], str(m), f"{row['utilisation']:.3f}", f"{shares[0]:.3f} - {shares[-1]:.3f}", ideal
            )
        console.print(table)
        everything += rows
    return everything


def real_table(console: Console, num_rounds: int) -> list[dict[str, Any]]:
    ms = (2, 4, 8)
    pairs = [(Rival("torch 1F1B", m, "Schedule1F1B"), Rival("slipstream 2BW", m, "two_bw")) for m in ms]
    rivals = tuple(rival for pair in pairs for rival in pair)
    rows = run_table(console, World("real", 2, rivals, num_rounds, num_steps=9))
    table = Table(title="real compute, P = 2, one thread per stage: time per step, torch 1F1B over slipstream 2BW")
    for column in ("m", "ratio", "lowest - highest round", "ideal"):
        table.add_column(column, justify="right")
    for m, theirs, ours in zip(ms, rows[::2], rows[1::2], strict=True):
        seconds = zip(theirs["seconds_per_step"], ours["seconds_per_step"], strict=True)
        ratios = sorted(their / our for their, our in seconds)
        ours["ratio"] = statistics.median(ratios)
        table.add_row(str(m), f"{ours['ratio']:.3f}", f"{ratios[0]:.3f} - {ratios[-1]:.3f}", f"{(m + 1) / m:.3f}")
    console.print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("emulated", "real"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write every round's figures here")
    arguments = parser.parse_args()
    console = Console()
    rows = []
    if arguments.only != "real":
        rows += emulated_tables(console, arguments.rounds)
    if arguments.only != "emulated":
        rows += real_table(console, arguments.rounds)
    if arguments.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
