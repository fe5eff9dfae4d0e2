"""Layers through torch.compile: the same numbers, and as many graphs as there are kinds of layers."""

from __future__ import annotations

import copy
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import (
    EXPERTS,
    TIMEOUT_SECONDS,
    Task,
    even_cut,
    language_model,
    largest_difference,
    network,
    run_pipeline,
    run_reference,
)
from torch import Tensor, nn

from slipstream import Evaluation, Group, Pipeline, launch, muon_and_adamw
from slipstream.errors import StageFailure
from slipstream.model import experts as moe
from slipstream.model.chunked_loss import chunked_next_token_loss
from slipstream.model.decoder import decoder, initialise
from slipstream.model.presets import PRESETS
from slipstream.optim import balance_experts
from slipstream.pipeline.compiled import COMPILER, Compiled
from slipstream.pipeline.weight_versions import WeightVersions, weight_layout
from slipstream.transport.base import Transport

# torch's tracer does what torch warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

NUM_STEPS = 5


@pytest.fixture(autouse=True)
def _fresh():
    """What was compiled holds tensors without data, which the tests that look for live ones would find."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()


def groups_of(lam: float) -> list[Group]:
    return muon_and_adamw(
        muon_lr=0.02, adamw_lr=0.01, muon_ns_dtype=torch.float64, error_feedback=lam, clip_norm=0.05, weight_decay=0.1
    )


class Counting:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


# ---- the same numbers


@pytest.mark.parametrize(
    ("schedule", "stages", "options"),
    [
        ("two_bw", 2, {"lam": 1.0}),
        ("two_bw", 4, {"lam": 0.5, "sync_start_steps": 2, "recompute": ("block0", "block2")}),
        ("one_f_one_b", 2, {}),
    ],
)
def test_compiled_stages_follow_the_oracle(schedule, stages, options):
    options = dict(options)
    task = language_model(tied=True)
    groups = groups_of(options.pop("lam", 0.0))
    shared = {"num_microbatches": 4, "num_steps": NUM_STEPS, "sync_start_steps": options.pop("sync_start_steps", 0)}
    cut = even_cut(task, stages)
    delays = [int(schedule == "two_bw")] * stages
    expected, losses = run_reference(task, groups, delays=delays, layers_per_stage=cut, **shared)
    held_out = task.data(10**6, 0)
    evaluation = {"evaluation": Evaluation(lambda microbatch: held_out, 1, 2)}
    outcome = run_pipeline(
        task,
        stages,
        groups,
        schedule=schedule,
        layers_per_stage=cut,
        compile="aot_eager",
        **options,
        **shared,
        **evaluation,
    )
    assert largest_difference(outcome.weights, expected) <= 1e-12
    assert [report.loss for report in outcome.reports[0]] == pytest.approx(losses, rel=1e-12)
    trained = copy.deepcopy(task.model)
    trained.load_state_dict(expected, strict=False)
    with torch.no_grad():
        assert outcome.evaluations[-1] == pytest.approx(task.loss(trained(held_out[0]), held_out[1]).item(), rel=1e-12)


def test_compiled_experts_follow_the_oracle():
    task = language_model(tied=False, **EXPERTS)
    groups = [balance_experts(0.01), *groups_of(1.0)]
    shared = {"num_microbatches": 2, "num_steps": NUM_STEPS, "layers_per_stage": even_cut(task, 2)}
    expected, _ = run_reference(task, groups, delays=[1] * 2, **shared)
    outcome = run_pipeline(task, 2, groups, compile="aot_eager", recompute=("block2",), **shared)
    assert largest_difference(outcome.weights, expected) <= 1e-12


def test_with_the_loss_in_chunks_too_the_oracle_is_followed():
    task = language_model(tied=True)
    groups = groups_of(1.0)
    shared = {"num_microbatches": 2, "num_steps": NUM_STEPS, "layers_per_stage": even_cut(task, 2)}
    expected, _ = run_reference(task, groups, delays=[1] * 2, **shared)
    lean = copy.deepcopy(task.model)
    lean.head.logits = False

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return chunked_next_token_loss(outputs, targets, 5) / targets.numel()

    lean_task = replace(task, model=lean, loss=loss)
    outcome = run_pipeline(lean_task, 2, groups, compile="aot_eager", recompute=("block1",), **shared)
    assert largest_difference(outcome.weights, expected) <= 1e-12


def test_layers_of_any_kind_may_be_compiled():
    task = network(num_layers=4)
    inner = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)).double()
    task.model.insert(2, inner)
    shared = {"num_microbatches": 2, "num_steps": NUM_STEPS, "layers_per_stage": [2, 3]}
    expected, _ = run_reference(task, groups_of(0.0), delays=[1] * 2, **shared)
    counting = Counting()
    outcome = run_pipeline(task, 2, groups_of(0.0), compile=counting, **shared)
    assert largest_difference(outcome.weights, expected) <= 1e-12
    assert len(counting.graphs) == 1  # torch's own single layers have nothing to fuse


# ---- as few graphs as there are kinds


@pytest.mark.parametrize(("num_layers", "stages", "recompute"), [(1, 1, ()), (6, 1, ("block0", "block3")), (6, 2, ())])
def test_a_graph_serves_all_blocks_and_all_weight_versions(num_layers, stages, recompute):
    task, counting = language_model(tied=False, num_layers=num_layers), Counting()
    run_pipeline(
        task,
        stages,
        groups_of(1.0),
        num_microbatches=2,
        num_steps=NUM_STEPS,
        compile=counting,
        recompute=recompute,
        evaluation=Evaluation(lambda microbatch: task.data(10**6, microbatch), 1, 2),
    )
    assert len(counting.graphs) == 4  # block and head, each with and without gradients


def test_no_load_of_the_experts_is_a_graph_of_its_own():
    counting, counts = Counting(), []
    model = language_model(tied=False, num_layers=4, **EXPERTS).model
    stage = Compiled(OrderedDict(list(model.named_children())[1:-1]), backend=counting)
    for seed in range(12):
        hidden = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        stage(hidden.requires_grad_()).sum().backward()
        counts.append(len(counting.graphs))
    assert counts[0] == counts[-1]


def test_with_a_kernel_for_all_experts_a_block_is_one_graph(monkeypatch):
    """As on a Hopper: loads stay on the device, and nobody asks for them."""
    monkeypatch.setattr(moe, "_has_grouped_kernel", lambda rows, stack: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", _grouped_products)
    counting = Counting()
    blocks = list(language_model(tied=False, num_layers=3, **EXPERTS).model.named_children())[2:-1]
    plain = nn.Sequential(OrderedDict(copy.deepcopy(blocks)))
    stage = Compiled(OrderedDict(blocks), backend=counting)
    hidden = torch.randn(2, 8, 16, dtype=torch.float64)
    for module in (plain, stage):
        module(hidden.clone().requires_grad_()).square().sum().backward()
    assert len(counting.graphs) == 1
    for (name, parameter), other in zip(plain.named_parameters(), stage.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-12, atol=1e-12, msg=name)


def _grouped_products(rows: Tensor, stack: Tensor, offs: Tensor) -> Tensor:
    """torch's own is for bfloat16 alone."""
    owner = (torch.arange(len(rows)).unsqueeze(1) >= offs).sum(1)
    return torch.bmm(rows.unsqueeze(1), stack.index_select(0, owner)).squeeze(1)


