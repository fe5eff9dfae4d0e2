"""What a step of a study costs on a GPU, and which share of it the optimizer takes, before and after.

    python benchmarks/study_speed.py TEXT.bin

TEXT.bin: bytes, 40 MB or more. 25M parameters, 32,768 bytes a step, and a quarter of that where it says so. Each line
is one way to do the same step, slowest first; "one by one" orthogonalises every matrix in kernels of its own. The share
is the device's time from the end of the backward to the next weights, over the second half of the steps; the step is
timed over the same half, by a host clock between two synchronisations. Results: benchmarks/study_speed_h200_DATE.md.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from slipstream.config.schema import Config, DataConfig, EvaluationSection, ModelSection, PipelineSection, TrainSection
from slipstream.optim import optimizer as optimizers
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.delayed import DelayedRun
from slipstream.train.build import build_components

STEPS = 200
ROUNDS = 3

WAYS = (
    # name, optimizer, sequences a step, stacked, compute_dtype, compile_mode, Newton-Schulz
    ("fp32, one by one", "muon", 64, False, None, None, "float32"),
    ("fp32", "muon", 64, True, None, None, "float32"),
    ("bf16, one by one", "muon", 64, False, "bfloat16", None, "bfloat16"),
    ("bf16", "muon", 64, True, "bfloat16", None, "bfloat16"),
    ("bf16, compiled, one by one", "muon", 64, False, "bfloat16", "default", "bfloat16"),
    ("bf16, compiled", "muon", 64, True, "bfloat16", "default", "bfloat16"),
    ("bf16, CUDA graph, one by one", "muon", 64, False, "bfloat16", "reduce-overhead", "bfloat16"),
    ("bf16, CUDA graph", "muon", 64, True, "bfloat16", "reduce-overhead", "bfloat16"),
    ("bf16, compiled, 8,192 bytes", "muon", 16, True, "bfloat16", "default", "bfloat16"),
    ("bf16, CUDA graph, 8,192 bytes", "muon", 16, True, "bfloat16", "reduce-overhead", "bfloat16"),
    *(
        ("bf16, CUDA graph", name, 64, True, "bfloat16", "reduce-overhead", "bfloat16")
        for name in ("adamw", "normuon", "soap", "scion", "adan", "lion", "mars", "nadamw")
    ),
)


def measure(
    base: Config, name: str, size: int, is_stacked: bool, dtype: str | None, mode: str | None, newton_schulz: str
) -> tuple[float, float]:
    """Milliseconds a step, and the optimizer's share."""
    section = replace(base.optimizer, name=name, learning_rate=0.001, newton_schulz_dtype=newton_schulz)
    config = replace(base, optimizer=section, train=replace(base.train, microbatch_size=size))
    components = build_components(config)
    components = replace(
        components, groups=[replace(group, stacks=group.stacks and is_stacked) for group in components.groups]
    )
    whole = optimizers.STACK_ELEMENTS
    optimizers.STACK_ELEMENTS = whole if is_stacked else 1
    try:
        run = DelayedRun(Cell(config, compute_dtype=dtype, compile_mode=mode), components, torch.device("cuda"))
        started = 0.0
        for done in run.train():
            if done == STEPS // 2:
                torch.cuda.synchronize()
                started = time.perf_counter()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / (STEPS - STEPS // 2) * 1e3, run.optimizer_share()
    finally:
        optimizers.STACK_ELEMENTS = whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds none here.")
    base = Config(
        model=ModelSection(preset="small"),
        data=DataConfig(sources=(arguments.text,), token_dtype="uint8"),
        pipeline=PipelineSection(stages=1, microbatches=1, transport="thread"),
        train=TrainSection(steps=STEPS, device="cuda"),
        evaluation=EvaluationSection(batches=0),
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROUNDS} rounds: median (lowest - highest)\n")
    print("| optimizer | way | ms a step | bytes a second | optimizer's share |\n|---|---|---:|---:|---:|", flush=True)
    for way, name, size, *rest in WAYS:
        found = sorted(measure(base, name, size, *rest) for _ in range(ROUNDS))
        milliseconds, share = found[len(found) // 2]
        spread = f"{found[0][0]:.1f} - {found[-1][0]:.1f}"
        rate = size * 512 / milliseconds * 1e3
        print(f"| {name} | {way} | {milliseconds:.1f} ({spread}) | {rate:,.0f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
