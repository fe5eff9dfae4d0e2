"""What a model has to offer to be trained, saved, resumed, planned and studied.

`model.name` chooses one: "decoder", or the import path of a subclass of `ModelSpec`.

    slipstream train --model.name mypackage.models.Mlp --model.arguments width 64

A model is a sequence of layers: the first takes token ids (batch, length), every other takes what the one before
returned, the last returns what the loss takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

Loss = Callable[[Any, Tensor], Tensor]
"""(outputs of the last layer, targets) -> the sum of the losses of all positions"""


def generator(seed: int, name: str) -> torch.Generator:
    """Returns the random numbers of one parameter. They depend on the seed and the parameter's full name only, so every
    cut of a model starts from the same weights. Draw on the CPU in float32, so that devices and dtypes start alike."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class ModelSpec(ABC):
    """A model by its numbers. Subclasses are frozen dataclasses with at least these four fields."""

    vocab_size: int
    """Number of token ids."""
    sequence_length: int
    """Positions of a sequence."""
    dim: int
    """Numbers that pass between two layers for each token."""
    num_layers: int
    """Layers between the first and the last."""

    tied_embeddings: bool = False
    """Whether the first and the last layer share a parameter of vocab_size x dim."""
    num_experts: int = 0
    """Experts of each of the last `num_sparse_layers` blocks; 0: all blocks are dense, and alike."""
    num_dense_layers: int = 0
    """Blocks before them, if there are experts."""

    @property
    def num_sparse_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    def widest(self, is_sparse: bool) -> int:
        """The longest side of a block's parameters; is_sparse: of a block with experts, all experts together."""
        return self.dim

    def resized(self, num_layers: int, num_dense_layers: int = 0) -> Self:
        """The same model with another number of layers."""
        changes = {"num_dense_layers": num_dense_layers} if self.num_experts else {}
        return dataclasses.replace(self, num_layers=num_layers, **changes)  # type: ignore[type-var]

    def validate(self) -> None:  # noqa: B027
        """Raises a ValueError of one sentence if the numbers do not fit together."""

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers, in order."""
        return ["embedding", *(f"block{i}" for i in range(self.num_layers)), "head"]

    @abstractmethod
    def layers_and_loss(self, loss_chunk_tokens: int = 0) -> tuple[nn.Sequential, Loss]:
        """Builds the layers, by their names, and the loss; usually on the meta device, so without any weights.

        loss_chunk_tokens: positions whose logits may exist at a time; 0: all. A model that does not know how raises a
        ValueError."""

    @abstractmethod
    def initialise(self, layers: nn.Module, seed: int | None) -> None:
        """Sets the parameters and buffers of the layers, or of any slice of them. The values must depend on the seed
        and on the names alone, so that every cut starts from the same weights. seed: None, only the buffers."""

    @abstractmethod
    def layer_flops(self) -> list[float]:
        """FLOPs of a forward for one token, layer by layer."""

    # ---- what follows

    def facts(self) -> dict[str, Any]:
        """The fields and their values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def layers(self) -> nn.Sequential:
        return self.layers_and_loss()[0]

    def num_parameters(self) -> int:
        """Tied parameters count once."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.layers().parameters())

    def num_active_parameters(self) -> int:
        """Parameters that one token passes through."""
        return self.num_parameters()

    def weightless_flops(self) -> float:
        """FLOPs of a block's forward for one token in products without weights, as attention has them."""
        return 0.0

    def flops_per_token(self) -> float:
        """FLOPs of a forward and a backward; what is computed again does not count."""
        return 3 * sum(self.layer_flops())
