"""Layers that keep only their input between forward and backward, and are computed again in the backward.

    Recomputing(OrderedDict(layers), recomputed={"block0", "block2"})

This costs a second forward of these layers and saves the memory of their activations. The second forward must use the
same weights as the first. The weight versions of a stage are separate modules, which no update changes while one of
their microbatches is in flight. If one is changed nevertheless, autograd raises, as it does for a layer that is not
recomputed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Call = Callable[[nn.Module, Any], Any]
"""Function from a layer and its input to its output."""


def call_plainly(layer: nn.Module, value: Any) -> Any:
    return layer(value)


class Recomputing(nn.Sequential):
    """An nn.Sequential in which the children named in `recomputed` are computed again in the backward.

    A layer that uses random numbers gets the same ones again, because the state of the generator is restored. Use
    processes for such layers, because stages that are threads share one generator. State that a layer updates in its
    forward, such as the running statistics of a batch norm, is updated twice.
    """

    def __init__(
        self,
        layers: OrderedDict[str, nn.Module],
        recomputed: Collection[str] = (),
        calls: Mapping[str, Call] | None = None,
    ) -> None:
        """`calls` maps the names of layers to the functions that run them. Other layers are called directly."""
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
    """Returns the outputs, with a backward that first checks that the layer's weights are unchanged."""
    # The detached tensor shares the version counter of the parameter.
    weights = [parameter.detach() for parameter in layer.parameters()]
    if isinstance(outputs, Tensor):
        return cast(Tensor, _Unchanged.apply(len(weights), *weights, outputs)[0])
    return cast(tuple[Tensor, ...], _Unchanged.apply(len(weights), *weights, *outputs))


class _Unchanged(torch.autograd.Function):
    """Checks in the backward that no weight was overwritten. Autograd checks the tensors that it saves for a layer, but
    for a recomputed layer it saves no weights. Saving them here costs nothing, and `saved_tensors` raises if one was
    overwritten."""

    @staticmethod
    def forward(ctx: Any, num_weights: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:num_weights])
        return tuple(tensor.view_as(tensor) for tensor in tensors[num_weights:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(None for _ in ctx.saved_tensors), *gradients
