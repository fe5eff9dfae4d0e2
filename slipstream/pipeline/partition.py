"""Assigns layers to stages, as contiguous cuts that keep the name of every parameter."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from torch import nn


class PartitionError(ValueError):
    """Raised when a model cannot be cut as requested."""


def partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """Returns the number of layers of each stage, such that the most expensive stage is as cheap as contiguous cuts
    allow.

    It uses dynamic programming over (stages, layers): the best cut of the first j layers into k stages ends with some
    last stage i..j. Among equal bottlenecks the smaller sum of squares wins, which keeps the other stages even.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise PartitionError(f"{num_stages} stages cannot share {num_layers} layers: use 1 to {num_layers} stages")
    before = [0.0, *accumulate(costs)]
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for stage in range(1, num_stages + 1):
        row = {}
        for end in range(stage, num_layers + 1):
            options = []
            for start, (bottleneck, squares, _) in best[-1].items():
                if start < end:
                    cost = before[end] - before[start]
                    options.append((max(bottleneck, cost), squares + cost * cost, start))
            row[end] = min(options)
        best.append(row)
    sizes, end = [], num_layers
    for row in reversed(best[1:]):
        start = row[end][2]
        sizes.append(end - start)
        end = start
    return sizes[::-1]


def check_sizes(sizes: Sequence[int], num_layers: int, num_stages: int) -> None:
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise PartitionError(
            f"layers_per_stage = {list(sizes)} does not cut {num_layers} layers into {num_stages} stages: "
            f"give {num_stages} positive counts that add up to {num_layers}"
        )


def cut(model: nn.Sequential, sizes: Sequence[int], stage: int) -> nn.Sequential:
    """Returns the layers of a stage under their old names, so that every parameter keeps its name."""
    first = sum(sizes[:stage])
    layers = list(model.named_children())[first : first + sizes[stage]]
    return nn.Sequential(OrderedDict(layers))


def own_layers(layers: nn.Sequential, is_given_to_others: bool) -> nn.Sequential:
    """Returns the layers, or a copy of them if other stages or replicas have the same tensors: a model that is given to
    threads, or that multiprocessing has put into shared memory. Each of them would otherwise update the tensors of
    all."""
    tensors = chain(layers.parameters(), layers.buffers())
    is_shared = is_given_to_others or any(not tensor.is_meta and tensor.is_shared() for tensor in tensors)
    return copy.deepcopy(layers) if is_shared else layers


@dataclass(frozen=True)
class Tied:
    """A weight of which several stages hold a copy."""

    name: str
    """Name of the weight on the first of the stages. It selects the parameter group on all of them."""
    stages: tuple[int, ...]
    is_frozen: bool = False
    """Whether it is never updated. Then its copies are made equal at the start, and nothing else is sent."""


def canonical(name: str, tied: Mapping[str, Tied]) -> str:
    """Returns the name of a parameter in parameter groups and in the state, which is the same on all its stages."""
    return tied[name].name if name in tied else name


def tied_parameters(model: nn.Sequential, sizes: Sequence[int]) -> dict[str, Tied]:
    """Returns the weights that are tied across stages, by every name they have.

    A weight is tied as in one process: the same Parameter object is in two layers. On each stage the parameter has the
    name of its layer there.
    """
    holders: dict[int, list[tuple[str, int]]] = {}
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    for stage in range(len(sizes)):
        for name, parameter in cut(model, sizes, stage).named_parameters():
            holders.setdefault(id(parameter), []).append((name, stage))
    return {
        name: Tied(places[0][0], tuple(stage for _, stage in places), key in frozen)
        for key, places in holders.items()
        if len(places) > 1
        for name, _ in places
    }


def tied_names(module: nn.Module) -> list[list[str]]:
    """Returns the names of every parameter that has several within the module."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def first_trained_stage(model: nn.Sequential, sizes: Sequence[int]) -> int:
    """Returns the first stage that has a parameter to train. No gradient is needed before it."""
    for stage in range(len(sizes)):
        if trainable(cut(model, sizes, stage)):
            return stage
    raise ValueError("all parameters are frozen, so there is nothing to train: set requires_grad for some")
