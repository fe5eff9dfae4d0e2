"""Defines the interface of a model that can be trained, saved, resumed, planned and studied.

`model.name` chooses one: "decoder", or the import path of a subclass of `ModelSpec`.

    slipstream train --model.name mypackage.models.Mlp --model.arguments width 64

A model is a sequence of layers. The first layer takes token ids (batch, length). The input of every other layer is the
output of the layer before. The output of the last layer is the input of the loss.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .presets import layer_names

Loss = Callable[[Any, Tensor], Tensor]
"""Function (outputs of the last layer, targets) -> sum of the losses of all positions."""


def generator(seed: int, name: str) -> torch.Generator:
    """Returns the random numbers of one parameter. They depend on the seed and the parameter's full name only, so every
    cut of a model starts from the same weights. Draw on the CPU in float32, so that devices and dtypes start alike."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def on_meta() -> Iterator[None]:
    """Builds layers on the meta device: with names, shapes and dtypes, but without memory. Their first values are not
    drawn, which torch would do there in Python and to no effect."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Leaves out the functions with which layers draw their first values."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_):
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **kwargs)


class ModelSpec(ABC):
    """A model, described by numbers. Subclasses are frozen dataclasses with at least the first four fields."""

    vocab_size: int
    """Number of token ids."""
    sequence_length: int
    """Number of positions of a sequence."""
    dim: int
    """Number of values that pass between two layers for each token."""
    num_layers: int
    """Number of layers between the first and the last."""

    tied_embeddings: bool = False
    """Whether the first and the last layer share a parameter of vocab_size x dim."""
    num_experts: int = 0
    """Number of experts of each of the last `num_sparse_layers` blocks. 0 means that all blocks are dense and have the
    same shape."""
    num_dense_layers: int = 0
    """Number of blocks before those with experts, in a model with experts."""

    @property
    def num_sparse_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    def resized(self, num_layers: int, num_dense_layers: int = 0) -> Self:
        """Returns the same model with another number of layers."""
        changes = {"num_dense_layers": num_dense_layers} if self.num_experts else {}
        return dataclasses.replace(self, num_layers=num_layers, **changes)  # type: ignore[type-var]

    def separating(self, separator: int) -> Self:
        """Returns the same model, except that no token sees a document before its own. A document begins with the token
        `separator`. A model that cannot do this raises NotImplementedError."""
        raise NotImplementedError

    def validate(self) -> None:  # noqa: B027
        """Raises a ValueError with one sentence if the numbers do not fit together."""

    @property
    def layer_names(self) -> list[str]:
        """Returns the names of the layers, in order."""
        return layer_names(self.num_layers)

    @abstractmethod
    def layers_and_loss(self, loss_chunk_tokens: int = 0) -> tuple[nn.Sequential, Loss]:
        """Builds the layers, by their names, and the loss. Usually this runs on the meta device, which allocates no
        weights.

        loss_chunk_tokens: number of positions whose logits may exist at the same time. 0 means all. A model that does
        not support this raises a ValueError.
        """

    @abstractmethod
    def initialise(self, layers: nn.Module, seed: int | None) -> None:
        """Sets the parameters and buffers of the layers, or of any slice of them.

        The values must depend only on the seed and on the names, so that every cut starts from the same weights. seed:
        None means that only buffers are set.
        """

    @abstractmethod
    def layer_flops(self) -> list[float]:
        """Returns the FLOPs of a forward for one token, for each layer."""

    # ---- derived values

    def facts(self) -> dict[str, Any]:
        """Returns the fields and their values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def layers(self) -> nn.Sequential:
        return self.layers_and_loss()[0]

    def meta_layers(self) -> nn.Sequential:
        """Returns the layers on the meta device."""
        with on_meta():
            return self.layers()

    def num_parameters(self) -> int:
        """Returns the number of parameters. Tied parameters count once."""
        return sum(parameter.numel() for parameter in self.meta_layers().parameters())

    @property
    def steps_tied_weights(self) -> bool:
        """Returns whether the first and the last layer share a parameter that is trained."""
        return self.tied_embeddings

    def num_frozen_parameters(self) -> int:
        """Returns the number of parameters that are not trained."""
        return sum(parameter.numel() for parameter in self.meta_layers().parameters() if not parameter.requires_grad)

    @property
    def weight_folder(self) -> Path | None:
        """Returns the folder that the weights are read from at the start. None means that they are drawn."""
        return None

    def num_active_parameters(self) -> int:
        """Returns the number of parameters that one token passes through."""
        return self.num_parameters()

    def weightless_flops(self) -> float:
        """Returns the forward FLOPs of a block for one token in products without weights, such as those of
        attention."""
        return 0.0

    def flops_per_token(self) -> float:
        """Returns the FLOPs of a forward and a backward for one token. Recomputation is not counted."""
        return 3 * sum(self.layer_flops())
