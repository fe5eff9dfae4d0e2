"""bf16 working copies on one GPU: four stages as threads against the oracle, what the copies weigh, and who waits.

    python benchmarks/mixed_precision.py                              one GPU, about a minute and a half
    python benchmarks/mixed_precision.py --device cpu --preset tiny --steps 4 --sequence-length 32

Three questions, each with its answer printed:
1. Does the pipeline follow the oracle (slipstream.reference_run) in bf16 with float32 masters? Largest difference of a
   parameter, relative to its largest entry, and of the loss of a step. Newton-Schulz in float32 on both sides: in bf16
   it turns a last digit of a gradient into 4e-3 of an update.
2. What do two weight versions and error feedback weigh, against one version? Bytes asked of the allocator for weights
   and masters, beside what the rule says: 2 bytes a working copy, 4 a master.
3. Does the host ever wait for the device on the step path? Calls of the CUDA runtime that wait, per step, as the
   profiler counts them, by thread: the stages' own threads should have none.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream import StepReport, launch, reference_run
from slipstream.config import Config, EvaluationSection, ModelSection, OptimizerSection, PipelineSection, TrainSection
from slipstream.loss import decoder_and_loss
from slipstream.model import initialise
from slipstream.parts import Parts, check
from slipstream.pipeline.comm import Transport
from slipstream.trainer import make_pipeline

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


def train(config: Config, parts: Parts) -> tuple[dict[str, torch.Tensor], list[float]]:
    def worker(transport: Transport) -> tuple[dict[str, torch.Tensor], list[float]]:
        pipeline = make_pipeline(transport, config, parts)
        losses = [report.loss for report in pipeline.run() if isinstance(report, StepReport)]
        return pipeline.weights(), losses

    stages = launch(worker, config.pipeline.stages, threads=True)
    return {name: weight for weights, _ in stages for name, weight in weights.items()}, stages[-1][1]


def follow_the_oracle(config: Config, parts: Parts) -> dict[str, Any]:
    weights, losses = train(config, parts)
    model, loss = decoder_and_loss(parts.model, config.train.loss_chunk_tokens)
    device = torch.device(config.train.device)
    model.to(device)
    initialise(model, parts.model, config.train.seed)

    def data(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = parts.batches(step, microbatch)
        return inputs.to(device), targets.to(device)

    expected, expected_losses = reference_run(
        model,
        data=data,
        loss=loss,
        groups=parts.groups,
        num_microbatches=config.pipeline.microbatches,
        num_steps=config.train.steps,
        delays=[1],
        learning_rate=parts.learning_rate,
        loss_scale=lambda step: 1 / parts.batches.num_tokens(step),
        dtype=torch.bfloat16,
        gradient_dtype=torch.float32,
    )
    difference = max(
        float((weights[name] - weight).abs().max() / weight.abs().max()) for name, weight in expected.items()
    )
    pairs = list(zip(losses, expected_losses, strict=True))
    return {
        "parameters_differ_by": difference,
        "losses_differ_by": max(abs(ours - theirs) / theirs for ours, theirs in pairs),
        "losses": losses,
        "oracle_losses": expected_losses,
    }


def weigh(config: Config, parts: Parts) -> dict[str, int]:
    """Bytes that the copies of the weights asked for, and how many numbers they are copies of."""
    device = torch.device(config.train.device)

    def asked() -> int:
        if device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    together = threading.Barrier(config.pipeline.stages)

    def worker(transport: Transport) -> tuple[int, int, int]:
        together.wait()
        before = asked()
        together.wait()
        pipeline = make_pipeline(transport, config, parts)
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


def count_waits(config: Config, parts: Parts) -> dict[str, float]:
    """Per step and thread's name."""
    names: dict[int, str] = {}

    def worker(transport: Transport) -> None:
        names[threading.get_native_id()] = f"stage {transport.stage}"
        for _ in make_pipeline(transport, config, parts).run():
            pass

    train(replace(config, train=replace(config.train, steps=4)), parts)  # everything lazy has happened
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        launch(worker, config.pipeline.stages, threads=True)
    path = Path("profile.json")
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    waits = Counter(
        f"{event['name']} in {names.get(event.get('tid', 0), 'another thread')}"
        for event in events
        if event.get("name", "").startswith(WAITS) and not event["name"].endswith("Async")
    )
    return {name: count / config.train.steps for name, count in sorted(waits.items())}


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
    config = configuration(arguments)
    parts = check(config)
    found: dict[str, Any] = {"oracle": follow_the_oracle(config, parts)}
    oracle = found["oracle"]
    print(f"{arguments.steps} steps of {arguments.preset} on {arguments.stages} stages in bf16, against the oracle:")
    print(f"  parameters differ by {oracle['parameters_differ_by']:.2e}, losses by {oracle['losses_differ_by']:.2e};")
    first, last, expected = oracle["losses"][0], oracle["losses"][-1], oracle["oracle_losses"][-1]
    print(f"  loss {first:.4f} -> {last:.4f}, the oracle's -> {expected:.4f}")
    if arguments.device == "cuda":
        ways = {
            "one version (1F1B)": configuration(arguments, schedule="one_f_one_b"),
            "two versions": replace(config, optimizer=replace(config.optimizer, error_feedback=0.0)),
            "two versions and error feedback": config,
        }
        for (way, chosen), per_number in zip(ways.items(), (6, 8, 8), strict=True):
            weight = found[way] = weigh(chosen, parts)
            rule = per_number * weight["numbers"] + weight["tables"]
            print(f"  {way}: {weight['bytes']:,} bytes, by the rule {rule:,}")
        found["waits"] = count_waits(config, parts)
        print(
            "  waits for the device, per step: "
            + (", ".join(f"{k} {v:.1f}" for k, v in found["waits"].items()) or "none")
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