# ---- gradients arrive as ever


def test_gradients_accumulate_in_the_leaves_and_hooks_see_them():
    block = dict(language_model(tied=False).model.named_children())["block0"]
    versions = WeightVersions(Compiled(OrderedDict(block=copy.deepcopy(block)), backend="aot_eager"), weight_layout(2))
    seen: list[str] = []
    for name, parameter in versions.parameters(1).items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    plain = copy.deepcopy(block)
    hidden = torch.randn(2, 8, 16, dtype=torch.float64)
    versions.close_next()
    for _ in range(2):
        versions.module(1)(hidden).sum().backward()
        plain(hidden).sum().backward()
    assert sorted(seen) == sorted(2 * list(versions.parameters(1)))
    assert all(parameter.grad is None for parameter in versions.parameters(0).values())
    for parameter, expected in zip(versions.parameters(1).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [(), ("block",)])
def test_overwriting_the_weights_of_a_microbatch_in_flight_raises(recompute):
    block = dict(language_model(tied=False).model.named_children())["block0"]
    stage = Compiled(OrderedDict(block=block), recompute, backend="aot_eager")
    outputs = stage(torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True))
    with torch.no_grad():
        block.mlp.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


# ---- stages that are threads


def test_nobody_else_computes_while_a_stage_may_compile():
    """What is held during compilation and backward is held by a thread that another cannot get in beside."""
    held: list[bool] = []

    def probe(*_: Any) -> None:
        def attempt() -> None:
            got = COMPILER.acquire(blocking=False)
            held.append(not got)
            if got:
                COMPILER.release()

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        probe()
        return graph.forward

    task = language_model(tied=False)

    def worker(transport: Transport) -> int:
        pipeline = Pipeline(
            transport,
            copy.deepcopy(task.model),
            data=task.data,
            loss=task.loss,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            num_microbatches=2,
            num_steps=2,
            compile=backend,
        )
        for version in range(pipeline.versions.num_versions):
            next(iter(pipeline.versions.parameters(version).values())).register_post_accumulate_grad_hook(probe)
        list(pipeline.run())
        return len(held)

    launch(worker, 2, threads=True, timeout_seconds=TIMEOUT_SECONDS)
    assert len(held) >= 2 + 2 * 2 * 2 and all(held)  # two graphs, and the backwards of two stages


