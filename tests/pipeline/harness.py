"""What the tests of the pipeline share: small models in fp64, and one call each to run a pipeline and the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import EvaluationReport, Group, Pipeline, StepReport, launch, reference_run
from slipstream.model import ModelConfig, decoder, initialise, next_token_loss
from slipstream.pipeline.comm import Transport
from slipstream.pipeline.partition import partition

TIMEOUT_SECONDS = 20.0

forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="autograd has started its CUDA threads here, and a process with those cannot fork"
)


@dataclass(frozen=True)
class Task:
    model: nn.Sequential
    data: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]


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


def language_model(tied: bool, num_layers: int = 3, **experts: int) -> Task:
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
    initialise(model, config, seed=0)
    with torch.no_grad():  # larger than usual, so that a wrong version shows
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(29, (2, 9), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Task(model, data, lambda logits, targets: next_token_loss(logits, targets) / targets.numel())


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, Tensor]
    """Of all stages."""
    reports: list[list[StepReport]]
    """By stage."""
    evaluations: list[float | None]
    """Of the last stage."""


def run_pipeline(
    task: Task,
    num_stages: int,
    groups: Sequence[Group],
    threads: bool = True,
    shared_memory: bool = True,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **options: Any,
) -> Outcome:
    base = task.model  # copied by every stage: a model cannot be built in several threads from one global seed

    def worker(transport: Transport) -> tuple[dict[str, Tensor], list[StepReport], list[float | None]]:
        pipeline = Pipeline(
            transport, copy.deepcopy(base), data=task.data, loss=task.loss, optimizer=list(groups), **options
        )
        reports = list(pipeline.run())
        return (
            {name: weight.clone() for name, weight in pipeline.weights().items()},
            [report for report in reports if isinstance(report, StepReport)],
            [report.loss for report in reports if isinstance(report, EvaluationReport)],
        )

    # Forked: the workers are closures, and conftest keeps this process to one thread.
    stages = launch(
        worker,
        num_stages,
        threads=threads,
        timeout_seconds=timeout_seconds,
        shared_memory=shared_memory,
        start_method="fork",
    )
    weights: dict[str, Tensor] = {}
    for stage, _, _ in stages:
        weights |= stage
    return Outcome(weights, [reports for _, reports, _ in stages], stages[-1][2])


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
