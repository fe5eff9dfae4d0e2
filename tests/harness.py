"""What the tests of the pipeline share: small models in fp64, and one call each to run a pipeline and the oracle."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import EvaluationReport, Group, Pipeline, Precision, StepReport, launch, reference_run
from slipstream.model.decoder import ModelConfig, decoder, initialise, next_token_loss
from slipstream.pipeline import Requests
from slipstream.pipeline.partition import partition
from slipstream.transport.base import Transport

TIMEOUT_SECONDS = 60.0
"""Of what takes a second or two where nothing else runs."""

forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="autograd has started its CUDA threads here, and a process with those cannot fork"
)


@dataclass(frozen=True)
class Task:
    model: nn.Sequential
    data: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]


def load_example(name: str) -> Any:
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network(width: int = 12, num_layers: int = 8) -> Task:
    """A plain network with biases and unequal layers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, width)]
    while len(layers) < num_layers - 1:
        layers.append(nn.Tanh() if len(layers) % 2 else nn.Linear(width, width))
    layers.append(nn.Linear(width, 3))

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        draw = torch.randn(4, 9, generator=generator, dtype=torch.float64)
        return draw[:, :6].contiguous(), draw[:, 6:].contiguous()

    return Task(nn.Sequential(*layers).double(), data, nn.functional.mse_loss)


EXPERTS = {
    "num_experts": 5,
    "experts_per_token": 2,
    "expert_dim": 12,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
}


def language_model(tied: bool, num_layers: int = 3, seed: int = 0, **experts: int) -> Task:
    config = ModelConfig(
        vocab_size=29,
        sequence_length=8,
        dim=16,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=24,
        tied_embeddings=tied,
        **experts,
    )
    model = decoder(config).double()
    initialise(model, config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # larger than usual, so that a wrong version shows
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * noise)

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(29, (2, 9), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Task(model, data, lambda logits, targets: next_token_loss(logits, targets) / targets.numel())


@dataclass(frozen=True)
class Rank:
    """What one process or thread came to."""

    replica: int
    stage: int
    weights: dict[str, Tensor]
    reports: list[StepReport | EvaluationReport]
    seen: dict[int, Any]
    """What `look` returned, by the number of updates made."""

    @property
    def steps(self) -> list[StepReport]:
        return [report for report in self.reports if isinstance(report, StepReport)]

    @property
    def evaluations(self) -> list[float | None]:
        return [report.loss for report in self.reports if isinstance(report, EvaluationReport)]

    @property
    def last_seen(self) -> Any:
        return self.seen[max(self.seen)]


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """dtype and gradient_dtype as the oracle takes them become a `Precision` of layers in float64."""
    options = dict(options)
    dtype, gradient = options.pop("dtype", None), options.pop("gradient_dtype", None)
    reduction = options.pop("reduction_dtype", None)
    if dtype or gradient or reduction:
        options["precision"] = Precision.of(torch.float64, dtype, gradient or dtype, reduction)
    return options


def run_ranks(
    task: Task,
    num_stages: int,
    optimizer: Any,
    num_replicas: int = 1,
    *,
    threads: bool = True,
    shared_memory: bool = True,
    placement: str = "pipeline",
    timeout_seconds: float = TIMEOUT_SECONDS,
    requests: Callable[[Transport], Callable[[], Requests]] | None = None,
    look: Callable[[Pipeline], Any] = lambda pipeline: None,
    **options: Any,
) -> list[Rank]:
    """Runs it and returns every rank. requests: of each rank its own. look: called after every update."""
    base = task.model  # copied by every stage: a model cannot be built in several threads from one global seed

    def worker(transport: Transport) -> Rank:
        pipeline = Pipeline(
            transport,
            copy.deepcopy(base),
            data=task.data,
            loss=task.loss,
            optimizer=optimizer,
            requests=requests(transport) if requests else None,
            **grouped(options),
        )
        reports, seen = [], {}
        for report in pipeline.run():
            reports.append(report)
            if isinstance(report, StepReport):
                seen[report.step + 1] = look(pipeline)
        weights = {name: weight.clone() for name, weight in pipeline.weights().items()}
        return Rank(transport.replica, transport.stage, weights, reports, seen)

    # Forked: the workers are closures, and conftest keeps this process to one thread.
    return launch(
        worker,
        num_stages,
        num_replicas=num_replicas,
        placement=placement,
        threads=threads,
        timeout_seconds=timeout_seconds,
        shared_memory=shared_memory,
        start_method="fork",
    )


def all_weights(ranks: Sequence[Rank]) -> dict[str, Tensor]:
    return {name: weight for rank in ranks for name, weight in rank.weights.items()}


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, Tensor]
    """Of all stages."""
    reports: list[list[StepReport]]
    """By stage."""
    evaluations: list[float | None]
    """Of the last stage."""


def run_pipeline(task: Task, num_stages: int, groups: Sequence[Group], **options: Any) -> Outcome:
    """One replica; options are those of `run_ranks`."""
    ranks = run_ranks(task, num_stages, list(groups), **options)
    return Outcome(all_weights(ranks), [rank.steps for rank in ranks], ranks[-1].evaluations)


def run_reference(task: Task, groups: Sequence[Group], **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    return reference_run(copy.deepcopy(task.model), data=task.data, loss=task.loss, groups=groups, **options)


def even_cut(task: Task, num_stages: int) -> list[int]:
    return partition([1.0] * len(task.model), num_stages)


def largest_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest entry of each parameter. Copies of tied weights are compared with the original."""
    names = {name: "embedding.weight" if name not in expected else name for name in weights}
    assert set(names.values()) == set(expected)
    return max(
        float((weight - expected[names[name]]).abs().max() / expected[names[name]].abs().max())
        for name, weight in weights.items()
    )


def report_stage(transport: Transport) -> str:
    return f"{transport.stage} of {transport.num_stages}"
