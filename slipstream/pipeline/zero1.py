"""Assigns parameters to replicas, if the replicas of a stage share its optimizer (ZeRO-1).

Every parameter has an owner among the replicas. Gradients are summed only to the owner. The owner keeps the master
weights and the optimizer state of what it owns, makes that part of the update, and sends the new working copies to the
other replicas, directly into the slot of the version that retires.
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
"""Number of rows or columns of a matrix at which its orthogonalisation takes about as long as an elementwise step. On
an H200, it needs 30 FLOPs per column for every element, against about 30 bytes of memory traffic."""


def assign_owners(
    parameters: Mapping[str, Tensor], elementwise: Mapping[str, bool], tied: Mapping[str, Tied], num_replicas: int
) -> dict[str, int]:
    """Returns the owner of every parameter. Whole parameters are assigned, the most expensive first, each to the
    replica with the least work. The result is the same on every replica.

    `elementwise` says for each parameter whether the optimizer treats every element independently. Replica 0 owns all
    tied weights: a tied weight must be stepped in the same way on all of its stages, and its gradients are exchanged
    between the stages of one replica.
    """
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
    """Copies every tensor from its owner to the other replicas, in place."""
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
    """Returns the masters of all parameters, from whichever replica owns them, converted to `dtypes`. If there are
    owners, all replicas must call it."""
    masters = {
        name: versions.masters[name].detach().to(dtypes[name])
        if name in versions.masters
        else torch.empty_like(parameter, dtype=dtypes[name], requires_grad=False)
        for name, parameter in versions.parameters(versions.newest).items()
    }
    if owners is not None:
        share(transport, owners, masters, waiting, aside)
    return masters
