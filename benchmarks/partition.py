"""Where to cut a model with a heavy head: every possible cut measured, and which of them the program would choose.

    .venv/bin/python benchmarks/partition.py            about three minutes on two cores

The rules: a decoder of eight narrow blocks and a vocabulary that makes its head dearer than several of them; P = 2,
m = 4, two_bw, AdamW, one thread per stage. All cuts take turns in one world of processes, round after round.
Throughput: steady steps a second on the slower stage, median over rounds. "equal counts" gives both stages as many
layers; "FLOPs" is what `slipstream train` chooses by itself; "profile" is what it chooses with pipeline.profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from slipstream import Pipeline, StepReport, launch
from slipstream.config.models import model_of
from slipstream.config.schema import Config, ModelSection, PipelineSection, TrainSection
from slipstream.model.decoder import decoder, initialise, layer_costs, next_token_loss
from slipstream.pipeline.partition import partition
from slipstream.tools.bench.turns import meet
from slipstream.tools.plan.profile import measure_profile
from slipstream.transport.base import Transport

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 2, 4, 7
VOCABULARY = 8192
CONFIG = Config(
    model=ModelSection(
        preset="tiny",
        vocab_size=VOCABULARY,
        sequence_length=256,
        dim=128,
        hidden_dim=352,
        num_layers=8,
        num_heads=4,
        num_kv_heads=4,
    ),
    pipeline=PipelineSection(stages=NUM_STAGES, microbatches=NUM_MICROBATCHES),
    train=TrainSection(microbatch_size=1, device="cpu"),
)


def measure(transport: Transport, cuts: list[list[int]], num_rounds: int) -> list[list[float]]:
    """Seconds per step by cut and round, on this stage."""
    torch.set_num_threads(1)
    model_settings = model_of(CONFIG, VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_MICROBATCHES, CONFIG.train.microbatch_size, model_settings.sequence_length + 1)
    tokens = torch.randint(model_settings.vocab_size, shape, generator=generator)
    seconds: list[list[float]] = [[] for _ in cuts]
    for _ in range(num_rounds):
        for cut, row in zip(cuts, seconds, strict=True):
            model = decoder(model_settings)
            initialise(model, model_settings, seed=0)
            meet(transport)
            pipeline = Pipeline(
                transport,
                model,
                data=lambda step, microbatch: (tokens[microbatch, :, :-1], tokens[microbatch, :, 1:]),
                loss=next_token_loss,
                optimizer=partial(torch.optim.AdamW, lr=1e-4),
                num_microbatches=NUM_MICROBATCHES,
                num_steps=NUM_STEPS,
                layers_per_stage=cut,
                track_alignment=False,
            )
            splits = [report.splits[transport.stage] for report in pipeline.run() if isinstance(report, StepReport)]
            row.append(statistics.median(split.total for split in splits[3:-1]))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every round's figures here")
    arguments = parser.parse_args()
    console = Console()
    model = model_of(CONFIG, VOCABULARY)
    num_layers = model.num_layers + 2
    torch.set_num_threads(1)
    with console.status("profiling the layers"):
        profile = measure_profile(CONFIG, model, lambda kind: None)
    measured = [layer.compute for layer in profile.layer_costs(model, Path("profile.json"))]
    chosen = {
        "equal counts": partition([1.0] * num_layers, NUM_STAGES),
        "FLOPs": partition(layer_costs(model, model.sequence_length), NUM_STAGES),
        "profile": partition(measured, NUM_STAGES),
    }
    cuts = [[first, num_layers - first] for first in range(1, num_layers)]
    with console.status(f"{len(cuts)} cuts, {arguments.rounds} rounds"):
        by_stage = launch(partial(measure, cuts=cuts, num_rounds=arguments.rounds), NUM_STAGES, timeout_seconds=120)
    rates = {
        tuple(cut): [1 / max(stage[index][i] for stage in by_stage) for i in range(arguments.rounds)]
        for index, cut in enumerate(cuts)
    }
    best = max(statistics.median(row) for row in rates.values())
    table = Table(title="every cut of ten layers into two stages")
    for column in ("layers", "steps/s", "lowest - highest round", "of the best", "chosen by"):
        table.add_column(column, justify="right")
    for cut, row in rates.items():
        names = ", ".join(name for name, sizes in chosen.items() if tuple(sizes) == cut)
        middle = statistics.median(row)
        table.add_row(
            f"{cut[0]} + {cut[1]}", f"{middle:.3f}", f"{min(row):.3f} - {max(row):.3f}", f"{middle / best:.3f}", names
        )
    console.print(table)
    if arguments.json:
        rows = [{"cut": cut, "steps_per_second": row} for cut, row in rates.items()]
        arguments.json.write_text(json.dumps({"chosen": chosen, "layer_seconds": measured, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
