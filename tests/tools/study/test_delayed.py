"""A study's run and a pipeline's run of the same configuration end in the same parameters."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TIMEOUT_SECONDS, largest_difference
from settings import changed
from torch import Tensor

from slipstream.config.schema import Config
from slipstream.model.decoder import decoder, initialise, next_token_loss
from slipstream.pipeline import StepReport
from slipstream.reference import reference_run
from slipstream.tools.study import delayed
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.delayed import DelayedRun
from slipstream.train.build import build_components
from slipstream.train.process import make_pipeline
from slipstream.transport.base import Transport
from slipstream.transport.launch import launch

BASE = changed(
    Config(),
    model__dim=16,
    model__num_layers=4,
    model__num_heads=2,
    model__num_kv_heads=1,
    model__hidden_dim=24,
    model__sequence_length=16,
    train__steps=7,
    train__microbatch_size=2,
    train__dtype="float64",
    train__device="cpu",
    pipeline__transport="thread",
    pipeline__stages=2,
    pipeline__microbatches=2,
    optimizer__newton_schulz_dtype="float64",
    optimizer__clip_norm=0.05,
    evaluation__batches=2,
    evaluation__every_steps=0,
)
EXPERTS = {
    "model__num_experts": 4,
    "model__experts_per_token": 2,
    "model__expert_dim": 8,
    "model__num_shared_experts": 1,
    "model__num_dense_layers": 1,
}
CPU = torch.device("cpu")


def run_study(cell: Cell, device: torch.device = CPU) -> tuple[dict[str, Tensor], list[float], float]:
    run = DelayedRun(cell, build_components(cell.config), device)
    assert list(run.train()) == list(range(1, cell.config.train.steps + 1))
    held_out = run.evaluate().item()
    return {name: weight.clone() for name, weight in run.weights().items()}, run.losses.tolist(), held_out


def run_pipeline(config: Config) -> tuple[dict[str, Tensor], list[float], float]:
    components = build_components(config)

    def worker(transport: Transport) -> tuple[dict[str, Tensor], list[float], float | None]:
        pipeline = make_pipeline(transport, config, components)
        reports = list(pipeline.run())
        losses = [report.loss for report in reports if isinstance(report, StepReport)]
        held_out = [report.loss for report in reports if not isinstance(report, StepReport)]
        return {name: weight.clone() for name, weight in pipeline.weights().items()}, losses, held_out[-1]

    stages = launch(worker, config.pipeline.stages, threads=True, timeout_seconds=TIMEOUT_SECONDS)
    weights: dict[str, Tensor] = {}
    for stage, _, _ in stages:
        weights |= stage
    _, losses, held_out = stages[-1]
    assert held_out is not None
    return weights, losses, held_out


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline__schedule": "one_f_one_b"},
        {"optimizer__error_feedback": 0.0},
        {"optimizer__error_feedback": 1.0},
        {"optimizer__error_feedback": 0.5, "model__tied_embeddings": True},
        {"optimizer__name": "adamw", "optimizer__learning_rate": 0.003},
        {"optimizer__name": "torch.optim.SGD", "optimizer__arguments": {"momentum": 0.9}},
        {"pipeline__sync_start_steps": 4},
        {"train__loss_chunk_tokens": 5, "model__tied_embeddings": True},
        {"train__recompute_every": 2, "train__loss_chunk_tokens": 24},
        {"pipeline__stages": 3, "pipeline__microbatches": 5},
        {"pipeline__stages": 4, "pipeline__schedule": "pipedream", "optimizer__error_feedback": 0.0},
        {"pipeline__stages": 4, "pipeline__schedule": "pipedream", "optimizer__error_feedback": 1.0},
        {"pipeline__stages": 4, "pipeline__schedule": "pipedream", "pipeline__sync_start_steps": 3},
        {"pipeline__stages": 4, "pipeline__schedule": "paci", "optimizer__error_feedback": 0.0},
        {"pipeline__stages": 3, "pipeline__microbatches": 3, **EXPERTS},
        {**EXPERTS, "model__num_experts": 3},  # three numbers lie where the next parameter would not be aligned
    ],
    ids=lambda changes: ",".join(f"{name.split('__')[1]}={value}" for name, value in changes.items()),
)
def test_a_study_run_equals_the_pipeline(changes: dict[str, Any]) -> None:
    config = changed(BASE, **changes)
    weights, losses, held_out = run_study(Cell(config))
    expected, expected_losses, expected_held_out = run_pipeline(config)
    assert largest_difference(expected, weights) < 1e-12
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert held_out == pytest.approx(expected_held_out, rel=1e-12)
    start = decoder(build_components(config).model).double()
    initialise(start, build_components(config).model, config.train.seed)
    assert largest_difference(start.state_dict(), weights) > 1e-3  # it went somewhere


@pytest.mark.parametrize(
    "changes",
    [{"train__freeze": ("embedding.*", "block1.*")}, {"adapter__rank": 2, "model__tied_embeddings": True}],
    ids=["frozen", "adapters"],
)
def test_a_study_trains_a_part_of_the_weights_as_the_pipeline_does(changes: dict[str, Any]) -> None:
    if "adapter__rank" in changes:
        pytest.importorskip("peft")
    config = changed(BASE, optimizer__error_feedback=1.0, **changes)
    assert Cell(config).id != Cell(BASE).id
    weights, losses, held_out = run_study(Cell(config))
    expected, expected_losses, expected_held_out = run_pipeline(config)
    assert weights.keys() == expected.keys()
    assert largest_difference(expected, weights) < 1e-12
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert held_out == pytest.approx(expected_held_out, rel=1e-12)
    seeded = changed(config, train__seed=1)  # frozen weights come from the seed too
    assert largest_difference(run_study(Cell(seeded))[0], run_pipeline(seeded)[0]) < 1e-12


def test_a_study_keeps_documents_apart_as_the_pipeline_does(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i} is {i * i}"}) + "\n" for i in range(400)))
    together = changed(BASE, data__sources=(str(tmp_path),), optimizer__error_feedback=1.0)
    config = changed(together, data__separate_documents=True)
    assert Cell(config).id != Cell(together).id
    weights, losses, held_out = run_study(Cell(config))
    expected, expected_losses, expected_held_out = run_pipeline(config)
    assert largest_difference(expected, weights) < 1e-12
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert held_out == pytest.approx(expected_held_out, rel=1e-12)
    assert largest_difference(run_study(Cell(together))[0], weights) > 1e-4


@pytest.mark.parametrize("changes", [{}, {"pipeline__stages": 3, "pipeline__microbatches": 3, **EXPERTS}])
def test_stacks_of_like_matrices_take_the_same_steps(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are laid on a GPU: an expert's matrices, three-dimensional already, beside those of a dense block."""
    config = changed(BASE, **changes)
    expected, _, _ = run_study(Cell(config))
    monkeypatch.setattr(delayed, "share_kernels", lambda parameters: True)
    weights, _, _ = run_study(Cell(config))
    assert largest_difference(expected, weights) < 1e-12
    slabs = DelayedRun(Cell(config), build_components(config), CPU).groups[-2].slabs
    shapes = [parameter.shape for slab in slabs for parameter in slab.parameters]
    assert len(shapes) < sum(len(slab.names) for slab in slabs)
    assert {len(shape) for shape in shapes} == {3}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # a compiler may have advice
