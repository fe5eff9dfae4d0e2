"""Defines the shape of the decoder, and presets by name. This file does not import torch, so reading presets is
fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial


def layer_names(num_layers: int) -> list[str]:
    """Returns the names of the layers of a model with `num_layers` blocks, in order."""
    return ["embedding", *(f"block{i}" for i in range(num_layers)), "head"]


def saved_name(name: str, is_tied: bool) -> str:
    """Returns the name under which a weight is drawn and saved: a head that is tied has that of the embedding."""
    return "embedding.weight" if is_tied and name == "head.output.weight" else name


MAX_LAYERS, MAX_EXPERTS, MAX_SIZE = 1000, 10_000, 4_000_000
"""Largest number of blocks, largest number of experts in a block, and largest value of the other sizes. Within these
limits 64 bits can count the bytes of any tensor."""


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    """Number of token ids. Every id in the data is smaller."""
    sequence_length: int
    """Largest number of positions of a sequence."""
    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Number of blocks, between the embedding and the head."""
    num_heads: int
    """Number of query heads in each block."""
    num_kv_heads: int
    """Number of key and value heads in each block. Each is shared by num_heads / num_kv_heads query heads."""
    hidden_dim: int
    """Width inside the SwiGLU of each dense block."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths. Longer sequences need a larger base."""
    norm_eps: float = 1e-5
    """Number added to the mean square inside every RMSNorm."""
    tied_embeddings: bool = False
    """Whether the head's projection and the embedding share one parameter."""
    num_experts: int = 0
    """Number of routed experts of a block, all on the same stage. 0 means that every block is dense."""
    experts_per_token: int = 0
    """Number of routed experts that each token passes through."""
    expert_dim: int = 0
    """Width inside the SwiGLU of one expert."""
    num_shared_experts: int = 0
    """Number of experts that every token passes through in addition. They are one SwiGLU of width num_shared_experts *
    expert_dim."""
    num_dense_layers: int = 0
    """Number of blocks at the start of the model that stay dense in a model with experts."""
    head_dim: int | None = None
    """Width of a head. None means dim / num_heads."""
    qk_norm: bool = False
    """Whether queries and keys pass through an RMSNorm over each head before they are rotated, as in Qwen3."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have a bias, as in Qwen2."""
    rope_scaling: tuple[float, ...] | None = None
    """Stretches the long rotary wavelengths, as in Llama 3.1: factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings. None means not."""
    document_separator: int | None = None
    """Token id with which a document begins. Attention and positions do not reach back beyond it (documents.py). None
    means that a row is one document."""

    @property
    def head_size(self) -> int:
        """Returns the width of a head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def num_sparse_layers(self) -> int:
        """Returns the number of blocks with experts. They are the last blocks of the model."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    def validate(self) -> None:
        """Raises a ValueError with one sentence that names the field, its value and the remedy."""
        for field in ("vocab_size", "sequence_length", "dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim"):
            self._check(field, most=MAX_LAYERS if field == "num_layers" else MAX_SIZE)
        for field in ("rope_base", "norm_eps"):
            value = getattr(self, field)
            if not (0 < value < math.inf):
                raise ValueError(f"model.{field} is {value}: set it to a positive number.")
        if self.head_dim is not None and not 1 <= self.head_dim <= MAX_SIZE:
            raise ValueError(f"model.head_dim is {self.head_dim}: set it to 1 up to {MAX_SIZE}, or leave it out.")
        if self.rope_scaling is not None:
            self._validate_rope_scaling(self.rope_scaling)
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"model.dim is {self.dim}, which {self.num_heads} heads cannot share evenly: "
                "make it a multiple of model.num_heads."
            )
        if self.head_size % 2:
            raise ValueError(
                f"model.dim is {self.dim}, which gives {self.num_heads} heads the odd width {self.head_size}: "
                "rotary positions turn pairs, so make it a multiple of 2 * model.num_heads, or set an even head_dim."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads is {self.num_kv_heads}, which does not divide {self.num_heads}: "
                "set it to a divisor of model.num_heads."
            )
        self._validate_experts()

    def _check(self, field: str, least: int = 1, most: int = MAX_SIZE) -> None:
        value = getattr(self, field)
        if value < least:
            raise ValueError(f"model.{field} is {value}: set it to {least} or more.")
        if value > most:
            raise ValueError(f"model.{field} is {value}, more than any model has: set it to {most} or less.")

    def _validate_rope_scaling(self, numbers: tuple[float, ...]) -> None:
        ok = len(numbers) == 4 and all(0 < number < math.inf for number in numbers)
        if not ok or numbers[0] < 1 or not numbers[1] < numbers[2]:
            raise ValueError(
                f"model.rope_scaling is {list(numbers)}: give factor, low_freq_factor, high_freq_factor and "
                "original_max_position_embeddings, such as [8.0, 1.0, 4.0, 8192.0]."
            )

    def _validate_experts(self) -> None:
        if self.num_experts < 0:
            raise ValueError(f"model.num_experts is {self.num_experts}: set it to 0, for a dense model, or more.")
        if self.num_experts == 0:
            for field in ("experts_per_token", "expert_dim", "num_shared_experts", "num_dense_layers"):
                if value := getattr(self, field):
                    raise ValueError(
                        f"model.{field} is {value}, but model.num_experts is 0 and the model dense: "
                        f"set model.num_experts, or {field} to 0."
                    )
            return
        self._check("num_experts", most=MAX_EXPERTS)
        if not 2 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model.experts_per_token is {self.experts_per_token} of {self.num_experts} experts: set it to 2, for "
                "the share of a single one is always 1 and teaches the router nothing, up to model.num_experts."
            )
        self._check("expert_dim")
        self._check("num_shared_experts", least=0)
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"model.num_dense_layers is {self.num_dense_layers} of {self.num_layers} blocks: "
                "set it to 0 up to model.num_layers."
            )


