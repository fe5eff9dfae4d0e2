"""How fast one stage of a pipeline computes, alone on its device: tokens per second, and the share of its peak.

    python benchmarks/stage_speed.py --preset 8b --stages 8 --stage 1 --dtype bfloat16 --compile --output stage.json
    python benchmarks/stage_speed.py --preset moe-10b --stages 4 --stage 1 --dtype bfloat16 --compile
    python benchmarks/stage_speed.py --device cpu --quick          to see that it works; its figures mean nothing

The stage is the program's own, as `slipstream train` makes it, in two_bw; its neighbours are played by alone.py and
never make it wait. Weights and tokens are random. Counted is the steady state: from the first forward of the step after
the warm-up to that of the last step, so compiling, filling and draining are left out.

- step: device time from one step to the next. tokens/s and MFU are made of it alone.
- forward, backward: of a microbatch, medians. The update of the batch before runs beside some of them.
- update: what a step takes beyond its forwards and backwards; and beside them, from its beginning to its end.
- MFU: model FLOPs over the peak. For every token 6 per weight of the stage's matrices (of experts, those that it goes
  through; the head's where the stage has it; never the embedding's), and 12 * dim for every position that attention
  looks at, which is half of the sequence on average, for it is causal. What is recomputed is computed twice and counts
  once.
- The peak: a product of two bf16 matrices of 8192 x 8192, measured here (on a CPU smaller, and in float32), and the
  data sheet's 989 TFLOP/s (H100, H200).

--profile FILE besides times every kind of layer alone, for `slipstream plan --profile FILE`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alone import Alone

from slipstream.config.models import model_of
from slipstream.config.optimizers import parameter_groups, peak_rates
from slipstream.config.schema import (
    Config,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    TrainSection,
)
from slipstream.data import Batches, Tokens
from slipstream.model.decoder import ModelConfig, layer_costs
from slipstream.model.presets import PRESETS, layer_names
from slipstream.pipeline import Pipeline, partition
from slipstream.pipeline.clock import Activity, Span
from slipstream.tools.plan.profile import measure_profile
from slipstream.train.build import Components
from slipstream.train.layer_profile import write_profile
from slipstream.train.process import make_pipeline

GIB = 2**30
NOMINAL_FLOPS = 989e12
"""Per second, dense bf16, of an H100 or H200 in SXM form."""
QUICK = {
    "vocab_size": 256,
    "sequence_length": 64,
    "dim": 64,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 128,
}
QUICK_EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_dim": 32}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--layers-per-stage", type=int, nargs="*", default=())
    parser.add_argument("--sequence-length", type=int, default=None)
    parser.add_argument("--microbatches", type=int, default=None, help="by default twice as many as stages")
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--newton-schulz-dtype", choices=("float64", "float32", "bfloat16"), help="bfloat16 on CUDA")
    parser.add_argument("--error-feedback", type=float, default=1.0)
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "float64", "bfloat16"), help="bfloat16 has float32 masters"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--recompute-every", type=int, default=0)
    parser.add_argument("--loss-chunk-tokens", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="the preset in miniature, on two stages")
    parser.add_argument("--profile", type=Path, default=None)
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    if given.quick:
        given.stages, given.stage, given.steps, given.warmup_steps = 2, min(given.stage, 1), 5, 2
    if given.newton_schulz_dtype is None:
        given.newton_schulz_dtype = "bfloat16" if given.device == "cuda" else "float32"
    if given.microbatches is None:
        given.microbatches = 2 * given.stages
    if given.warmup_steps + 1 >= given.steps:
        parser.error(f"--steps {given.steps} leaves none to count after --warmup-steps {given.warmup_steps}")
    if not 0 <= given.stage < given.stages:
        parser.error(f"--stage {given.stage} is none of {given.stages} stages, which are counted from 0")
    return given


def configure(given: argparse.Namespace) -> Config:
    shape: dict[str, int | None] = {"sequence_length": given.sequence_length}
    if given.quick:
        shape = QUICK | (QUICK_EXPERTS if PRESETS[given.preset].num_experts else {})
    return Config(
        model=ModelSection(preset=given.preset, **shape),
        pipeline=PipelineSection(stages=given.stages, microbatches=given.microbatches),
        optimizer=OptimizerSection(
            name=given.optimizer,
            error_feedback=given.error_feedback,
            newton_schulz_dtype=given.newton_schulz_dtype,
        ),
        train=TrainSection(
            steps=given.steps,
            microbatch_size=given.microbatch_size,
            device=given.device,
            dtype="float64" if given.dtype == "float64" else "float32",
            compute_dtype=given.dtype,
            compile=given.compile,
            recompute_every=given.recompute_every,
            loss_chunk_tokens=given.loss_chunk_tokens,
        ),
        evaluation=EvaluationSection(batches=0),
    )


def components_of(config: Config, model: ModelConfig, layers_per_stage: list[int]) -> Components:
    """As `slipstream train` has them, with random tokens for a corpus."""
    length, size, count = model.sequence_length, config.train.microbatch_size, config.pipeline.microbatches
    ids = np.random.default_rng(0).integers(model.vocab_size, size=8 * length + 1)
    return Components(
        model=model,
        batches=Batches(Tokens((ids,)), length, size, count),
        validation=None,
        groups=parameter_groups(config),
        learning_rate=lambda step: 1.0,
        peak_rates=peak_rates(config),
        layers_per_stage=layers_per_stage,
    )


def play(given: argparse.Namespace, config: Config, components: Components) -> Pipeline:
    device, model = torch.device(given.device), components.model
    shape = (given.microbatch_size, model.sequence_length, model.dim)
    dtype = getattr(torch, given.dtype)
    transport = Alone(given.stage, given.stages, shape, device, given.microbatches, given.steps, dtype=dtype)
    pipeline = make_pipeline(transport, config, components)
    for report in pipeline.run():
        if device.type == "cuda" and report.step == 0:
            torch.cuda.reset_peak_memory_stats()  # not counting the compiler's trials
    return pipeline


def measure(given: argparse.Namespace, pipeline: Pipeline) -> dict[str, float]:
    """Seconds of a step and of its parts, in the steady state."""
    count, spans = given.microbatches, list(pipeline.clock.spans)
    begins = {span.action.microbatch: span.start for span in spans if span.activity is Activity.FORWARD}
    first, last = given.warmup_steps * count, (given.steps - 1) * count
    start, end = begins[first], begins[last]

    def within(activity: Activity) -> list[Span]:
        return [span for span in spans if span.activity is activity and start <= span.start < end]

    def median(activity: Activity) -> float:
        return statistics.median([span.end - span.start for span in within(activity)] or [0.0])

    step = (end - start) / (given.steps - 1 - given.warmup_steps)
    forward, backward = median(Activity.FORWARD), median(Activity.BACKWARD)
    waits = (Activity.WAIT_ACTIVATIONS, Activity.WAIT_GRADIENTS, Activity.WAIT_SUMS)
    waited = sum(span.end - span.start for activity in waits for span in within(activity))
    return {
        "step": step,
        "forward": forward,
        "backward": backward,
        "update": max(0.0, step - count * (forward + backward)),
        "update_beside": median(Activity.UPDATE),
        "waiting": waited / (given.steps - 1 - given.warmup_steps),
    }


def flops_per_token(model: ModelConfig, first: int, num_layers: int) -> float:
    """Of the model, forward and backward: the backward of a product is two products."""
    return 3.0 * sum(layer_costs(model, model.sequence_length)[first : first + num_layers])


def measure_ceiling(device: torch.device) -> float:
    """FLOP/s of a large product: the most of a few rounds, each long enough for clocks to settle."""
    size, repeats, dtype = (8192, 30, torch.bfloat16) if device.type == "cuda" else (256, 10, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    fastest = 0.0
    for _ in range(4):
        _wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            left @ right
        _wait(device)
        fastest = max(fastest, repeats * 2 * size**3 / (time.perf_counter() - started))
    return fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    given = parse()
    config = configure(given)
    model, device = model_of(config, 0), torch.device(given.device)
    sizes = list(given.layers_per_stage) or partition(layer_costs(model, model.sequence_length), given.stages)
    first = sum(sizes[: given.stage])
    names = layer_names(model.num_layers)[first : first + sizes[given.stage]]
    print(
        f"{given.preset}, two_bw, stage {given.stage} of {given.stages} ({names[0]} to {names[-1]}), "
        f"{given.microbatches} microbatches of {given.microbatch_size} x {model.sequence_length}, {given.dtype}, "
        f"{'compiled' if given.compile else 'not compiled'}, {given.optimizer}, torch {torch.__version__}",
        flush=True,
    )
    ceiling = measure_ceiling(device)
    started = time.perf_counter()
    pipeline = play(given, config, components_of(config, model, sizes))
    seconds = measure(given, pipeline)
    tokens = given.microbatches * given.microbatch_size * model.sequence_length
    flops = tokens * flops_per_token(model, first, sizes[given.stage]) / seconds["step"]
    is_cuda = device.type == "cuda"
    found: dict[str, Any] = {
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()},
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "layers": names,
        "parameters": sum(master.numel() for master in pipeline.versions.masters.values()),
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / seconds["step"],
        "seconds": seconds,
        "model_flops_per_token": flops_per_token(model, first, sizes[given.stage]),
        "model_flops_per_second": flops,
        "ceiling_flops_per_second": ceiling,
        "mfu": {"nominal": flops / NOMINAL_FLOPS if is_cuda else None, "of_measured_ceiling": flops / ceiling},
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "wall_seconds": time.perf_counter() - started,
    }
    show(found)
    del pipeline
    if given.profile is not None:
        if is_cuda:
            torch.cuda.empty_cache()
        profile = measure_profile(config, model, lambda kind: print(f"timing the {kind}", flush=True))
        write_profile(profile, given.profile)
        found["profile"] = asdict(profile)
        for row in profile.rows:
            milliseconds = [1e3 * part for part in (row.forward, row.backward_input + row.backward_weight, row.update)]
            print(f"{row.kind:12} {milliseconds[0]:9.3f} ms forward {milliseconds[1]:9.3f} backward ", end="")
            print(f"{milliseconds[2]:9.3f} update")
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def show(found: dict[str, Any]) -> None:
    seconds, mfu, peak = found["seconds"], found["mfu"], found["peak_memory_bytes"]
    print(f"{found['parameters']:,} parameters; {found['wall_seconds']:.0f} s in all")
    print(f"step         {1e3 * seconds['step']:9.2f} ms, {found['tokens_per_second']:,.0f} tokens/s")
    print(f"forward      {1e3 * seconds['forward']:9.2f} ms a microbatch")
    print(f"backward     {1e3 * seconds['backward']:9.2f} ms a microbatch")
    print(f"update       {1e3 * seconds['update']:9.2f} ms a step; {1e3 * seconds['update_beside']:.2f} beside")
    print(f"waiting      {1e3 * seconds['waiting']:9.2f} ms a step")
    print(f"compute      {found['model_flops_per_second'] / 1e12:9.3f} TFLOP/s of the model")
    print(f"ceiling      {found['ceiling_flops_per_second'] / 1e12:9.3f} TFLOP/s, measured")
    nominal = "" if mfu["nominal"] is None else f", {mfu['nominal']:.1%} of {NOMINAL_FLOPS / 1e12:.0f} TFLOP/s"
    print(f"MFU          {mfu['of_measured_ceiling']:9.1%} of that ceiling{nominal}")
    if peak is not None:
        print(f"peak memory  {peak / GIB:9.2f} GiB")


if __name__ == "__main__":
    main()