def test_cuda_graphs_take_the_same_steps() -> None:
    """And so does a second run whose parameters lie elsewhere, though it gets the network of the first."""
    for changes in ({}, {"optimizer__name": "adamw", "optimizer__learning_rate": 0.003}):
        config = changed(BASE, **changes)
        expected, losses, held_out = run_study(Cell(config))
        on_gpu = Cell(changed(config, train__device="cuda"), compile_mode="reduce-overhead")
        weights, losses_there, held_out_there = run_study(on_gpu, torch.device("cuda"))
        assert largest_difference(expected, {name: weight.cpu() for name, weight in weights.items()}) < 1e-9
        assert losses_there == pytest.approx(losses, rel=1e-9)
        assert held_out_there == pytest.approx(held_out, rel=1e-9)


@pytest.mark.parametrize("delays", [(0, 1), (1, 0), (2, 1)])
def test_delays_of_ones_own_equal_the_reference(delays: tuple[int, ...]) -> None:
    components = build_components(BASE)
    model = decoder(components.model).double()
    initialise(model, components.model, BASE.train.seed)
    expected, _ = reference_run(
        model,
        data=components.batches,
        loss=next_token_loss,
        groups=components.groups,
        num_microbatches=BASE.pipeline.microbatches,
        num_steps=BASE.train.steps,
        delays=delays,
        layers_per_stage=components.layers_per_stage,
        learning_rate=components.learning_rate,
        loss_scale=lambda step: 1 / components.batches.num_tokens(step),
    )
    weights, _, _ = run_study(Cell(BASE, delays=delays))
    assert largest_difference(weights, expected) < 1e-12


