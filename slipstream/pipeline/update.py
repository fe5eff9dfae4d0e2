"""Makes the updates of one stage: from the gradients of a finished batch to the next weight version.

    z[t+1] = (1 - lr wd) z[t] - u[t]          the optimizer's step on the masters
    x      = z[t+1] - lam d w[t]              the working copy, predicted d steps ahead (error feedback)

d is the number of updates after its own at which the version will be used: 1 for two_bw, 0 for a synchronous step. w[t]
is the expected next update: u[t] again, unless the optimizer has a better prediction (AdamW has).

Our own optimizers write x in the same pass that makes the update. For all other optimizers the working copies, if they
have the masters' dtype, hold z[t] while the optimizer steps, so that no update is ever stored. In a coarser dtype they
cannot hold it: then z[t] is kept temporarily, for a part of the parameters at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.stage_state import group_facts, restore_groups
from ..optim.correction import predict, update_products
from ..optim.groups import Group, assign
from ..optim.optimizer import PredictingOptimizer, View, split, whole
from .partition import Tied, canonical
from .reduction import NUM_PRODUCTS
from .weight_versions import WeightVersions

Pairs = list[tuple[Tensor, Tensor]]
"""The working copy and the master of every parameter of a part."""

PART_ELEMENTS = 2**26
"""Number of elements of z[t] that are kept at a time in mixed precision, unless a single parameter is larger. 256 MiB
in float32."""
SAMPLE_ELEMENTS = 2**16
"""Number of elements of each parameter's update that are kept in mixed precision, to compare the next update with."""


@dataclass(frozen=True)
class Part:
    """The parameters of one group that are stepped together, by one optimizer."""

    index: int
    """Index of the group."""
    group: Group
    masters: dict[str, nn.Parameter]
    """Masters of the parameters, by name."""
    optimizer: Optimizer
    base_rates: list[float]


def group_indices(
    parameters: Mapping[str, nn.Parameter], groups: Sequence[Group], tied: Mapping[str, Tied]
) -> dict[str, int]:
    """Returns the index of the group of every parameter, in the order of the groups."""
    names = {canonical(name, tied): name for name in parameters}
    assigned = assign([(alias, parameters[name]) for alias, name in names.items()], groups)
    return {names[alias]: index for index, (_, members) in enumerate(assigned) for alias, _ in members}


