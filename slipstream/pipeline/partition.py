"""Layers to stages: contiguous cuts that keep every parameter's name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn


class PartitionError(ValueError):
    """A model that cannot be cut as asked."""


def partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """How many layers each stage gets, so that the most expensive stage is as cheap as contiguous cuts allow.

    Dynamic programming over (stages, layers): the best cut of the first j layers into k stages ends with some last
    stage i..j. Among equal bottlenecks the smaller sum of squares wins, which keeps the other stages even.
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
    """The stage's layers under their old names, so that every parameter keeps its own."""
    first = sum(sizes[:stage])
    layers = list(model.named_children())[first : first + sizes[stage]]
    return nn.Sequential(OrderedDict(layers))


@dataclass(frozen=True)
class Tied:
    """A weight that several stages hold a copy of."""

    name: str
    """Its name on the first of them, by which its parameter group is chosen on all."""
    stages: tuple[int, ...]


def tied_parameters(model: nn.Sequential, sizes: Sequence[int]) -> dict[str, Tied]:
    """The weights tied across stages, by every name they go by.

    Tying is what it is in one process: the same Parameter object in two layers. Each holder knows the parameter by the
    name it has there.
    """
    holders: dict[int, list[tuple[str, int]]] = {}
    for stage in range(len(sizes)):
        for name, parameter in cut(model, sizes, stage).named_parameters():
            holders.setdefault(id(parameter), []).append((name, stage))
    return {
        name: Tied(places[0][0], tuple(stage for _, stage in places))
        for places in holders.values()
        if len(places) > 1
        for name, _ in places
    }