# ---- on a GPU, by torch's own compiler


without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("recompute", [(), ("block0", "block2")], ids=["kept", "recomputed"])
@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # a compiler may have advice
@without_gpu
def test_stages_compiled_for_a_gpu_follow_the_oracle(experts, recompute):
    task = language_model(tied=not experts, **experts)
    groups = [*([balance_experts(0.01)] if experts else []), *groups_of(1.0)]
    shared = {"num_microbatches": 3, "num_steps": NUM_STEPS, "layers_per_stage": even_cut(task, 2)}
    on_gpu = Task(
        copy.deepcopy(task.model).cuda(), lambda *index: tuple(part.cuda() for part in task.data(*index)), task.loss
    )
    expected, losses = run_reference(on_gpu, groups, delays=[1] * 2, **shared)
    held_out = task.data(10**6, 0)
    outcome = run_pipeline(
        task,
        2,
        groups,
        timeout_seconds=300.0,
        device="cuda",
        compile=True,
        recompute=recompute,
        evaluation=Evaluation(lambda microbatch: held_out, 1, 2),
        **shared,
    )
    assert largest_difference(outcome.weights, expected) <= 1e-10
    assert [report.loss for report in outcome.reports[0]] == pytest.approx(losses, rel=1e-10)


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # a compiler may have advice
@without_gpu
def test_experts_in_bfloat16_are_one_graph_on_a_gpu_and_their_gradients_right():
    torch.manual_seed(0)
    config = replace(PRESETS["moe-2b"], dim=128, num_heads=4, num_kv_heads=2, hidden_dim=256, expert_dim=64)
    config = replace(config, num_experts=8, experts_per_token=2, num_layers=3, sequence_length=64, vocab_size=64)
    layers = decoder(config)[2:3]
    initialise(layers, config, seed=0)
    layers.bfloat16().cuda()
    if not moe._has_grouped_kernel(torch.zeros(1, 128, device="cuda").bfloat16(), layers[0].mlp.experts.gate):
        pytest.skip("needs a kernel for all experts at once")
    precise = copy.deepcopy(layers).float()
    counting = Counting()
    hidden = torch.randn(4, 64, 128, device="cuda").bfloat16()

    def gradients(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        for parameter in module.parameters():
            parameter.grad = None
        module(hidden.to(dtype, copy=True).requires_grad_()).square().mean().backward()
        return {name: p.grad.float() for name, p in module.named_parameters() if not name.endswith("router.bias")}

    Compiled(OrderedDict(layers.named_children()), backend=counting)(hidden.clone().requires_grad_())
    assert len(counting.graphs) == 1
    expected = gradients(precise, torch.float32)
    plain = gradients(layers, torch.bfloat16)
    compiled = gradients(Compiled(OrderedDict(layers.named_children())), torch.bfloat16)
    for name, value in expected.items():
        errors = [float((found[name] - value).norm() / value.norm()) for found in (plain, compiled)]
        assert errors[1] <= max(0.1, 2 * errors[0]), (name, errors)  # rounded about as much as without a compiler


# ---- what cannot be


def test_paci_is_refused_in_one_sentence():
    task = network()
    with pytest.raises(StageFailure, match=r"compile leaves it to the compiler .* and under paci .* or use two_bw"):
        launch(
            lambda transport: Pipeline(
                transport,
                task.model,
                data=task.data,
                loss=task.loss,
                optimizer=partial(torch.optim.SGD, lr=0.01),
                num_microbatches=2,
                num_steps=2,
                schedule="paci",
                compile=True,
            ),
            1,
            threads=True,
        )
