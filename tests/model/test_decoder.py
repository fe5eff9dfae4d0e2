"""The decoder: cut anywhere, it is the same function with the same weights; its parts are what they claim."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.model.decoder import (
    IGNORE,
    Attention,
    ModelConfig,
    decoder,
    initialise,
    layer_costs,
    next_token_loss,
    rotate,
    tie,
)
from slipstream.model.presets import PRESETS, layer_names
from slipstream.model.registry import Decoder, preset

CONFIG = ModelConfig(
    vocab_size=40, sequence_length=16, dim=24, num_layers=3, num_heads=6, num_kv_heads=2, hidden_dim=32
)
TIED = replace(CONFIG, tied_embeddings=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def made(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    model = decoder(config).to(dtype)
    initialise(model, config, seed)
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(0))


# ---- cuts


@pytest.mark.parametrize("cut", range(1, CONFIG.num_layers + 2))
def test_a_cut_anywhere_composes_to_the_same_output_bitwise(cut: int) -> None:
    model, tokens = made(CONFIG), ids(2, 16)
    torch.testing.assert_close(model[cut:](model[:cut](tokens)), model(tokens), rtol=0, atol=0)


def test_a_cut_keeps_layer_and_parameter_names() -> None:
    whole = decoder(CONFIG)
    assert [name for name, _ in whole.named_children()] == layer_names(CONFIG.num_layers)
    names = [name for cut in (whole[:2], whole[2:4], whole[4:]) for name, _ in cut.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]


def test_parameters_go_by_these_names() -> None:
    attention = ["attention_norm", *(f"attention.{name}" for name in ("query", "key", "value", "output"))]
    mlp = ["mlp_norm", *(f"mlp.{name}" for name in ("gate", "up", "down"))]
    expected = ["embedding", *(f"block0.{part}" for part in attention + mlp), "head.norm", "head.output"]
    model = decoder(replace(CONFIG, num_layers=1))
    assert [name for name, _ in model.named_parameters()] == [f"{name}.weight" for name in expected]
    assert list(model.state_dict()) == [f"{name}.weight" for name in expected]  # the tables are not saved


# ---- initialisation


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("first", range(CONFIG.num_layers + 2))
def test_a_slice_made_empty_starts_as_in_the_whole_model(config: ModelConfig, first: int) -> None:
    whole = made(config, torch.float32)
    with torch.device("meta"):
        part = decoder(config)[first : first + 1]
    part = part.to_empty(device="cpu")
    for tensor in (*part.parameters(), *part.buffers()):
        tensor.data.fill_(math.nan)
    initialise(part, config, seed=0)
    expected = whole[first : first + 1]
    for (name, got), (_, want) in zip(part.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(got, want), name
    for (name, got), (_, want) in zip(part.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(got, want), name


def test_initial_weights_agree_across_dtypes_and_differ_across_seeds_and_names() -> None:
    coarse, fine, other = made(CONFIG, torch.float32), made(CONFIG), made(CONFIG, seed=1)
    for (name, a), (_, b), (_, c) in zip(
        coarse.named_parameters(), fine.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a.double(), b), name
        assert name.endswith("norm.weight") or not torch.equal(b, c), name
    assert not torch.equal(fine[1].attention.query.weight, fine[2].attention.query.weight)


def test_initial_weights_do_not_depend_on_the_global_generator() -> None:
    torch.manual_seed(1)
    before = made(CONFIG)
    torch.manual_seed(2)
    for a, b in zip(before.parameters(), made(CONFIG).parameters(), strict=True):
        assert torch.equal(a, b)


def test_initial_scales() -> None:
    config = replace(CONFIG, dim=96, hidden_dim=96)
    block = made(config)[1]
    narrow = 0.02 / math.sqrt(2 * config.num_layers)
    for module in (block.attention.query, block.mlp.gate, block.mlp.up):
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for module in (block.attention.output, block.mlp.down):
        assert module.weight.std().item() == pytest.approx(narrow, rel=0.05)
    assert torch.equal(block.mlp_norm.weight, torch.ones(96, dtype=torch.float64))


def test_a_cut_that_lost_its_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' belongs to no layer.*keeps the names"):
        initialise(nn.Sequential(*decoder(CONFIG)), CONFIG, seed=0)


# ---- tied embeddings


def test_tied_ends_are_one_parameter_also_after_copying() -> None:
    model = decoder(TIED)
    assert model.head.output.weight is model.embedding.weight
    twin = copy.deepcopy(model)
    assert twin.head.output.weight is twin.embedding.weight
    assert decoder(CONFIG).head.output.weight is not decoder(CONFIG).embedding.weight


def test_initialise_ties_again_what_to_empty_parted() -> None:
    with torch.device("meta"):
        model = decoder(TIED)
    model = model.to_empty(device="cpu")
    initialise(model, TIED, seed=0)
    assert model.head.output.weight is model.embedding.weight
    model = model[1:]
    tie(model, TIED)  # one end alone stays as it is
    assert "head.output.weight" in dict(model.named_parameters())


def test_a_tied_head_alone_starts_as_the_embedding() -> None:
    head = decoder(TIED)[-1:]
    initialise(head, TIED, seed=3)
    embedding = decoder(TIED)[:1]
    initialise(embedding, TIED, seed=3)
    assert torch.equal(head.head.output.weight, embedding.embedding.weight)


# ---- sizes and costs


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("135m", 134_515_008),
        ("360m", 361_821_120),
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
    ],
)
def test_presets_have_the_published_parameter_counts(name: str, expected: int) -> None:
    assert preset(name).num_parameters() == expected


@pytest.mark.parametrize("config", [*PRESETS.values(), CONFIG, TIED])
def test_parameter_count_follows_the_formula(config: ModelConfig) -> None:
    c = config
    attention = 2 * c.dim * c.dim + 2 * c.dim * c.num_kv_heads * c.head_size
    dense = attention + 3 * c.dim * c.hidden_dim + 2 * c.dim
    num_experts = c.num_experts + c.num_shared_experts
    sparse = attention + 3 * c.dim * c.expert_dim * num_experts + c.num_experts * (c.dim + 1) + 2 * c.dim
    num_dense = c.num_dense_layers if c.num_experts else c.num_layers
    ends = c.vocab_size * c.dim * (1 if c.tied_embeddings else 2) + c.dim
    assert Decoder(**asdict(c)).num_parameters() == num_dense * dense + (c.num_layers - num_dense) * sparse + ends


def test_demo_presets_are_small() -> None:
    assert 0.4e6 < preset("tiny").num_parameters() < 0.8e6
    assert 20e6 < preset("small").num_parameters() < 30e6


def test_layer_costs_follow_the_layers() -> None:
    costs = layer_costs(CONFIG, 16)
    assert len(costs) == len(layer_names(CONFIG.num_layers))
    assert costs[0] == 0 and len(set(costs[1:-1])) == 1
    assert costs[-1] == 2 * CONFIG.dim * CONFIG.vocab_size
    block = decoder(CONFIG)[1]
    matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    assert costs[1] == 2 * matrices + 4 * CONFIG.dim * (16 + 1) / 2
    assert layer_costs(CONFIG, 32)[1] > costs[1]


# ---- attention


def test_grouped_queries_equal_explicitly_repeated_heads() -> None:
    full = replace(CONFIG, num_kv_heads=CONFIG.num_heads)
    shared, repeated = made(CONFIG)[1].attention, made(full)[1].attention
    group = CONFIG.num_heads // CONFIG.num_kv_heads
    for name in ("query", "output", "key", "value"):
        weight = getattr(shared, name).weight
        if name in ("key", "value"):
            heads = weight.unflatten(0, (CONFIG.num_kv_heads, CONFIG.head_size))
            weight = torch.cat([head for head in heads for _ in range(group)])
        getattr(repeated, name).weight.data.copy_(weight)
    x = torch.randn(2, 16, CONFIG.dim, dtype=torch.float64)
    torch.testing.assert_close(shared(x), repeated(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_shares_heads_as_repeating_them_does(dtype: torch.dtype) -> None:
    """Half precision leaves sharing to torch; this pins what that means on every version we support."""
    query, key, value = (torch.randn(2, heads, 16, 8, dtype=dtype) for heads in (6, 2, 2))
    shared = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    key, value = key.repeat_interleave(3, dim=1), value.repeat_interleave(3, dim=1)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, is_causal=True), shared)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    attention = Attention(replace(CONFIG, sequence_length=32)).double()
    query, key = torch.randn(2, attention.head_dim, dtype=torch.float64)

    def score(i: int, j: int) -> torch.Tensor:
        at_i, at_j = (rotate(x, attention.cosine[p], attention.sine[p]) for x, p in ((query, i), (key, j)))
        return at_i @ at_j

    for distance in (0, 1, 5):
        scores = torch.stack([score(j + distance, j) for j in range(20)])
        torch.testing.assert_close(scores, scores[:1].expand(20), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(score(0, 0), query @ key, rtol=0, atol=1e-12)
    assert abs(score(5, 0) - score(0, 5)) > 1e-3


def test_rotary_tables_agree_whatever_the_order_of_casting() -> None:
    cast, reset = Attention(CONFIG).double(), Attention(CONFIG).double()
    reset.reset_buffers()
    assert torch.equal(cast.cosine, reset.cosine) and torch.equal(cast.sine, reset.sine)


def test_no_position_sees_a_later_token() -> None:
    model, tokens = made(CONFIG), ids(1, 16)
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_a_sequence_beyond_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.sequence_length is 16, but a sequence has 17 positions"):
        made(CONFIG)(ids(1, 17))


# ---- loss and gradients


def test_loss_is_the_sum_over_positions_that_count() -> None:
    logits, targets = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(7, (2, 5))
    targets[0, 3:] = IGNORE
    by_hand = sum(
        -logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(5) if targets[b, t] != IGNORE
    )
    torch.testing.assert_close(next_token_loss(logits, targets), by_hand)
    assert next_token_loss(logits, torch.full_like(targets, IGNORE)) == 0


def test_loss_of_a_batch_is_the_sum_of_its_microbatches() -> None:
    logits, targets = torch.randn(4, 5, 7, dtype=torch.float64), torch.randint(7, (4, 5))
    parts = sum(next_token_loss(logits[i : i + 1], targets[i : i + 1]) for i in range(4))
    torch.testing.assert_close(next_token_loss(logits, targets), parts)


@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_in_float32_or_finer(given: torch.dtype, returned: torch.dtype) -> None:
    assert next_token_loss(torch.zeros(1, 2, 3, dtype=given), torch.zeros(1, 2, dtype=torch.int64)).dtype == returned


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_gradients_reach_every_parameter(config: ModelConfig) -> None:
    model, tokens = made(config), ids(2, 16)
    next_token_loss(model(tokens), tokens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_gradients_of_a_block_match_finite_differences() -> None:
    block = made(CONFIG)[1]
    x = torch.randn(1, 3, CONFIG.dim, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,))


def test_training_lowers_the_loss() -> None:
    model, tokens = made(CONFIG, torch.float32), ids(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = next_token_loss(model(tokens), tokens.roll(-1, 1)) / tokens.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(CONFIG.vocab_size), rel=0.05)
    assert losses[-1] < losses[0] / 2


# ---- configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, r"model\.vocab_size is 0: set it to 1 or more"),
        ({"num_layers": -1}, r"model\.num_layers is -1: set it to 1 or more"),
        ({"norm_eps": 0.0}, r"model\.norm_eps is 0\.0: set it to a positive number"),
        ({"rope_base": math.nan}, r"model\.rope_base is nan: set it to a positive number"),
        ({"dim": 25}, r"model\.dim is 25, .* multiple of model\.num_heads"),
        ({"dim": 18}, r"model\.dim is 18, .* odd width 3: .* multiple of 2 \* model\.num_heads"),
        ({"num_kv_heads": 4}, r"model\.num_kv_heads is 4, .* divisor of model\.num_heads"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder(replace(CONFIG, **change))


def test_every_preset_is_valid() -> None:
    for config in PRESETS.values():
        config.validate()
