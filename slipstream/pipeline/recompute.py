"""Layers that keep nothing but their input between forward and backward, and are computed again in the backward.

    Recomputing(OrderedDict(layers), recomputed={"block0", "block2"})

Which costs a second forward of these layers and saves their activations. The second forward must see the weights of the
first. A stage's weight versions are modules of their own, which no update touches while one of their microbatches is in
flight; should one ever be touched, autograd raises, as it does for a layer that is not recomputed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Call = Callable[[nn.Module, Any], Any]
"""(layer, its input) -> its output"""


def call_plainly(layer: nn.Module, value: Any) -> Any:
    return layer(value)


class Recomputing(nn.Sequential):
    """An nn.Sequential, whose children named in `recomputed` are computed again in the backward.

    What such a layer draws at random is drawn again, from the state that the generator had: use processes for it, for
    stages that are threads share one generator. What it counts on its way, such as the running statistics of a batch
    norm, it counts twice."""

    def __init__(
        self,
        layers: OrderedDict[str, nn.Module],
        recomputed: Collection[str] = (),
        calls: Mapping[str, Call] | None = None,
    ) -> None:
        """calls: how to run a layer, by name, where it is not just called."""
        super().__init__(layers)
        self.recomputed = frozenset(recomputed)
        self._calls = dict(calls or {})

    def forward(self, value: Any) -> Any:
        for name, layer in self.named_children():
            call = self._calls.get(name, call_plainly)
            if name in self.recomputed and torch.is_grad_enabled():
                value = _unchanged(layer, checkpoint(call, layer, value, use_reentrant=False))
            else:
                value = call(layer, value)
        return value


def _unchanged(layer: nn.Module, outputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """The outputs, and a backward that begins by making sure of the layer's weights."""
    weights = [parameter.detach() for parameter in layer.parameters()]  # which counts its changes with the parameter
    if isinstance(outputs, Tensor):
        return cast(Tensor, _Unchanged.apply(len(weights), *weights, outputs)[0])
    return cast(tuple[Tensor, ...], _Unchanged.apply(len(weights), *weights, *outputs))


class _Unchanged(torch.autograd.Function):
    """Autograd looks after what it keeps of a layer, and of one that is recomputed it keeps no weights. They are kept
    here, which costs nothing: saved_tensors raises if one was overwritten."""

    @staticmethod
    def forward(ctx: Any, num_weights: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:num_weights])
        return tuple(tensor.view_as(tensor) for tensor in tensors[num_weights:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(None for _ in ctx.saved_tensors), *gradients
