"""Does every kind of run over NCCL end where the oracle does? On as many GPUs as there are, also on one.

    torchrun --nproc-per-node 4 experiments/exact_on_gpus.py              all cases; some minutes
    torchrun --nproc-per-node 4 experiments/exact_on_gpus.py tied reshape these alone
    torchrun --nproc-per-node 4 experiments/exact_on_gpus.py --device cpu the same without a GPU, over gloo

Trains a small decoder in float64 as `slipstream train` does, in four processes, once for every case, and prints the
largest difference of a parameter from the oracle's, relative to the parameter's largest entry. The oracle is one
process that knows no stages, replicas or messages (slipstream.reference_run). Exits with 1 if any is above 1e-12.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from oracle import largest_difference

from slipstream.config.schema import Config, EvaluationSection, ModelSection, PipelineSection, RunSection, TrainSection
from slipstream.train.trainer import train

LIMIT = 1e-12
NUM_PROCESSES = 4
NUM_STEPS = 14


def base(device: str, folder: Path) -> Config:
    """Clipping acts in every step, error feedback is on, and evaluations fall into the middle."""
    config = Config(
        model=ModelSection(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=96, sequence_length=32),
        pipeline=PipelineSection(stages=4, processes=NUM_PROCESSES, share_gpu=device == "cuda", timeout_seconds=60.0),
        train=TrainSection(steps=NUM_STEPS, microbatch_size=2, device=device, dtype="float64"),
        evaluation=EvaluationSection(every_steps=4, batches=3),
        run=RunSection(folder=str(folder), log_every_steps=NUM_STEPS),
    )
    return changed(config, optimizer__newton_schulz_dtype="float64", optimizer__clip_norm=0.05)


CASES: dict[str, dict[str, Any]] = {
    "two stages": {"pipeline__stages": 2},
    "four stages": {},
    "four stages at double depth": {"pipeline__depth": "double", "pipeline__microbatches": 8},
    "tied": {"model__tied_embeddings": True},
    "without error feedback or clipping": {"optimizer__error_feedback": 0.0, "optimizer__clip_norm": 0.0},
    "synchronous start": {"pipeline__sync_start_steps": 5},
    "samples of text": {"evaluation__prompts": ("def main(", "import"), "evaluation__sample_tokens": 8},
    "two replicas of two stages": {"pipeline__stages": 2, "pipeline__replicas": 2},
    "two replicas, ZeRO-1, tied": {
        "pipeline__stages": 2,
        "pipeline__replicas": 2,
        "optimizer__sharded": True,
        "model__tied_embeddings": True,
    },
    "one_f_one_b": {"pipeline__schedule": "one_f_one_b"},
    "gpipe": {"pipeline__schedule": "gpipe"},
    "pipedream": {"pipeline__schedule": "pipedream"},
    "paci": {"pipeline__schedule": "paci", "optimizer__error_feedback": 0.0},
    "pipedream without clipping": {"pipeline__schedule": "pipedream", "optimizer__clip_norm": 0.0},
    "paci without clipping": {
        "pipeline__schedule": "paci",
        "optimizer__error_feedback": 0.0,
        "optimizer__clip_norm": 0.0,
        "pipeline__sync_start_steps": 3,
    },
    "reshape": {"pipeline__reshape": ("5=2", "9=2x2"), "model__tied_embeddings": True},
    "resume at another depth": {"pipeline__stages": 2, "checkpoint__resume": True},
}
"""What each changes. The last one begins with six steps on four stages, and goes on from their checkpoint."""


def changed(config: Config, **values: Any) -> Config:
    for name, value in values.items():
        section, field = name.split("__")
        assert field in {known.name for known in fields(getattr(config, section))}, f"{name} is no field"
        config = replace(config, **{section: replace(getattr(config, section), **{field: value})})
    return config


def run_quietly(config: Config) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train(config)


def run_case(name: str, device: str, folder: Path) -> Config:
    config = changed(base(device, folder), run__name=name.replace(" ", "-"), **CASES[name])
    if config.checkpoint.resume:
        run_quietly(changed(config, train__steps=6, pipeline__stages=4, checkpoint__resume=False, **fixed_rate()))
        config = changed(config, **fixed_rate())
    run_quietly(config)
    return config


def fixed_rate() -> dict[str, Any]:
    """The learning rate follows the number of steps, which the first part of a resumed run has fewer of."""
    return {"optimizer__schedule": "constant"}


def wait_for_others(folder: Path) -> None:
    """The last stage still draws a figure when the first one is done."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("left-*"))) < NUM_PROCESSES and time.monotonic() < deadline:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}; by default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="to keep the runs")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"{', '.join(unknown)}: choose of {', '.join(CASES)}")
    if os.environ.get("WORLD_SIZE") != str(NUM_PROCESSES):
        parser.error(f"start it with torchrun --nproc-per-node {NUM_PROCESSES}")
    is_first = os.environ["RANK"] == "0"
    # Every process has to name the same folder, and torchrun gives all of them the same word.
    folder = given.folder or Path(tempfile.gettempdir()) / f"exact-{os.environ['MASTER_PORT']}-{os.getppid()}"
    worst = 0.0
    for name in given.cases or CASES:
        started = time.perf_counter()
        config = run_case(name, given.device, folder)
        if is_first:
            seconds = time.perf_counter() - started
            difference = largest_difference(folder / config.run.name, torch.device(given.device))
            worst = max(worst, difference)
            print(f"{name:40} {difference:.1e}   {seconds:.1f} s", flush=True)
    (folder / f"left-{os.environ['RANK']}").touch()
    if is_first:
        print(f"{'all':40} {worst:.1e}   {'within' if worst <= LIMIT else 'ABOVE'} {LIMIT:g}", flush=True)
        if given.folder is None:
            wait_for_others(folder)
            shutil.rmtree(folder)
    sys.exit(0 if worst <= LIMIT else 1)


if __name__ == "__main__":
    main()
