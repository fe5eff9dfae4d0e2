"""bf16 working copies on one GPU: four stages as threads against the oracle, what the copies weigh, and who waits.

    python benchmarks/mixed_precision.py                              one GPU, about two minutes
    python benchmarks/mixed_precision.py --device cpu --preset tiny --steps 4 --sequence-length 32

Three questions, each with its answer printed:
1. Does the pipeline follow the oracle (slipstream.reference_run) with float32 masters, in bf16 and in float32?
   Newton-Schulz in float32 on both sides: in bf16 it turns a last digit of a gradient into 4e-3 of an update. A sum in
   another order, and the two part in the last digit of a master; where that turns the rounding of a bf16 copy, the
   difference grows from step to step like any other. So beside them runs the oracle itself from weights that were moved
   by one part in ten million: no implementation can stay closer than that. Parameters: the norm of the difference
   over the norm of what training moved. Losses: the largest relative difference so far.
2. What do two weight versions and error feedback weigh, against one version? Bytes asked of the allocator for weights
   and masters, beside what the rule says: 2 bytes a working copy, 4 a master.
3. Does the host ever wait for the device on the step path? Calls of the CUDA runtime that wait, as the profiler counts
   them, and those of our own by thread; per step: those of a long run less those of a short one, so that the beginning
   and the end of a run do not count. The stages' own threads should have none.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from slipstream import StepReport, launch, reference_run
from slipstream.config.schema import (
    Config,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    TrainSection,
)
from slipstream.model.chunked_loss import decoder_and_loss
from slipstream.model.decoder import initialise
from slipstream.train.build import Components, build_components
from slipstream.train.process import make_pipeline
from slipstream.transport.base import Transport

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def configuration(arguments: argparse.Namespace, **pipeline: Any) -> Config:
    return Config(
        model=ModelSection(preset=arguments.preset, sequence_length=arguments.sequence_length),
        pipeline=replace(
            PipelineSection(stages=arguments.stages, microbatches=arguments.stages, transport="thread"), **pipeline
        ),
        optimizer=OptimizerSection(),
        train=TrainSection(
            steps=arguments.steps,
            microbatch_size=arguments.microbatch_size,
            device=arguments.device,
            compute_dtype="bfloat16",
            track_alignment=False,
        ),
        evaluation=EvaluationSection(batches=0),
    )


def train(config: Config, components: Components) -> tuple[dict[str, torch.Tensor], list[float]]:
    def worker(transport: Transport) -> tuple[dict[str, torch.Tensor], list[float]]:
        pipeline = make_pipeline(transport, config, components)
        losses = [report.loss for report in pipeline.run() if isinstance(report, StepReport)]
        return pipeline.weights(), losses

    stages = launch(worker, config.pipeline.stages, threads=True)
    return {name: weight for weights, _ in stages for name, weight in weights.items()}, stages[-1][1]


def reference(
    config: Config, components: Components, moved: float = 0.0
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """moved: all weights at the beginning, by this share of them."""
    model, loss = decoder_and_loss(components.model, config.train.loss_chunk_tokens)
    device = torch.device(config.train.device)
    model.to(device)
    initialise(model, components.model, config.train.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + moved)

    def data(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = components.batches(step, microbatch)
        return inputs.to(device), targets.to(device)

    return reference_run(
        model,
        data=data,
        loss=loss,
        groups=components.groups,
        num_microbatches=config.pipeline.microbatches,
        num_steps=config.train.steps,
        delays=[1],
        learning_rate=components.learning_rate,
        loss_scale=lambda step: 1 / components.batches.num_tokens(step),
        dtype=getattr(torch, config.train.compute_dtype),
        gradient_dtype=torch.float32,
    )


def follow_the_oracle(config: Config, components: Components) -> dict[str, Any]:
    expected, expected_losses = reference(config, components)
    start = reference(replace(config, train=replace(config.train, steps=0)), components)[0]
    moved = norm([expected[name] - weight for name, weight in start.items()])
    found: dict[str, Any] = {"oracle_losses": expected_losses}
    for who, (weights, losses) in {
        "the pipeline": train(config, components),
        "the oracle, moved by 1e-7": reference(config, components, 1e-7),
    }.items():
        apart = [abs(ours - theirs) / theirs for ours, theirs in zip(losses, expected_losses, strict=True)]
        found[who] = {
            "parameters": norm([weights[name] - weight for name, weight in expected.items()]) / moved,
            "losses": losses,
            "losses_apart": list(itertools.accumulate(apart, max)),
        }
    return found


def norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def weigh(config: Config, components: Components) -> dict[str, int]:
    """Bytes that the copies of the weights asked for, and how many numbers they are copies of."""
    device = torch.device(config.train.device)

    def asked() -> int:
        if device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    together = threading.Barrier(config.pipeline.stages)
    gc.collect()  # of an earlier pipeline, which refers to itself

    def worker(transport: Transport) -> tuple[int, int, int]:
        together.wait()
        before = asked()
        together.wait()
        pipeline = make_pipeline(transport, config, components)
        together.wait()
        after = asked()
        together.wait()
        module = pipeline.versions.module(0)
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        products = pipeline.updater.products.nbytes
        return after - before, sum(p.numel() for p in module.parameters()), buffers + products

    stages = launch(worker, config.pipeline.stages, threads=True)
    return {
        "bytes": stages[0][0],  # of all stages: they share the device
        "numbers": sum(numbers for _, numbers, _ in stages),
        "tables": sum(others for *_, others in stages),
    }


def count_waits(config: Config, components: Components) -> dict[str, float]:
    """Per step: by the profiler, whose threads have no names, and by the names of the threads that wait for events."""
    short, long = (replace(config, train=replace(config.train, steps=steps)) for steps in (10, 30))
    train(short, components)  # everything lazy has happened
    few, many = profile(short, components), profile(long, components)
    return {name: (many[name] - few[name]) / 20 for name in sorted(many | few)}


def profile(config: Config, components: Components) -> Counter[str]:
    waits: Counter[str] = Counter()
    wait_for_event = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        waits[f"{threading.current_thread().name}: waits for an event"] += 1
        wait_for_event(event)

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        mock.patch.object(torch.cuda.Event, "synchronize", counted),
        torch.profiler.profile(activities=activities) as p,
    ):
        train(config, components)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        p.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        name = event.get("name", "")
        if name.startswith(WAITS) and not name.endswith("Async"):
            waits[f"profiler: {name}"] += 1
        if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")):
            waits["profiler: launches"] += 1
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--microbatch-size", type=int, default=16)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help="write all numbers as JSON here")
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # else the oracle does not even follow itself
    config = configuration(arguments)
    components = build_components(config)
    found: dict[str, Any] = {}
    print(f"{arguments.steps} steps of {arguments.preset} on {arguments.stages} stages, away from the oracle:")
    marks = sorted({1, 2, 5, 10, 20, arguments.steps} & set(range(arguments.steps + 1)))
    print("  | computed in | who | parameters | " + " | ".join(f"loss, step {mark}" for mark in marks) + " |")
    print("  |---|---|" + "---:|" * (1 + len(marks)))
    for dtype in ("float32", "bfloat16"):
        oracle = follow_the_oracle(replace(config, train=replace(config.train, compute_dtype=dtype)), components)
        found[dtype] = oracle
        expected = oracle["oracle_losses"]
        for who in ("the pipeline", "the oracle, moved by 1e-7"):
            apart = " | ".join(f"{oracle[who]['losses_apart'][mark - 1]:.1e}" for mark in marks)
            print(f"  | {dtype} | {who} | {oracle[who]['parameters']:.1e} | {apart} |", flush=True)
        losses = oracle["the pipeline"]["losses"]
        print(f"  loss {losses[0]:.4f} -> {losses[-1]:.4f}, the oracle's -> {expected[-1]:.4f}")
    if arguments.device == "cuda":
        ways = {
            "one version (1F1B)": configuration(arguments, schedule="one_f_one_b"),
            "two versions": replace(config, optimizer=replace(config.optimizer, error_feedback=0.0)),
            "two versions and error feedback": config,
        }
        for (way, chosen), per_number in zip(ways.items(), (6, 8, 8), strict=True):
            weight = found[way] = weigh(chosen, components)
            rule = per_number * weight["numbers"] + weight["tables"]
            print(f"  {way}: {weight['bytes']:,} bytes, by the rule {rule:,}")
        found["waits"] = count_waits(config, components)
        print("  per step, what waits for the device, beside what is launched:")
        for name, count in found["waits"].items():
            print(f"    {name} {count:.1f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
