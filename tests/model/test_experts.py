"""Mixtures of experts: the routing is what it says, token by token, and the load is evened out."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream import Muon, muon_and_adamw
from slipstream.model import experts as moe
from slipstream.model.decoder import (
    ModelConfig,
    decoder,
    initialise,
    layer_costs,
    mixture,
    next_token_loss,
)
from slipstream.model.experts import Mixture
from slipstream.model.presets import PRESETS
from slipstream.model.registry import preset
from slipstream.optim import SignDescent, balance_experts
from slipstream.optim.groups import assign

CONFIG = ModelConfig(
    vocab_size=40,
    sequence_length=16,
    dim=24,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    hidden_dim=32,
    num_experts=6,
    experts_per_token=2,
    expert_dim=10,
    num_shared_experts=2,
    num_dense_layers=1,
)
NUM_TOKENS = 35


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def made(config: ModelConfig = CONFIG) -> Mixture:
    layer = mixture(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, CONFIG.dim, dtype=torch.float64)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return down @ (F.silu(gate @ x) * (up @ x))


def naive(layer: Mixture, x: Tensor) -> tuple[Tensor, list[int]]:
    """One token after another, one expert after another; and how many tokens each expert had."""
    router, experts, shared = layer.router, layer.experts, layer.shared
    loads = [0] * len(router.bias)
    outputs = []
    for token in x.flatten(0, -2):
        scores = torch.sigmoid(router.weight @ token)
        wanted = (scores + router.bias).tolist()
        chosen = sorted(range(len(wanted)), key=lambda e: -wanted[e])[: router.experts_per_token]
        total = sum(scores[e] for e in chosen)
        output = torch.zeros_like(token)
        for e in chosen:
            loads[e] += 1
            output = output + scores[e] / total * swiglu(token, experts.gate[e], experts.up[e], experts.down[e])
        if shared is not None:
            output = output + swiglu(token, shared.gate.weight, shared.up.weight, shared.down.weight)
        outputs.append(output)
    return torch.stack(outputs).view_as(x), loads


def gradients(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    named = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"x": x.grad}
    return {name: gradient for name, gradient in named.items() if gradient is not None}


def overload(loads: list[int], config: ModelConfig = CONFIG) -> Tensor:
    excess = [config.num_experts * load - sum(loads) for load in loads]
    return torch.tensor(excess, dtype=torch.float64)


# ---- routing


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, num_shared_experts=0),
        replace(CONFIG, experts_per_token=6),
        replace(CONFIG, num_experts=2),
    ],
    ids=["shared", "routed only", "all chosen", "two experts"],
)
def test_routing_equals_a_loop_over_tokens_in_outputs_and_all_gradients(config: ModelConfig) -> None:
    """The bias steers the choice only; its gradient is that of a loss which adds the overload, held fixed, to it."""
    layer = made(config)
    twin = copy.deepcopy(layer)
    x = tokens(5, 7).requires_grad_()
    y = x.detach().clone().requires_grad_()
    direction = torch.randn_like(x)
    outputs = layer(x)
    (outputs * direction).sum().backward()
    expected, loads = naive(twin, y)
    ((expected * direction).sum() + (twin.router.bias * overload(loads, config)).sum()).backward()
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    got, want = gradients(layer, x), gradients(twin, y)
    assert set(got) == set(want) == {*dict(layer.named_parameters()), "x"}
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-12, msg=name)
    assert torch.equal(got["router.bias"], want["router.bias"])


def test_an_expert_without_tokens_has_a_gradient_of_zero_and_harms_nobody() -> None:
    layer = made()
    with torch.no_grad():
        layer.router.bias[[0, 3, 5]] = -9.0
    x = tokens(NUM_TOKENS)
    outputs = layer(x)
    expected, loads = naive(layer, x)
    assert loads[0] == loads[3] == loads[5] == 0
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    outputs.square().sum().backward()
    for stack in (layer.experts.gate, layer.experts.up, layer.experts.down):
        assert stack.grad is not None
        assert not stack.grad[[0, 3, 5]].any()
        assert all(stack.grad[e].any() for e in (1, 2, 4))


def test_no_token_is_dropped_or_changed_by_the_company_it_keeps() -> None:
    layer, x = made(), tokens(NUM_TOKENS)
    x[1:] = x[1]  # all to the same experts
    together = layer(x)
    for i in (0, 1, NUM_TOKENS - 1):
        torch.testing.assert_close(together[i : i + 1], layer(x[i : i + 1]), rtol=0, atol=1e-12)


def test_the_bias_changes_who_is_chosen_and_not_their_shares() -> None:
    layer, x = made(), tokens(NUM_TOKENS)
    chosen, shares, _ = layer.router(x)
    with torch.no_grad():
        layer.router.bias += 7.0  # for all alike: no other choice
    again, same_shares, _ = layer.router(x)
    assert torch.equal(chosen, again)
    assert torch.equal(shares, same_shares)
    torch.testing.assert_close(shares.sum(-1), torch.ones(NUM_TOKENS, dtype=torch.float64))
    with torch.no_grad():
        layer.router.bias[4] += 7.0
    assert (layer.router(x)[0] == 4).any(-1).all()


def test_the_same_numbers_give_the_same_bits() -> None:
    layer, x = made(), tokens(NUM_TOKENS)
    runs = []
    for _ in range(2):
        twin = copy.deepcopy(layer)
        twin(x).square().sum().backward()
        runs.append([parameter.grad for parameter in twin.parameters()])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    layer = made().to(dtype)
    x = tokens(NUM_TOKENS).to(dtype)
    outputs = layer(x)
    assert outputs.dtype == dtype
    exact = torch.sigmoid(F.linear(x.float(), layer.router.weight.float())) + layer.router.bias.float()
    assert torch.equal(layer.router(x)[0], exact.topk(2).indices)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def large_on_cuda(dtype: torch.dtype) -> tuple[Mixture, Tensor]:
    """Five of sixteen experts have no tokens."""
    layer = Mixture(128, num_experts=16, experts_per_token=3, expert_dim=64, shared=None).cuda()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
        layer.router.bias[::3] = -9.0
        layer.router.bias[1] = -9.0
    return layer.to(dtype), torch.randn(1000, 128, device="cuda").to(dtype)


def step_on_cuda(layer: Mixture, x: Tensor) -> dict[str, Tensor]:
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    dirt = [torch.full((2**22,), torch.nan, device="cuda") for _ in range(8)]
    del dirt  # what a kernel does not write is not zero by chance
    outputs = layer(x)
    outputs.backward(torch.linspace(-1, 1, outputs.numel(), device="cuda").view_as(outputs).to(x.dtype))
    return gradients(layer, x) | {"outputs": outputs.detach()}


@pytest.mark.cuda
@needs_cuda
def test_the_grouped_kernel_equals_the_loop_also_for_experts_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = large_on_cuda(torch.bfloat16)
    if not moe._has_grouped_kernel(x, layer.experts.gate):
        pytest.skip("there is no such kernel for this device")
    grouped = step_on_cuda(layer, x)
    monkeypatch.setattr(moe, "_has_grouped_kernel", lambda rows, stack: False)
    looped = step_on_cuda(layer, x)
    for name, value in grouped.items():
        scale = looped[name].abs().max().item()
        torch.testing.assert_close(value, looped[name], rtol=0, atol=0.02 * scale, msg=name)
    assert not grouped["experts.gate"][[0, 1, 3]].any()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_numbers_give_the_same_bits_on_a_gpu(dtype: torch.dtype) -> None:
    layer, x = large_on_cuda(dtype)
    first = step_on_cuda(layer, x)
    for _ in range(5):
        for name, value in step_on_cuda(layer, x).items():
            assert torch.equal(value, first[name]), name


@pytest.mark.cuda
@needs_cuda
def test_a_gpu_computes_what_a_cpu_does() -> None:
    layer, x = large_on_cuda(torch.float64)
    on_cpu = copy.deepcopy(layer).cpu()
    expected, loads = naive(on_cpu, x.cpu())
    outputs = layer(x)
    outputs.sum().backward()
    torch.testing.assert_close(outputs.cpu(), expected, rtol=0, atol=1e-12)
    excess = [16 * load - sum(loads) for load in loads]
    assert layer.router.bias.grad is not None
    assert layer.router.bias.grad.tolist() == excess


# ---- balance


def test_the_bias_learns_nothing_of_the_loss_scale_and_everything_of_the_batch() -> None:
    """However a batch is divided and its loss scaled, the gradient is the same, to the bit."""
    layer, x = made(), tokens(NUM_TOKENS)
    whole, pieces = copy.deepcopy(layer), copy.deepcopy(layer)
    whole(x).sum().backward()
    for piece in x.split((3, 20, 12)):
        (1e-3 * pieces(piece).sum()).backward()
    assert torch.equal(whole.router.bias.grad, pieces.router.bias.grad)
    assert torch.equal(whole.router.bias.grad, overload(naive(layer, x)[1]))


def test_a_step_moves_every_bias_by_the_rate_against_its_experts_overload() -> None:
    rate, microbatches = 0.02, [tokens(NUM_TOKENS) for _ in range(3)]
    layer = made()
    optimizer = SignDescent([layer.router.bias], lr=rate)
    bias = layer.router.bias.detach().clone()
    for _ in range(4):
        with torch.no_grad():
            loads = [sum(column) for column in zip(*(naive(layer, x)[1] for x in microbatches), strict=True)]
        mean = sum(loads) / len(loads)
        bias -= rate * torch.tensor([(load > mean) - (load < mean) for load in loads], dtype=torch.float64)
        for x in microbatches:
            layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(layer.router.bias.detach(), bias, rtol=0, atol=1e-15)


def test_steps_even_out_the_load() -> None:
    layer, x = made(), tokens(300)
    optimizer = SignDescent([layer.router.bias], lr=0.01)

    def fullest() -> int:
        return int(layer.router(x)[2].max())

    first = fullest()
    for _ in range(150):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
    even = 300 * CONFIG.experts_per_token / CONFIG.num_experts
    assert first > 1.3 * even
    assert fullest() < 1.1 * even


# ---- optimizers


def test_stacks_of_experts_go_to_muon_routers_to_adamw_and_their_biases_to_the_balance() -> None:
    with torch.device("meta"):
        named = decoder(CONFIG).named_parameters()
    groups = [balance_experts(0.001), *muon_and_adamw(muon_lr=0.02, adamw_lr=0.01)]
    names = {group.name: {name for name, _ in members} for group, members in assign(named, groups)}
    blocks = ("block1", "block2")
    assert names["balance"] == {f"{block}.mlp.router.bias" for block in blocks}
    assert {f"{block}.mlp.router.weight" for block in blocks} <= names["rest"]
    experts = {f"{block}.mlp.experts.{part}" for block in blocks for part in ("gate", "up", "down")}
    shared = {f"{block}.mlp.shared.{part}.weight" for block in blocks for part in ("gate", "up", "down")}
    assert experts | shared <= names["matrices"]
    assert not any("router" in name for name in names["matrices"])


def test_muon_steps_every_expert_as_if_it_were_alone() -> None:
    layer = made()
    layer(tokens(NUM_TOKENS)).square().sum().backward()
    stack = layer.experts.down
    assert stack.grad is not None
    alone = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    for parameter, gradient in zip(alone, stack.grad, strict=True):
        parameter.grad = gradient.clone()
    Muon([stack], lr=0.02, ns_dtype=torch.float64).step()
    for parameter in alone:
        Muon([parameter], lr=0.02, ns_dtype=torch.float64).step()
    torch.testing.assert_close(stack.detach(), torch.stack(alone).detach(), rtol=0, atol=1e-13)


# ---- the decoder


def test_the_first_blocks_stay_dense_and_the_parameters_go_by_these_names() -> None:
    names = [name for name, _ in decoder(CONFIG).named_parameters()]
    assert [name for name in names if name.startswith("block0.mlp.")] == [
        f"block0.mlp.{part}.weight" for part in ("gate", "up", "down")
    ]
    assert [name for name in names if name.startswith("block1.mlp.")] == [
        "block1.mlp.router.weight",
        "block1.mlp.router.bias",
        *(f"block1.mlp.experts.{part}" for part in ("gate", "up", "down")),
        *(f"block1.mlp.shared.{part}.weight" for part in ("gate", "up", "down")),
    ]


@pytest.mark.parametrize("first", range(CONFIG.num_layers + 2))
def test_a_slice_made_empty_starts_as_in_the_whole_model(first: int) -> None:
    whole = decoder(CONFIG)
    initialise(whole, CONFIG, seed=0)
    with torch.device("meta"):
        part = decoder(CONFIG)[first : first + 1]
    part = part.to_empty(device="cpu")
    for tensor in (*part.parameters(), *part.buffers()):
        tensor.data.fill_(torch.nan)
    initialise(part, CONFIG, seed=0)
    for (name, got), (_, want) in zip(
        part.named_parameters(), whole[first : first + 1].named_parameters(), strict=True
    ):
        assert torch.equal(got, want), name


def test_initial_scales() -> None:
    config = replace(CONFIG, dim=96, expert_dim=48)
    model = decoder(config)
    initialise(model, config, seed=0)
    layer, narrow = model[2].mlp, 0.02 / 6**0.5
    for weight in (layer.router.weight, layer.experts.gate, layer.experts.up, layer.shared.up.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    for weight in (layer.experts.down, layer.shared.down.weight):
        assert weight.std().item() == pytest.approx(narrow, rel=0.1)
    assert not layer.router.bias.any()
    assert not torch.equal(layer.experts.gate[0], layer.experts.gate[1])


def test_evaluation_and_training_compute_the_same_function() -> None:
    model = decoder(CONFIG).double()
    initialise(model, CONFIG, seed=0)
    ids = torch.randint(CONFIG.vocab_size, (2, 16))
    loss = next_token_loss(model(ids), ids)
    with torch.no_grad():
        assert torch.equal(next_token_loss(model.eval()(ids), ids), loss)


# ---- sizes and costs


@pytest.mark.parametrize(
    ("name", "total", "active"), [("moe-2b", 1_926_338_624, 375_494_720), ("moe-10b", 10_056_863_168, 1_664_060_864)]
)
def test_presets_with_experts_have_their_parameter_counts(name: str, total: int, active: int) -> None:
    assert preset(name).num_parameters() == total
    assert preset(name).num_active_parameters() == active


def test_a_dense_model_is_active_in_all_its_parameters() -> None:
    assert preset("tiny").num_active_parameters() == preset("tiny").num_parameters()


def test_layer_costs_count_the_active_experts() -> None:
    costs = layer_costs(CONFIG, 16)
    model = decoder(CONFIG)
    attention = 4 * CONFIG.dim * (16 + 1) / 2
    dense = sum(p.numel() for p in model[1].parameters() if p.ndim == 2)
    assert costs[1] == 2 * dense + attention
    used = sum(p.numel() for p in model[2].parameters() if p.ndim == 2)
    used += sum(p[: CONFIG.experts_per_token].numel() for p in model[2].parameters() if p.ndim == 3)
    assert costs[2] == costs[3] == 2 * used + attention


@pytest.mark.parametrize("preset", ["3b", "8b", "moe-2b", "moe-10b"])
def test_the_stages_of_a_large_preset_have_all_its_parameters_between_them(preset: str) -> None:
    config = PRESETS[preset]
    with torch.device("meta"):
        whole = decoder(config)
    stages = [whole[first : first + 8] for first in range(0, config.num_layers + 2, 8)]
    shapes = {name: parameter.shape for stage in stages for name, parameter in stage.named_parameters()}
    assert shapes.items() >= {name: parameter.shape for name, parameter in whole.named_parameters()}.items()


def test_one_block_of_a_large_preset_is_made_alone() -> None:
    config = PRESETS["moe-2b"]
    with torch.device("meta"):
        whole = decoder(config)
    block = whole[2:3].to_empty(device="cpu")
    initialise(block, config, seed=0)
    assert all(parameter.isfinite().all() for parameter in block.parameters())
    assert all(parameter.is_meta for layer in (whole[:2], whole[3:]) for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": -1}, r"model\.num_experts is -1: set it to 0, for a dense model, or more"),
        ({"num_experts": 0}, r"model\.experts_per_token is 2, but model\.num_experts is 0 .*: set model\.num_experts"),
        ({"experts_per_token": 1}, r"model\.experts_per_token is 1 of 6 experts: set it to 2"),
        ({"experts_per_token": 7}, r"model\.experts_per_token is 7 of 6 experts: .* up to model\.num_experts"),
        ({"expert_dim": 0}, r"model\.expert_dim is 0: set it to 1 or more"),
        ({"num_shared_experts": -1}, r"model\.num_shared_experts is -1: set it to 0 or more"),
        ({"num_dense_layers": 4}, r"model\.num_dense_layers is 4 of 3 blocks: set it to 0 up to model\.num_layers"),
    ],
)
def test_experts_that_cannot_be_built_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder(replace(CONFIG, **change))
