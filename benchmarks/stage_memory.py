"""One stage of a pipeline, alone on its device: the memory that was predicted for it, beside what it took.

    python benchmarks/stage_memory.py --device cuda --preset 1b --stage 0
    python benchmarks/stage_memory.py --device cuda --preset 1b --stage 3
    python benchmarks/stage_memory.py --device cpu --preset tiny --stages 2 --stage 1

The stage is the program's own: Pipeline, versions, update, executor. Its neighbours are played by alone.py. Weights are
random, so the loss means nothing.

Measured on CUDA is torch.cuda.max_memory_allocated, over all steps and not counting the building of the stage; on the
CPU the most bytes of live tensors, which leaves out what kernels allocate inside.
"""

from __future__ import annotations

import argparse

import torch
from alone import Alone
from torch import Tensor, nn

from slipstream import Pipeline
from slipstream.config.models import model_of, recomputed_layers
from slipstream.config.optimizers import parameter_groups
from slipstream.config.schema import Config, EvaluationSection, ModelSection, OptimizerSection, TrainSection
from slipstream.model.chunked_loss import decoder_and_loss
from slipstream.model.decoder import initialise, layer_costs
from slipstream.pipeline import partition
from slipstream.schedule import TRAITS
from slipstream.tools.plan.live import LiveBytes
from slipstream.tools.plan.memory import MemoryModel
from slipstream.tools.plan.predict import StageCosts, predict
from slipstream.tools.plan.stage import Stage, StageMemory

GIB = 2**30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=None)
    parser.add_argument("--schedule", default="two_bw", choices=("two_bw", "one_f_one_b", "gpipe", "paci"))
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--error-feedback", type=float, default=1.0)
    parser.add_argument("--loss-chunk-tokens", type=int, default=0)
    parser.add_argument("--recompute-every", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    return parser.parse_args()


def configure(given: argparse.Namespace) -> Config:
    return Config(
        model=ModelSection(preset=given.preset, sequence_length=given.sequence_length),
        optimizer=OptimizerSection(name=given.optimizer, error_feedback=given.error_feedback),
        train=TrainSection(
            microbatch_size=given.microbatch_size,
            device=given.device,
            loss_chunk_tokens=given.loss_chunk_tokens,
            recompute_every=given.recompute_every,
        ),
        evaluation=EvaluationSection(batches=0),
    )


def predict_memory(given: argparse.Namespace, config: Config, sizes: list[int]) -> StageMemory:
    alike = (1.0,) * given.stages
    prediction = predict(given.schedule, StageCosts(alike, alike, alike, (0.0,) * given.stages), given.microbatches)
    stage = Stage(
        index=given.stage,
        num_stages=given.stages,
        first_layer=sum(sizes[: given.stage]),
        num_layers=sizes[given.stage],
        versions=prediction.weight_versions[given.stage],
        delay=prediction.delay[given.stage],
        in_flight=prediction.in_flight[given.stage],
        max_in_flight=max(prediction.in_flight),
        traits=TRAITS[given.schedule],
    )
    model = MemoryModel(config, model_of(config, 0), given.device)
    return model.stage_memory(stage, given.microbatch_size)


def measure_memory(given: argparse.Namespace, config: Config, sizes: list[int]) -> int:
    model, device, live = model_of(config, 0), torch.device(given.device), LiveBytes()
    shape = (given.microbatch_size, model.sequence_length, model.dim)
    counts = live if given.device == "cpu" else None
    transport = Alone(given.stage, given.stages, shape, device, given.microbatches, given.steps, counts)

    with torch.device("meta"):
        whole, loss = decoder_and_loss(model, given.loss_chunk_tokens)

    def prepare(layers: nn.Sequential) -> None:
        layers.to_empty(device=device)
        initialise(layers, model, seed=0)

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(model.vocab_size, (given.microbatch_size, model.sequence_length))
        return ids, ids

    def run() -> None:
        pipeline = Pipeline(
            transport,
            whole,
            data=data,
            loss=loss,
            optimizer=parameter_groups(config),
            num_microbatches=given.microbatches,
            num_steps=given.steps,
            schedule=given.schedule,
            layers_per_stage=sizes,
            recompute=recomputed_layers(config, model),
            prepare=prepare,
            device=device,
        )
        live.restart_peak()
        if given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in pipeline.run():
            pass

    if given.device == "cuda":
        run()
        return torch.cuda.max_memory_allocated()
    with live.watch():
        run()
    return live.peak


def main() -> None:
    given = parse()
    config = configure(given)
    model = model_of(config, 0)
    sizes = partition(layer_costs(model, model.sequence_length), given.stages)
    predicted = predict_memory(given, config, sizes)
    print(
        f"{given.preset}, {given.schedule}, stage {given.stage} of {given.stages} ({sizes[given.stage]} of "
        f"{sum(sizes)} layers), {given.microbatches} microbatches of {given.microbatch_size} x "
        f"{model.sequence_length}, {given.optimizer}, {given.device}, torch {torch.__version__}"
    )
    for name, value in vars(predicted).items():
        print(f"  {name:12} {value / GIB:9.4f} GiB")
    measured = measure_memory(given, config, sizes)
    print(f"predicted    {predicted.total / GIB:9.4f} GiB, at most {predicted.most / GIB:.4f}")
    print(f"measured     {measured / GIB:9.4f} GiB")
    print(f"error        {predicted.total / measured - 1:+9.1%}, at most {predicted.most / measured - 1:+.1%}")


if __name__ == "__main__":
    main()
