"""Registers the models that `model.name` can choose by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch import nn

from ..checkpoint.hugging_face import WeightFolder
from .chunked_loss import decoder_and_loss
from .decoder import initialise, layer_costs
from .hugging_face import read_weights
from .presets import PRESETS, ModelConfig
from .spec import Loss, ModelSpec


@dataclass(frozen=True)
class Decoder(ModelConfig, ModelSpec):
    """The decoder of decoder.py, dense or with experts."""

    initial: str = ""
    """Folder of Hugging Face whose weights it starts from. Empty means random weights."""

    def layers_and_loss(self, loss_chunk_tokens: int = 0) -> tuple[nn.Sequential, Loss]:
        return decoder_and_loss(self, loss_chunk_tokens)

    def initialise(self, layers: nn.Module, seed: int | None) -> None:
        initialise(layers, self, None if self.initial else seed)
        if self.initial and seed is not None:
            read_weights(layers, self, WeightFolder(Path(self.initial)))

    def separating(self, separator: int) -> Self:
        return replace(self, document_separator=separator)

    @property
    def weight_folder(self) -> Path | None:
        return Path(self.initial) if self.initial else None

    def layer_flops(self) -> list[float]:
        return layer_costs(self, self.sequence_length)

    def weightless_flops(self) -> float:
        return 2.0 * (self.sequence_length + 1) * self.num_heads * self.head_size

    def num_active_parameters(self) -> int:
        idle_experts = self.num_sparse_layers * (self.num_experts - self.experts_per_token)
        return self.num_parameters() - idle_experts * 3 * self.dim * self.expert_dim


def preset(name: str, **changes: Any) -> Decoder:
    """Returns a preset of presets.py, with some of its fields changed."""
    return Decoder(**(asdict(PRESETS[name]) | changes))


MODELS: dict[str, type[ModelSpec]] = {"decoder": Decoder}
"""Models by the name that `model.name` uses."""
