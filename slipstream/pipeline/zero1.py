"""Who steps what, where the replicas of a stage share its optimizer (ZeRO-1).

Every parameter has an owner among the replicas. Gradients are summed to the owner alone, which keeps master weights and
optimizer state of what it owns, makes that part of the update, and hands the new working copies to the others: straight
into the slot of the version that retires.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..transport.base import Transport
from ..transport.link import Waiting
from .partition import Tied
from .weight_versions import WeightVersions

COLUMNS_OF_A_READ = 128
"""A step that orthogonalises takes about as long for a matrix of so many rows or columns as one that works number by
number: on an H200, 30 FLOPs a column for every number against some 30 bytes of memory traffic."""


def assign_owners(
    parameters: Mapping[str, Tensor], elementwise: Mapping[str, bool], tied: Mapping[str, Tied], num_replicas: int
) -> dict[str, int]:
    """Whole parameters, the dearest first, each to the replica that has least to do. The same on every replica.

    elementwise: whether the optimizer treats every number of a parameter alone. A tied weight is stepped alike on all
    of its stages, from gradients that meet between the stages of one replica: of the first."""
    costs = {name: _cost(parameter, elementwise[name]) for name, parameter in parameters.items()}
    owners = {name: 0 for name in parameters if name in tied}
    loads = [0.0] * num_replicas
    loads[0] = sum(costs[name] for name in owners)
    for name in sorted(costs.keys() - owners.keys(), key=lambda name: (-costs[name], name)):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += costs[name]
    return owners


def _cost(parameter: Tensor, is_elementwise: bool) -> float:
    if is_elementwise or parameter.ndim < 2:
        return parameter.numel()
    return parameter.numel() * (1 + min(parameter.shape[-2:]) / COLUMNS_OF_A_READ)


def share(
    transport: Transport,
    owners: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    waiting: Waiting,
    aside: bool = False,
) -> None:
    """Everybody gets what the owners have, in place."""
    names = sorted(tensors)
    values = [tensors[name].detach() for name in names]
    transport.share(values, [owners[name] for name in names], aside).wait(waiting)


def gather_masters(
    transport: Transport,
    owners: Mapping[str, int] | None,
    versions: WeightVersions,
    dtypes: Mapping[str, torch.dtype],
    waiting: Waiting,
    aside: bool = False,
) -> dict[str, Tensor]:
    """The masters of all parameters, whoever owns them, rounded to `dtypes`. Where owners are, all replicas call it."""
    masters = {
        name: versions.masters[name].detach().to(dtypes[name])
        if name in versions.masters
        else torch.empty_like(parameter, dtype=dtypes[name], requires_grad=False)
        for name, parameter in versions.parameters(versions.newest).items()
    }
    if owners is not None:
        share(transport, owners, masters, waiting, aside)
    return masters
