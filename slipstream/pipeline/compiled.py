"""Compiles a stage's layers with torch.compile: one graph for all layers of a kind, in every weight version.

    Compiled(OrderedDict(layers), recomputed={"block0"})

The compiled function takes a layer and its input, and the layer's weights are inputs of the graph. So blocks of the
same structure share a graph. The weight versions of a stage, which are replicas of its layers, share it too. A stage
with forty blocks compiles as much as a stage with one. Gradients are in the parameters' .grad, as without compilation.

The compiler decides what a backward reads: weights, or values that the forward computed from them. Both belong to one
version, as long as no version in flight is overwritten. If that happens, autograd raises for the weights that it saved.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .recompute import Call, Recomputing, call_plainly

Backend = str | Callable[..., Any]
"""Backend of torch.compile: a name, or a function from a graph and its example inputs to a callable that runs it."""

COMPILER = threading.RLock()
"""Lock held by every thread that may compile. Tracing patches global state that all threads of a process see
(pytorch/pytorch#118260), and the first backward of a graph compiles too. So stages that are threads run their forwards
and backwards one at a time. On a GPU, where they share one device and one interpreter, little is lost. On CPUs, use
processes."""


class Compiled(Recomputing):
    """An nn.Sequential whose children are compiled. Those named in `recomputed` are computed again in the backward, by
    the same graph."""

    def __init__(
        self,
        layers: OrderedDict[str, nn.Module],
        recomputed: Collection[str] = (),
        backend: Backend = "inductor",
    ) -> None:
        with COMPILER:
            calls = {name: _call_of(layer, backend) for name, layer in layers.items()}
        super().__init__(layers, recomputed, calls)

    def forward(self, value: Any) -> Any:
        with COMPILER:
            return super().forward(value)


def _call_of(layer: nn.Module, backend: Backend) -> Call:
    if type(layer).__module__.startswith("torch.nn.") and next(layer.children(), None) is None:
        return call_plainly  # a single layer of torch is one kernel, with nothing to fuse
    return _compiled(tuple((name, type(module)) for name, module in layer.named_modules()), backend)


@cache
def _compiled(kind: tuple[tuple[str, type], ...], backend: Backend) -> Call:
    """Returns the compiled function for all layers of the same structure. It is shared by all stages, versions and
    pipelines of this process."""
    # torch caches graphs by code object, limits their number per code object, and tries the latest first. So every kind
    # of layer has a code object of its own.
    name = f"call_{kind[0][1].__name__}"
    code = call_plainly.__code__.replace(co_name=name, co_qualname=name)
    call: Call = torch.compile(FunctionType(code, globals(), name), backend=backend, dynamic=False)
    return call
