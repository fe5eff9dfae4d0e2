"""A decoder in the style of Llama and SmolLM2, written to be cut.

It is an `nn.Sequential` of named layers (embedding, block0, block1, ..., head), each fed by the one before
alone, and it never hears of pipelines. Blocks are dense or, with `num_experts`, mixtures of experts (moe.py). Any slice
of it is a model whose parameters keep their names:

    config = PRESETS["tiny"]
    with torch.device("meta"):
        model = decoder(config)[2:4]                          # block1 and block2
    initialise(model.to_empty(device="cpu"), config, seed=0)  # the weights they have in the whole model

Projections, rotary convention and norms are those of transformers' LlamaForCausalLM; only the names differ.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .moe import Mixture

IGNORE = -100
"""A target that counts for nothing: padding, or a position nobody is asked about."""

WRITE_TO_THE_RESIDUAL_STREAM = (
    "attention.output.weight",
    "mlp.down.weight",
    "mlp.experts.down",
    "mlp.shared.down.weight",
)
"""How the names of these parameters end."""


MAX_LAYERS, MAX_EXPERTS, MAX_SIZE = 1000, 10_000, 4_000_000
"""Of blocks, of experts in one, and of everything else: with so many, 64 bits still count the bytes of any tensor."""


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    """Number of token ids; every id in the data is below it."""
    sequence_length: int
    """The most positions one sequence may have."""
    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Number of blocks, between the embedding and the head."""
    num_heads: int
    """Query heads in each block; dim / num_heads is the width of one."""
    num_kv_heads: int
    """Key and value heads in each block; num_heads / num_kv_heads queries share one."""
    hidden_dim: int
    """Width inside the SwiGLU of each dense block."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths; longer sequences want a larger one."""
    norm_eps: float = 1e-5
    """Added to the mean square inside every RMSNorm."""
    tied_embeddings: bool = False
    """Whether the head's projection is the embedding's own parameter."""
    num_experts: int = 0
    """Routed experts of a block, all of one stage; 0: every block is dense."""
    experts_per_token: int = 0
    """Of these, how many a token goes through."""
    expert_dim: int = 0
    """Width inside the SwiGLU of one expert."""
    num_shared_experts: int = 0
    """Experts that every token goes through besides, as one SwiGLU of so many times expert_dim."""
    num_dense_layers: int = 0
    """Blocks, the first of all, that stay dense in a model with experts."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def num_sparse_layers(self) -> int:
        """Blocks with experts, the last of all."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    def validate(self) -> None:
        """Raise a ValueError whose one sentence names the field, its value and the remedy."""
        for field in (
            "vocab_size",
            "sequence_length",
            "dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "hidden_dim",
        ):
            value, most = getattr(self, field), MAX_LAYERS if field == "num_layers" else MAX_SIZE
            if value < 1:
                raise ValueError(f"model.{field} is {value}: set it to 1 or more.")
            if value > most:
                raise ValueError(f"model.{field} is {value}, more than any model has: set it to {most} or less.")
        for field in ("rope_base", "norm_eps"):
            value = getattr(self, field)
            if not (0 < value < math.inf):
                raise ValueError(f"model.{field} is {value}: set it to a positive number.")
        if self.dim % self.num_heads:
            raise ValueError(
                f"model.dim is {self.dim}, which {self.num_heads} heads cannot share evenly: "
                "make it a multiple of model.num_heads."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.dim is {self.dim}, which gives {self.num_heads} heads the odd width {self.head_dim}: "
                "rotary positions turn pairs, so make it a multiple of 2 * model.num_heads."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads is {self.num_kv_heads}, which does not divide {self.num_heads}: "
                "set it to a divisor of model.num_heads."
            )
        self._validate_experts()

    def _validate_experts(self) -> None:
        if self.num_experts < 0:
            raise ValueError(f"model.num_experts is {self.num_experts}: set it to 0, for a dense model, or more.")
        if self.num_experts == 0:
            for field in ("experts_per_token", "expert_dim", "num_shared_experts", "num_dense_layers"):
                value = getattr(self, field)
                if value != 0:
                    raise ValueError(
                        f"model.{field} is {value}, but model.num_experts is 0 and the model dense: "
                        f"set model.num_experts, or {field} to 0."
                    )
            return
        for field in ("num_experts", "expert_dim", "num_shared_experts"):
            value, most = getattr(self, field), MAX_EXPERTS if field == "num_experts" else MAX_SIZE
            if value > most:
                raise ValueError(f"model.{field} is {value}, more than any model has: set it to {most} or less.")
        if not 2 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model.experts_per_token is {self.experts_per_token} of {self.num_experts} experts: set it to 2, for "
                "the share of a single one is always 1 and teaches the router nothing, up to model.num_experts."
            )
        if self.expert_dim < 1:
            raise ValueError(f"model.expert_dim is {self.expert_dim}: set it to 1 or more.")
        if self.num_shared_experts < 0:
            raise ValueError(f"model.num_shared_experts is {self.num_shared_experts}: set it to 0 or more.")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"model.num_dense_layers is {self.num_dense_layers} of {self.num_layers} blocks: "
                "set it to 0 up to model.num_layers."
            )