_bytes = partial(ModelConfig, vocab_size=256)
_smollm = partial(ModelConfig, vocab_size=49152, sequence_length=2048, rope_base=100000.0, tied_embeddings=True)
_llama = partial(ModelConfig, vocab_size=128256, sequence_length=4096, rope_base=500000.0)
_llama_tied = partial(_llama, tied_embeddings=True)
_mixture = partial(
    ModelConfig,
    vocab_size=49152,
    num_heads=16,
    num_kv_heads=4,
    num_experts=64,
    experts_per_token=6,
    num_shared_experts=2,
    num_dense_layers=1,
)
"""What the presets of a family have in common."""

PRESETS: dict[str, ModelConfig] = {
    # For a laptop, with bytes as tokens: 0.7M and 25M parameters. With a vocabulary of 256, tied embeddings would save
    # almost nothing.
    "tiny": _bytes(sequence_length=256, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=256),
    "small": _bytes(sequence_length=512, dim=512, num_layers=8, num_heads=8, num_kv_heads=4, hidden_dim=1536),
    # SmolLM2-135M and SmolLM2-360M (arXiv:2502.02737), for 2048 positions; the released models allow 8192.
    "135m": _smollm(dim=576, num_layers=30, num_heads=9, num_kv_heads=3, hidden_dim=1536),
    "360m": _smollm(dim=960, num_layers=32, num_heads=15, num_kv_heads=5, hidden_dim=2560),
    # The shape of Llama-3.2-1B, 1.24B parameters, without the RoPE scaling for long sequences.
    "1b": _llama_tied(sequence_length=2048, dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, hidden_dim=8192),
    # The shapes of Llama-3.2-3B, 3.21B parameters, and of Llama-3-8B, 8.03B, also without RoPE scaling.
    "3b": _llama_tied(dim=3072, num_layers=28, num_heads=24, num_kv_heads=8, hidden_dim=8192),
    "8b": _llama(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, hidden_dim=14336),
    # For planning: the shape of Llama-3-8B with 40 blocks instead of 32, 9.8B parameters, and that of Llama-3-70B,
    # 70.6B. Both are for 4096 positions.
    "10b": _llama(dim=4096, num_layers=40, num_heads=32, num_kv_heads=8, hidden_dim=14336),
    "70b": _llama(dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=28672),
    # Mixtures of many small experts and two shared ones, as in DeepSeekMoE (arXiv:2401.06066), with the vocabulary of
    # SmolLM2: 1.93B parameters of which a token uses 0.38B, and 10.1B of which it uses 1.7B.
    "moe-2b": _mixture(
        sequence_length=2048, rope_base=100000.0, dim=1024, num_layers=18, hidden_dim=4096, expert_dim=512
    ),
    "moe-10b": _mixture(
        sequence_length=4096, rope_base=500000.0, dim=2048, num_layers=24, hidden_dim=8192, expert_dim=1024
    ),
}
