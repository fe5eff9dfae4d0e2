"""A decoder in the style of Llama and SmolLM2 that can be cut into stages.

It is an `nn.Sequential` of named layers (embedding, block0, block1, ..., head). The input of each layer is the output
of the layer before, and nothing else. The model contains no code for pipelines. Blocks are dense or, with
`num_experts`, mixtures of experts (experts.py). Any slice of it is a model whose parameters keep their names:

    config = PRESETS["tiny"]
    with torch.device("meta"):
        model = decoder(config)[2:4]                          # block1 and block2
    initialise(model.to_empty(device="cpu"), config, seed=0)  # the weights they have in the whole model

Projections, rotary convention and norms are those of LlamaForCausalLM in transformers; only the names differ.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .documents import Embedding, attend
from .experts import Mixture
from .presets import ModelConfig, layer_names, saved_name
from .spec import ModelSpec, generator

Hidden = Tensor | tuple[Tensor, Tensor]
"""What passes between two layers: (batch, length, dim), and where documents are kept apart, their starts."""

IGNORE = -100
"""Target of positions that do not count in the loss, such as padding."""

WRITE_TO_THE_RESIDUAL_STREAM = (
    "attention.output.weight",
    "mlp.down.weight",
    "mlp.experts.down",
    "mlp.shared.down.weight",
)
"""Endings of the names of the parameters that write to the residual stream."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    cosine: Tensor  # (sequence_length, head_dim / 2); sine has the same shape
    sine: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_size
        self.rope_base, self.rope_scaling = config.rope_base, config.rope_scaling
        self.query = nn.Linear(config.dim, config.num_heads * config.head_size, bias=config.qkv_bias)
        self.key = nn.Linear(config.dim, config.num_kv_heads * config.head_size, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, config.num_kv_heads * config.head_size, bias=config.qkv_bias)
        self.output = nn.Linear(config.num_heads * config.head_size, config.dim, bias=False)
        self.query_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        # A block may be alone on its device, so each block has its own tables. They are not saved in checkpoints.
        shape = (config.sequence_length, config.head_size // 2)
        self.register_buffer("cosine", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sine", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fills the rotary tables in place. Call it again after `to_empty`."""
        if self.cosine.is_meta:
            return
        length, pairs = self.cosine.shape
        # Computed on the CPU in float64, then rounded to float32, so that the values are the same for every device and
        # every order of casts.
        exponent = torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
        position = torch.arange(length, dtype=torch.float64, device="cpu")
        angle = torch.outer(position, scaled(self.rope_base**-exponent, self.rope_scaling))
        self.cosine.copy_(angle.cos().float())
        self.sine.copy_(angle.sin().float())

    def forward(self, x: Tensor, cache: Cache | None = None, starts: Tensor | None = None) -> Tensor:
        """Maps (batch, length, dim) to the same.

        cache: the keys and values of the positions before x, to which those of x are added. starts: where the document
        of each position begins. None means that a row is one document.
        """
        batch, length, _ = x.shape
        start = 0 if cache is None else cache.length
        if start + length > self.cosine.shape[0]:
            raise ValueError(
                f"model.sequence_length is {self.cosine.shape[0]}, but a sequence has {start + length} positions: "
                "raise it or send shorter sequences."
            )
        cosine, sine = self.cosine[start : start + length], self.sine[start : start + length]
        if starts is not None:
            positions = torch.arange(length, device=x.device) - starts
            cosine, sine = self.cosine[positions].unsqueeze(1), self.sine[positions].unsqueeze(1)
        query = self.query_norm(self.query(x).view(batch, length, self.num_heads, self.head_dim)).transpose(1, 2)
        key = self.key_norm(self.key(x).view(batch, length, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        value = self.value(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        if cache is not None:
            key, value = cache.add(key, value)
        # Flash attention, which supports half precision only, reads shared key and value heads in place. The CUDA
        # kernel for float32 needs as many key heads as query heads. Otherwise torch falls back to a kernel that
        # allocates every length x length matrix (pytorch/pytorch#181528).
        shared = starts is None and (query.dtype in (torch.float16, torch.bfloat16) or start > 0)
        if not shared:
            key = key.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
            value = value.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        if starts is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1, enable_gqa=shared)
        else:
            mixed = attend(query, key, value, starts)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


class Cache:
    """The keys and values of all positions so far, of one block. Several positions may be added at once only to an
    empty cache."""

    def __init__(self, most: int) -> None:
        """most: number of positions for which there is room."""
        self.length, self._most = 0, most
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds (batch, heads, length, head_dim). Returns the keys and values of all positions."""
        if self.length and key.shape[2] > 1:
            raise ValueError(f"a cache of {self.length} positions takes one more at a time, not {key.shape[2]}")
        if self._keys is None or self._values is None:
            shape = (*key.shape[:2], self._most, key.shape[3])
            self._keys, self._values = key.new_empty(shape), value.new_empty(shape)
        end = self.length + key.shape[2]
        self._keys[:, :, self.length : end], self._values[:, :, self.length : end] = key, value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


def scaled(frequencies: Tensor, scaling: tuple[float, ...] | None) -> Tensor:
    """Returns rotary frequencies for longer sequences than those of the original training, as Llama 3.1 does: low
    frequencies are divided by a factor, high ones are kept, and those between are mixed."""
    if scaling is None:
        return frequencies
    factor, low, high, original_length = scaling
    turns = original_length * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates pair i of x (..., length, head_dim) by the angle of its position (RoPE, arXiv:2104.09864).

    A pair is entry i with entry i + head_dim / 2, as in the published Llama and SmolLM2 weights.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)  # the tables may have a finer dtype than x, as under autocast


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

    def forward(self, inputs: Hidden, cache: Cache | None = None) -> Hidden:
        x, starts = inputs if isinstance(inputs, tuple) else (inputs, None)
        x = x + self.attention(self.attention_norm(x), cache, starts)
        x = x + self.mlp(self.mlp_norm(x))
        return x if starts is None else (x, starts)


class Head(nn.Module):
    def __init__(self, config: ModelConfig, logits: bool = True) -> None:
        super().__init__()
        self.logits = logits
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, inputs: Hidden) -> Tensor | tuple[Tensor, Tensor]:
        x = self.norm(inputs[0] if isinstance(inputs, tuple) else inputs)
        return self.output(x) if self.logits else (x, self.output.weight)


def decoder(config: ModelConfig, logits: bool = True) -> nn.Sequential:
    """Builds the whole model, which maps token ids (batch, length) to logits (batch, length, vocab_size).

    logits: False means that the model returns the last hidden states and the weight of the projection instead of
    logits, for a loss that never holds all logits (chunked_loss.py).
    """
    config.validate()
    num_dense = config.num_layers - config.num_sparse_layers
    layers: list[nn.Module] = [
        _embedding(config),
        *(Block(config, is_sparse=i >= num_dense) for i in range(config.num_layers)),
        Head(config, logits),
    ]
    model = nn.Sequential(OrderedDict(zip(layer_names(config.num_layers), layers, strict=True)))
    tie(model, config)
    return model


def _embedding(config: ModelConfig) -> nn.Embedding:
    if config.document_separator is None:
        return nn.Embedding(config.vocab_size, config.dim)
    return Embedding(config.vocab_size, config.dim, config.document_separator)


def tie(model: nn.Module, config: ModelConfig | ModelSpec) -> None:
    """Makes embedding and head share one Parameter, if the config says so and `model` contains both.

    Call it after `to_empty` on a whole model, because torch materialises a shared meta parameter once for each owner.
    """
    layers = dict(model.named_children())
    if config.tied_embeddings and "embedding" in layers and "head" in layers:
        model.get_submodule("head.output").weight = model.get_submodule("embedding").weight


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int | None) -> None:
    """Sets every parameter and buffer of `decoder(config)`, or of any slice of it, by name.

    The values of a parameter depend only on the seed and its full name, so every cut of the model starts from the same
    weights. A tied head uses the name of the embedding, even on a stage without the embedding. Weights are drawn from
    N(0, 0.02^2). Those that write to the residual stream are scaled by 1 / sqrt(2 num_layers), as in GPT-2. Norms start
    at one, and biases at zero.

    seed: None means that only buffers are set, and parameters are left to the caller.
    """
    tie(model, config)
    known = set(layer_names(config.num_layers))
    for name, parameter in model.named_parameters():
        if name.split(".")[0] not in known:
            raise ValueError(
                f"Parameter {name!r} belongs to no layer of this model: "
                "cut it as decoder(config)[first:last], which keeps the names."
            )
        if seed is None:
            continue
        name = saved_name(name, config.tied_embeddings)
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            std = 0.02 / math.sqrt(2 * config.num_layers) if name.endswith(WRITE_TO_THE_RESIDUAL_STREAM) else 0.02
            draw = torch.randn(parameter.shape, generator=generator(seed, name), dtype=torch.float32, device="cpu")
            parameter.copy_(draw.mul_(std))
    for module in model.modules():
        if isinstance(module, Attention):
            module.reset_buffers()


def layer_costs(config: ModelConfig, sequence_length: int) -> list[float]:
    """Returns the forward FLOPs per token of each layer, in the order of `layer_names`. A partition balances these.

    Each weight of a matrix counts as two FLOPs. Of the experts, only those that a token passes through count. Attention
    adds two products over the (sequence_length + 1) / 2 positions that a token sees on average. Embedding lookup,
    norms, activations and sorting tokens by expert are not counted.
    """
    attention_weights = 2 * config.dim * (config.num_heads + config.num_kv_heads) * config.head_size
    dense_weights = 3 * config.dim * config.hidden_dim
    active_experts = config.experts_per_token + config.num_shared_experts
    sparse_weights = config.dim * (config.num_experts + 3 * active_experts * config.expert_dim)
    visible = (sequence_length + 1) / 2
    dense, sparse = (
        2.0 * (attention_weights + weights) + 2 * 2 * visible * config.num_heads * config.head_size
        for weights in (dense_weights, sparse_weights)
    )
    num_sparse = config.num_sparse_layers
    blocks = [dense] * (config.num_layers - num_sparse) + [sparse] * num_sparse
    return [0.0, *blocks, 2.0 * config.dim * config.vocab_size]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the cross entropy over the positions whose target is not IGNORE, in float32 or finer.

    It is a sum, so that microbatches and replicas can be added. The caller, who knows the whole batch, divides by its
    number of tokens.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
