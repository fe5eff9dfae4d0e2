"""The weight versions a stage keeps, and the masters its optimizer owns.

Version v lives in slot v % n: n replicas of the stage's module, each with leaf parameters of its own and buffers
shared. A microbatch runs forward and backward in one replica, so no weight is copied, swapped or recomputed per
microbatch; and writing into a replica whose graph is still alive makes autograd raise instead of returning a wrong
gradient.

The masters (z in docs/method.md) are the weights the optimizer steps. Three arrangements, by what the schedule needs:

    one version            the masters are the replica's own parameters
    several, no prediction the masters move to the slot of the version being written: n copies in all
    several, prediction    the masters are a replica of their own, n + 1 copies: the working copies run ahead of them
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain

import torch
from torch import nn


class WeightVersions:
    def __init__(
        self, module: nn.Module, num_versions: int, separate_masters: bool = False, drifting: bool = False
    ) -> None:
        """drifting: the only version is overwritten while microbatches are in flight, and their backwards read the
        new weights (PACI). The masters then write through aliases that autograd does not watch."""
        shared = {id(t): t for t in chain(module.buffers(), module.parameters()) if not t.requires_grad}

        def replicate() -> nn.Module:
            return copy.deepcopy(module, dict(shared))

        self.newest = 0
        self.separate_masters = separate_masters and num_versions > 1
        self._slots = [module, *(replicate() for _ in range(num_versions - 1))]
        self._parameters = [_trainable(slot) for slot in self._slots]
        self._master_module = replicate() if self.separate_masters else None
        if self._master_module is not None:
            self.masters = _trainable(self._master_module)
        elif num_versions == 1 and not drifting:
            self.masters = self._parameters[0]
        else:
            self.masters = {name: nn.Parameter(p.data) for name, p in self._parameters[0].items()}

    @property
    def num_versions(self) -> int:
        return len(self._slots)

    def module(self, version: int) -> nn.Module:
        if not self.newest - self.num_versions < version <= self.newest:
            raise RuntimeError(f"version {version} is not kept: the newest of {self.num_versions} is {self.newest}")
        return self._slots[version % self.num_versions]

    def parameters(self, version: int) -> Mapping[str, nn.Parameter]:
        return self._parameters[version % self.num_versions]

    def master_module(self) -> nn.Module:
        """The module that computes with the masters: what is evaluated and exported."""
        return self._master_module or self._slots[self.newest % self.num_versions]

    def take_gradients(self, version: int) -> dict[str, torch.Tensor]:
        """Hands over the gradient accumulated in a version, so that the next batch there starts from nothing."""
        gradients = {name: p.grad for name, p in self.parameters(version).items() if p.grad is not None}
        for parameter in self.parameters(version).values():
            parameter.grad = None
        return gradients

    def open_next(self) -> Mapping[str, nn.Parameter]:
        """Begins the version after the newest, in the slot that retires, and returns that slot's parameters.

        Where the masters live in the slots, they move there first."""
        target = self.parameters(self.newest + 1)
        if self.num_versions > 1 and not self.separate_masters:
            self._copy(self.parameters(self.newest), target)
            for name, master in self.masters.items():
                master.data = target[name].data
        return target

    def close_next(self) -> None:
        self.newest += 1

    @staticmethod
    @torch.no_grad()
    def _copy(source: Mapping[str, nn.Parameter], target: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in target.items():
            parameter.copy_(source[name])


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
