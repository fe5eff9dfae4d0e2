"""A stage's layers through torch.compile: one graph for all layers of a kind, in every weight version.

    Compiled(OrderedDict(layers), recomputed={"block0"})

What is compiled is a function of a layer and its input, and the layer's weights are inputs of the graph. So blocks that
are alike share a graph, and so do a stage's weight versions, which are replicas of its layers: a stage compiles as much
with forty blocks as with one. Gradients arrive where they do without it, in the parameters' .grad.

The compiler decides what a backward reads: weights, or what the forward made of them. Both are of one version, as long
as nobody overwrites a version in flight; should it happen, autograd raises for the weights that it kept.
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
"""Of torch.compile: a name, or a function from a graph and its example inputs to what runs it."""

COMPILER = threading.RLock()
"""Held by whoever may be compiling: tracing patches what all threads of a process see (pytorch/pytorch#118260), and the
first backward of a graph compiles too. So stages that are threads forward and backward one at a time. On a GPU, where
they share one device and one interpreter, little is lost; on CPUs, use processes."""


class Compiled(Recomputing):
    """An nn.Sequential, whose children are compiled. Those named in `recomputed` are computed again in the backward, by
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
        return call_plainly  # one kernel, with nothing to fuse
    return _compiled(tuple((name, type(module)) for name, module in layer.named_modules()), backend)


@cache
def _compiled(kind: tuple[tuple[str, type], ...], backend: Backend) -> Call:
    """For all layers that are put together alike, whichever stage, version or pipeline of this process they are of."""
    # torch keeps graphs by code object, only so many to each, and tries the latest first. So every kind has its own.
    name = f"call_{kind[0][1].__name__}"
    code = call_plainly.__code__.replace(co_name=name, co_qualname=name)
    call: Call = torch.compile(FunctionType(code, globals(), name), backend=backend, dynamic=False)
    return call