def test_low_precision_touches_the_working_copy_alone() -> None:
    config = changed(BASE, train__dtype="float32", optimizer__newton_schulz_dtype="float32")
    _, _, fine_loss = run_study(Cell(config))
    coarse, _, coarse_loss = run_study(Cell(config, compute_dtype="bfloat16"))
    assert all(weight.dtype is torch.float32 for weight in coarse.values())
    assert coarse_loss == pytest.approx(fine_loss, rel=0.02)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in coarse.values())


def test_the_update_takes_a_share_of_the_step() -> None:
    run = DelayedRun(Cell(BASE), build_components(BASE), CPU)
    for _ in run.train():
        pass
    assert 0 < run.optimizer_share() < 1


def test_cosines_are_of_consecutive_updates() -> None:
    """Every third step, from the masters as they were seen after each."""
    config = changed(BASE, optimizer__weight_decay=0.0)
    run = DelayedRun(Cell(config), build_components(config), CPU)
    seen = [torch.cat([slab.master for slab in run.groups[0].slabs]).clone()]
    for _ in run.train(track_every=3):
        seen.append(torch.cat([slab.master for slab in run.groups[0].slabs]).clone())
    updates = [before - after for before, after in itertools.pairwise(seen)]
    steps = [step for step, _ in run.groups[0].products]
    assert steps == [3, 6]
    for step, products in run.groups[0].products:
        u, v = updates[step], updates[step - 1]
        assert products.tolist() == pytest.approx([float(u @ v), float(u @ u), float(v @ v)], rel=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [("muon", "two_bw"), ("muon", "one_f_one_b"), ("adamw", "pipedream"), ("normuon", "two_bw")],
)
def test_a_decay_from_a_snapshot_equals_a_run_with_that_schedule_bitwise(optimizer, schedule):
    def cell(steps: int) -> Cell:
        return Cell(
            changed(
                BASE,
                optimizer__name=optimizer,
                optimizer__schedule="1-sqrt",
                optimizer__warmup_steps=2,
                optimizer__decay_steps=3,
                pipeline__schedule=schedule,
                train__dtype="float32",
                train__steps=steps,
            )
        )

    trunk = DelayedRun(cell(12), build_components(cell(12).config), CPU)
    ends = []
    for steps, start in ((8, 0), (12, 5)):
        rates = build_components(cell(steps).config).learning_rate
        list(trunk.train(first=start, last=steps - 3, learning_rate=rates))
        kept = trunk.snapshot()
        list(trunk.train(first=steps - 3, last=steps, learning_rate=rates))
        ends.append(({name: weight.clone() for name, weight in trunk.weights().items()}, trunk.losses[:steps].clone()))
        trunk.restore(kept)
    for (weights, losses), steps in zip(ends, (8, 12), strict=True):
        alone, its_losses, _ = run_study(cell(steps))
        assert all(torch.equal(weights[name], alone[name]) for name in alone)
        assert losses[-3:].tolist() == its_losses[-3:]