class Updater:
    """Steps the masters of one stage and writes its working copies."""

    def __init__(
        self,
        versions: WeightVersions,
        groups: Sequence[Group],
        tied: Mapping[str, Tied],
        learning_rate: Callable[[int], float],
        track_alignment: bool,
        device: torch.device,
    ) -> None:
        """`learning_rate` maps the index of an update to a factor of every optimizer's own rate."""
        self._versions, self._learning_rate = versions, learning_rate
        self.groups, self.tied = groups, tied
        self.group_of = group_indices(versions.parameters(0), groups, tied)
        """Index of the group of every parameter, owned or not."""
        owned = [name for name in self.group_of if name in versions.masters]
        self._parts: list[Part] = []
        for index, group in enumerate(groups):
            for names in self._partition(group, [name for name in owned if self.group_of[name] == index]):
                masters = {name: versions.masters[name] for name in names}
                optimizer = group.optimizer(list(masters.values()))
                base_rates = [param_group["lr"] for param_group in optimizer.param_groups]
                self._parts.append(Part(index, group, masters, optimizer, base_rates))
        self._track_alignment = track_alignment and versions.separate_masters
        self._last_coefficients: list[float | None] = [None] * len(groups)
        self._last_samples: dict[str, Tensor] = {}
        self.products = torch.zeros(len(groups), NUM_PRODUCTS, dtype=torch.float64, device=device)

    def _partition(self, group: Group, names: list[str]) -> Iterable[list[str]]:
        """Divides the parameters of a group into parts. All are in one part, unless z[t] has to be kept. Then
        parameters of the same shape are next to each other, for optimizers that stack them."""
        masters = self._versions.masters
        keeps = names and not isinstance(group.optimizer([masters[names[0]]]), PredictingOptimizer)
        if not (self._versions.is_mixed and group.error_feedback != 0 and keeps):
            return [names] if names else []
        by_shape = sorted(names, key=lambda name: tuple(masters[name].shape))
        return split(by_shape, lambda name: masters[name].numel(), PART_ELEMENTS)

    def optimizer_states(self) -> Iterator[tuple[str, Optimizer, nn.Parameter]]:
        """Yields for every parameter its name, the optimizer that has its state, and the key of the state, which is the
        master."""
        for part in self._parts:
            for name, master in part.masters.items():
                yield name, part.optimizer, master

    def facts(self) -> dict[str, Any]:
        """Returns the state that is not a tensor and does not belong to a single parameter."""
        coefficients = {part.group.name: self._last_coefficients[part.index] for part in self._parts}
        groups = {part.group.name: group_facts(part.optimizer) for part in self._parts}
        return {"coefficients": coefficients, "groups": groups}

    def samples(self) -> Mapping[str, Tensor]:
        return self._last_samples

    def restore(self, facts: Mapping[str, Any], samples: Mapping[str, Tensor]) -> None:
        for part in self._parts:
            self._last_coefficients[part.index] = facts["coefficients"].get(part.group.name)
            if (kept := facts["groups"].get(part.group.name)) is not None:
                restore_groups(part.optimizer, kept)
            for name, master in part.masters.items():
                if name in samples:
                    self._last_samples[name] = samples[name].to(master.device)

    @torch.no_grad()
    def apply(self, step: int, gradients: dict[str, Tensor], scales: Sequence[float], horizon: int) -> None:
        """Makes the next version. The caller then declares it the newest with `close_next`. `scales` holds the factor
        of every group's gradient from clipping. `horizon` is d above. The gradients are consumed."""
        target = self._versions.open_next()
        products = torch.zeros_like(self.products)
        for part in self._parts:
            for param_group, base in zip(part.optimizer.param_groups, part.base_rates, strict=True):
                param_group["lr"] = base * self._learning_rate(step)
            decay = 1 - part.optimizer.param_groups[0]["lr"] * part.group.weight_decay
            for name, master in part.masters.items():
                gradient = gradients.pop(name, None)
                if gradient is not None and scales[part.index] != 1:
                    gradient.mul_(scales[part.index])
                master.grad = None if gradient is None else gradient.to(master.dtype)
                if decay != 1:
                    master.mul_(decay)
            coefficient = part.group.error_feedback * horizon
            pairs: Pairs = [(target[name], master) for name, master in part.masters.items()]
            step_part = self._step_mixed if self._versions.is_mixed else self._step
            products[part.index] += step_part(part, pairs, coefficient, decay)
            for master in part.masters.values():
                master.grad = None
        self.products = products
        for part in self._parts:
            self._last_coefficients[part.index] = part.group.error_feedback * horizon

    def _step(self, part: Part, pairs: Pairs, coefficient: float, decay: float) -> Tensor:
        """Steps a part whose working copies have the masters' dtype. Returns the products of this update and the
        previous one."""
        predicts = self._versions.separate_masters and coefficient != 0
        if predicts and not self._track_alignment and isinstance(part.optimizer, PredictingOptimizer):
            part.optimizer.step_ahead({master: copy for copy, master in pairs}, coefficient)
            return torch.zeros_like(self.products[part.index])
        if predicts:
            for copy, master in pairs:
                copy.copy_(master)
        with torch.enable_grad():
            part.optimizer.step()
        products = torch.zeros_like(self.products[part.index])
        if self._track_alignment:
            products = self._products(part, pairs, coefficient, decay)
        if predicts:
            _predict(part, pairs, coefficient)
        elif self._versions.separate_masters:
            for copy, master in pairs:
                copy.copy_(master)
        return products

    def _step_mixed(self, part: Part, pairs: Pairs, coefficient: float, decay: float) -> Tensor:
        """Steps a part whose working copies have a coarser dtype, which cannot hold z[t]."""
        masters = list(part.masters.values())
        samples = {name: sample(master).clone() for name, master in part.masters.items() if self._track_alignment}
        if coefficient != 0 and isinstance(part.optimizer, PredictingOptimizer):
            part.optimizer.step_ahead({master: copy for copy, master in pairs}, coefficient)
            return self._sampled_products(part, samples, predicts=True)
        ahead: Sequence[Tensor] = masters if coefficient == 0 else [master.clone() for master in masters]
        with torch.enable_grad():
            part.optimizer.step()
        if coefficient != 0:
            predict(ahead, masters, coefficient)
        for (copy, _), weights in zip(pairs, ahead, strict=True):
            copy.copy_(weights)
        return self._sampled_products(part, samples, predicts=coefficient != 0)

    @torch.no_grad()
    def skip(self) -> None:
        """Makes the next version without an update: u = 0."""
        target = self._versions.open_next()
        if self._versions.separate_masters:
            for name, master in self._versions.masters.items():
                target[name].copy_(master)
        self.products = torch.zeros_like(self.products)
        self._last_coefficients = [None] * len(self._last_coefficients)
        self._last_samples.clear()

    def _products(self, part: Part, pairs: Pairs, coefficient: float, decay: float) -> Tensor:
        """Returns the inner products of this update and the expected one. They are computed from existing copies of the
        weights, so that no update is ever stored.

        With prediction, the working copy holds z[t], and the newest version is z[t] minus a multiple of w[t-1]. Without
        it, the update is compared with u[t-1]: the newest version is z[t], and the working copy, which is about to be
        overwritten, is z[t-1].
        """
        versions, last = self._versions, self._last_coefficients[part.index]
        newest = [versions.parameters(versions.newest)[name] for name in part.masters]
        copies = [copy for copy, _ in pairs]
        if coefficient != 0 and last:
            previous = ((copy / decay, ahead) for copy, ahead in zip(copies, newest, strict=True))
            return update_products(pairs, previous, previous_scale=1 / last)
        if coefficient == 0 and last == 0 and versions.num_versions == 2:
            current = ((ahead * decay, master) for ahead, (_, master) in zip(newest, pairs, strict=True))
            return update_products(current, zip(copies, newest, strict=True))
        return torch.zeros_like(self.products[part.index])

    def _sampled_products(self, part: Part, samples: Mapping[str, Tensor], predicts: bool) -> Tensor:
        """Returns the same products, estimated from a sample of every parameter. The sample has to be kept, because
        working copies in a coarse dtype do not contain the previous update accurately enough."""
        total = torch.zeros_like(self.products[part.index])
        expected_of = _expectation(part)
        for name, before in samples.items():
            master = part.masters[name]
            update = before - sample(master)
            if name in self._last_samples:
                u, v = update.double(), self._last_samples[name].double()
                total += torch.stack([u.dot(v), u.dot(u), v.dot(v)]) * (master.numel() / update.numel())
            expected = expected_of(master, sample) if predicts else None
            self._last_samples[name] = update if expected is None else expected
        return total


def _predict(part: Part, pairs: Pairs, coefficient: float) -> None:
    """Overwrites the working copies, which hold z[t], with x."""
    expected_of = _expectation(part)
    for copy, master in pairs:
        expected = expected_of(master, whole)
        if expected is None:
            predict([copy], [master], coefficient)
        else:
            torch.sub(master, expected, alpha=coefficient, out=copy)
        del expected  # free it before the next one is computed


def _expectation(part: Part) -> Callable[[Tensor, View], Tensor | None]:
    """Returns a function from a master and a view to the expected next update, or the viewed part of it. It returns
    None where the expected update is the one just made."""
    optimizer = part.optimizer
    if not isinstance(optimizer, PredictingOptimizer):
        return lambda master, view: None
    group_of = {master: group for group in optimizer.param_groups for master in group["params"]}
    return lambda master, view: optimizer.expected(master, group_of[master], view)


def sample(parameter: Tensor) -> Tensor:
    """Returns evenly spaced elements of a parameter, as a view."""
    return parameter.detach().flatten()[:: max(1, parameter.numel() // SAMPLE_ELEMENTS)]
