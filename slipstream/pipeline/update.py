"""One stage's update: gradients of a finished batch in, the next weight version out.

    z[t+1] = (1 - lr wd) z[t] - u[t]          the optimizer's step on the masters
    x      = z[t+1] - lam d u[t]              the working copy, predicted d steps ahead (error feedback)

d is how many updates later than its own the version will be used: 1 for two_bw, 0 for a synchronous step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim.correction import predict, update_products
from ..optim.groups import Group, assign
from .partition import Tied
from .reduction import NUM_PRODUCTS
from .versions import WeightVersions

Pairs = Iterable[tuple[Tensor, Tensor]]


class Updater:
    def __init__(
        self,
        versions: WeightVersions,
        groups: Sequence[Group],
        tied: Mapping[str, Tied],
        learning_rate: Callable[[int], float],
        track_alignment: bool,
        device: torch.device,
    ) -> None:
        """learning_rate: multiplies every optimizer's own rate, by the index of the update."""
        self._versions, self._learning_rate = versions, learning_rate
        aliases = {tied[name].name if name in tied else name: name for name in versions.masters}
        assigned = assign([(alias, versions.masters[name]) for alias, name in aliases.items()], groups)
        self._groups = [(group, [(aliases[alias], p) for alias, p in members]) for group, members in assigned]
        self.group_of = {name: i for i, (_, members) in enumerate(self._groups) for name, _ in members}
        self.optimizers: list[Optimizer | None] = [
            group.optimizer([p for _, p in members]) if members else None for group, members in self._groups
        ]
        self._base_rates = [
            [param_group["lr"] for param_group in optimizer.param_groups] if optimizer else []
            for optimizer in self.optimizers
        ]
        self._track_alignment = track_alignment and versions.separate_masters
        self._last_coefficients: list[float | None] = [None] * len(groups)
        self.products = torch.zeros(len(groups), NUM_PRODUCTS, dtype=torch.float64, device=device)

    def learning_rates(self, step: int) -> dict[str, float]:
        """By group, where the stage holds any of its parameters."""
        return {
            group.name: rates[0] * self._learning_rate(step)
            for (group, _), rates in zip(self._groups, self._base_rates, strict=True)
            if rates
        }

    @torch.no_grad()
    def apply(self, step: int, gradients: Mapping[str, Tensor], scales: Sequence[float], horizon: int) -> None:
        """Makes the next version, which whoever keeps the versions then declares the newest. scales: what clipping
        leaves of every group's gradient."""
        target = self._versions.open_next()
        self.products = torch.zeros_like(self.products)
        for index, (group, members) in enumerate(self._groups):
            optimizer = self.optimizers[index]
            if optimizer is None:
                continue
            for param_group, base in zip(optimizer.param_groups, self._base_rates[index], strict=True):
                param_group["lr"] = base * self._learning_rate(step)
            decay = 1 - optimizer.param_groups[0]["lr"] * group.weight_decay
            coefficient = group.error_feedback * horizon
            masters = [master for _, master in members]
            working = [target[name] for name, _ in members]

            for name, master in members:
                if scales[index] != 1 and name in gradients:
                    gradients[name].mul_(scales[index])
                master.grad = gradients.get(name)
                if decay != 1:
                    master.mul_(decay)
            if self._versions.separate_masters and coefficient != 0:
                for copy, master in zip(working, masters, strict=True):
                    copy.copy_(master)
            with torch.enable_grad():
                optimizer.step()
            if self._versions.separate_masters:
                if self._track_alignment:
                    self.products[index] = self._products(index, members, target, coefficient, decay)
                if coefficient != 0:
                    predict(working, masters, coefficient)
                else:
                    for copy, master in zip(working, masters, strict=True):
                        copy.copy_(master)
            self._last_coefficients[index] = coefficient
            for master in masters:
                master.grad = None

    @torch.no_grad()
    def skip(self) -> None:
        """The next version is the one before it: u = 0."""
        target = self._versions.open_next()
        if self._versions.separate_masters:
            for name, master in self._versions.masters.items():
                target[name].copy_(master)
        self.products = torch.zeros_like(self.products)
        self._last_coefficients = [None] * len(self._last_coefficients)

    def _products(
        self,
        index: int,
        members: Sequence[tuple[str, nn.Parameter]],
        target: Mapping[str, nn.Parameter],
        coefficient: float,
        decay: float,
    ) -> Tensor:
        """Inner products of this update and the one before, from the copies at hand: no update is ever stored.

        With prediction the target holds z[t] and the newest working copy is z[t] minus a multiple of u[t-1]. Without,
        the newest working copy is z[t] and the target, about to be overwritten, is z[t-1].
        """
        newest = self._versions.parameters(self._versions.newest)
        last = self._last_coefficients[index]
        if coefficient != 0 and last:
            current: Pairs = ((target[name], master) for name, master in members)
            previous: Pairs = ((target[name] / decay, newest[name]) for name, _ in members)
            return update_products(current, previous, previous_scale=1 / last)
        if coefficient == 0 and last == 0 and self._versions.num_versions == 2:
            current = ((newest[name] * decay, master) for name, master in members)
            previous = ((target[name], newest[name]) for name, _ in members)
            return update_products(current, previous)
        return torch.zeros_like(self.products[index])