PRESETS: dict[str, ModelConfig] = {
    # Bytes as tokens, for a laptop: 0.7M and 25M parameters. At 256 entries tying would save nothing.
    "tiny": ModelConfig(
        vocab_size=256,
        sequence_length=256,
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=256,
    ),
    "small": ModelConfig(
        vocab_size=256,
        sequence_length=512,
        dim=512,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        hidden_dim=1536,
    ),
    # SmolLM2-135M and SmolLM2-360M (arXiv:2502.02737), for 2048 positions; the released ones allow 8192.
    "135m": ModelConfig(
        vocab_size=49152,
        sequence_length=2048,
        dim=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        hidden_dim=1536,
        rope_base=100000.0,
        tied_embeddings=True,
    ),
    "360m": ModelConfig(
        vocab_size=49152,
        sequence_length=2048,
        dim=960,
        num_layers=32,
        num_heads=15,
        num_kv_heads=5,
        hidden_dim=2560,
        rope_base=100000.0,
        tied_embeddings=True,
    ),
    # The shape of Llama-3.2-1B, 1.24B parameters, without the RoPE scaling made for its longest sequences.
    "1b": ModelConfig(
        vocab_size=128256,
        sequence_length=2048,
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=8192,
        rope_base=500000.0,
        tied_embeddings=True,
    ),
    # The shapes of Llama-3.2-3B, 3.21B parameters, and of Llama-3-8B, 8.03B, likewise.
    "3b": ModelConfig(
        vocab_size=128256,
        sequence_length=4096,
        dim=3072,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        hidden_dim=8192,
        rope_base=500000.0,
        tied_embeddings=True,
    ),
    "8b": ModelConfig(
        vocab_size=128256,
        sequence_length=4096,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=14336,
        rope_base=500000.0,
    ),
    # To plan with: Llama-3-8B's shape with 40 blocks instead of 32, 9.8B parameters, and Llama-3-70B's, 70.6B. Both are
    # for 4096 positions.
    "10b": ModelConfig(
        vocab_size=128256,
        sequence_length=4096,
        dim=4096,
        num_layers=40,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=14336,
        rope_base=500000.0,
    ),
    "70b": ModelConfig(
        vocab_size=128256,
        sequence_length=4096,
        dim=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        hidden_dim=28672,
        rope_base=500000.0,
    ),
    # Mixtures of many small experts and two shared ones, in the manner of DeepSeekMoE (arXiv:2401.06066), and
    # SmolLM2's vocabulary: 1.93B parameters of which a token uses 0.38B, and 10.1B of which it uses 1.7B.
    "moe-2b": ModelConfig(
        vocab_size=49152,
        sequence_length=2048,
        dim=1024,
        num_layers=18,
        num_heads=16,
        num_kv_heads=4,
        hidden_dim=4096,
        rope_base=100000.0,
        num_experts=64,
        experts_per_token=6,
        expert_dim=512,
        num_shared_experts=2,
        num_dense_layers=1,
    ),
    "moe-10b": ModelConfig(
        vocab_size=49152,
        sequence_length=4096,
        dim=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=4,
        hidden_dim=8192,
        rope_base=500000.0,
        num_experts=64,
        experts_per_token=6,
        expert_dim=1024,
        num_shared_experts=2,
        num_dense_layers=1,
    ),
}


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    cosine: Tensor  # (sequence_length, head_dim / 2), as is sine
    sine: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.rope_base = config.rope_base
        self.query = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        # A block may stand alone on its device, so each has its own tables; a checkpoint has no use for them.
        shape = (config.sequence_length, config.head_dim // 2)
        self.register_buffer("cosine", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sine", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill in the rotary tables, in place: on construction, and again after `to_empty`."""
        length, pairs = self.cosine.shape
        # On the CPU, in float64, and rounded to float32 first: every device and every order of casting agree.
        exponent = torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
        position = torch.arange(length, dtype=torch.float64, device="cpu")
        angle = torch.outer(position, self.rope_base**-exponent)
        self.cosine.copy_(angle.cos().float())
        self.sine.copy_(angle.sin().float())

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, dim) -> the same
        batch, length, _ = x.shape
        if length > self.cosine.shape[0]:
            raise ValueError(
                f"model.sequence_length is {self.cosine.shape[0]}, but a sequence has {length} positions: "
                "raise it or send shorter sequences."
            )
        cosine, sine = self.cosine[:length], self.sine[:length]
        query = self.query(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        # Flash attention, which is for half precision, reads shared heads in place. The CUDA kernel for
        # float32 wants as many key heads as query heads; denied them, torch falls back to one that holds
        # every length x length matrix (pytorch/pytorch#181528).
        shared = query.dtype in (torch.float16, torch.bfloat16)
        if not shared:
            key = key.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
            value = value.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn pair i of x (..., length, head_dim) by its position's angle (RoPE, arXiv:2104.09864).

    A pair is entry i with entry i + head_dim / 2, as in the published Llama and SmolLM2 weights.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)  # the tables may be finer than x, as under autocast


class Mlp(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mixture(config: ModelConfig) -> Mixture:
    shared_dim = config.num_shared_experts * config.expert_dim
    shared = Mlp(config.dim, shared_dim) if shared_dim else None
    return Mixture(config.dim, config.num_experts, config.experts_per_token, config.expert_dim, shared)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, is_sparse: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = mixture(config) if is_sparse else Mlp(config.dim, config.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    def __init__(self, config: ModelConfig, logits: bool = True) -> None:
        super().__init__()
        self.logits = logits
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.norm(x)
        return self.output(x) if self.logits else (x, self.output.weight)


def layer_names(config: ModelConfig) -> list[str]:
    """The layers of `decoder(config)`, in order."""
    return ["embedding", *(f"block{i}" for i in range(config.num_layers)), "head"]


def decoder(config: ModelConfig, logits: bool = True) -> nn.Sequential:
    """The whole model: token ids (batch, length) in, logits (batch, length, vocab_size) out.

    logits: false hands over what they would be made of, the last hidden states and the weight of the projection, for a
    loss that never holds all of them (loss.py).
    """
    config.validate()
    num_dense = config.num_layers - config.num_sparse_layers
    layers: list[nn.Module] = [
        nn.Embedding(config.vocab_size, config.dim),
        *(Block(config, is_sparse=i >= num_dense) for i in range(config.num_layers)),
        Head(config, logits),
    ]
    model = nn.Sequential(OrderedDict(zip(layer_names(config), layers, strict=True)))
    tie(model, config)
    return model


def tie(model: nn.Module, config: ModelConfig) -> None:
    """Make embedding and head share one Parameter, where the config asks for it and `model` holds both.

    Call it after `to_empty` on a whole model: torch materialises a shared meta parameter once for each owner.
    """
    layers = dict(model.named_children())
    if config.tied_embeddings and "embedding" in layers and "head" in layers:
        model.get_submodule("head.output").weight = model.get_submodule("embedding").weight


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int | None) -> None:
    """Set every parameter and buffer of `decoder(config)`, or of any slice of it, by name. seed: None leaves the
    parameters to somebody else.

    A parameter's values depend on the seed and its full name alone, so every cut of the model starts from the
    same weights. A tied head goes by the embedding's name, also where it stands alone. Weights are drawn from
    N(0, 0.02^2), those that write to the residual stream narrowed by 1 / sqrt(2 num_layers) as in GPT-2;
    norms start at one, and the biases of routers at zero.
    """
    tie(model, config)
    known = set(layer_names(config))
    for name, parameter in model.named_parameters():
        if name.split(".")[0] not in known:
            raise ValueError(
                f"Parameter {name!r} belongs to no layer of this model: "
                "cut it as decoder(config)[first:last], which keeps the names."
            )
        if seed is None:
            continue
        if name == "head.output.weight" and config.tied_embeddings:
            name = "embedding.weight"
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
            continue
        if name.endswith("router.bias"):
            parameter.zero_()
            continue
        std = 0.02
        if name.endswith(WRITE_TO_THE_RESIDUAL_STREAM):
            std /= math.sqrt(2 * config.num_layers)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # Always drawn on the CPU in float32, so that devices and dtypes start alike.
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
        parameter.copy_(draw.mul_(std))
    for module in model.modules():
        if isinstance(module, Attention):
            module.reset_buffers()


def num_parameters(config: ModelConfig) -> int:
    """Parameters of `decoder(config)`, tied ones counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in decoder(config).parameters())


def num_active_parameters(config: ModelConfig) -> int:
    """Of these, what one token goes through; of a dense model all."""
    idle_experts = config.num_sparse_layers * (config.num_experts - config.experts_per_token)
    return num_parameters(config) - idle_experts * 3 * config.dim * config.expert_dim


def layer_costs(config: ModelConfig, sequence_length: int) -> list[float]:
    """Forward FLOPs per token of each layer, in the order of `layer_names`: what a partition should balance.

    Two for each weight of a matrix; of experts, those that a token goes through. Attention adds two products over the
    (sequence_length + 1) / 2 positions that a token sees on average. Looking up an embedding, norms, activations and
    sorting tokens by expert count as nothing.
    """
    attention_weights = 2 * config.dim * (config.num_heads + config.num_kv_heads) * config.head_dim
    dense_weights = 3 * config.dim * config.hidden_dim
    active_experts = config.experts_per_token + config.num_shared_experts
    sparse_weights = config.dim * (config.num_experts + 3 * active_experts * config.expert_dim)
    visible = (sequence_length + 1) / 2
    dense, sparse = (
        2.0 * (attention_weights + weights) + 2 * 2 * visible * config.num_heads * config.head_dim
        for weights in (dense_weights, sparse_weights)
    )
    num_sparse = config.num_sparse_layers
    blocks = [dense] * (config.num_layers - num_sparse) + [sparse] * num_sparse
    return [0.0, *blocks, 2.0 * config.dim * config.vocab_size]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross entropy over the positions whose target is not IGNORE, in float32 or finer.

    A sum, so that microbatches and replicas add up; whoever knows the whole batch divides by its tokens.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
