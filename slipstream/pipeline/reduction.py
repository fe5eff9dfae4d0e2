"""Computes everything that is summed over stages and replicas between the end of a batch and its update.

Up to three messages are exchanged, one after the other: gradients and loss, between the replicas of the stage; the
gradients of tied weights, between the stages that hold a copy; then one short vector from every stage to every stage,
with the loss and the squared gradient norm of every group. All stages add up the same numbers in the same order. So all
of them clip in the same way, and all of them see an inf or a nan in the same step.

Where no update needs a sum over stages (pipedream and paci without clipping), no update waits for one. The vector is
exchanged in the background. Requests then take effect some steps later, on all stages in the same step, and the times
of the other stages are reported some steps later.

If replicas share the optimizer, each gets only the gradients of the parameters that it owns, and the vector is summed
over the replicas first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..transport.base import Transport
from ..transport.link import Waiting
from ..transport.streams import fetch
from .clock import Activity, TimeSplit
from .partition import Tied

NUM_PRODUCTS = 3
NUM_FACTS = 2 + len(Activity)
"""Number of facts of a stage: its utilisation, its peak memory, and the seconds of every activity."""


class Requests(NamedTuple):
    """Requests of one process to all processes. They take effect after the same update everywhere."""

    save: bool = False
    stop: bool = False
    busy: bool = False
    """Whether this process is still writing the previous checkpoint. A checkpoint needs all processes: if one is busy,
    none saves."""
    pause: bool = False
    """Whether to end the run as for a stop, and then to resume at once in another layout."""


NUM_REQUESTS = len(Requests())


def num_sums(num_groups: int) -> int:
    """Returns the number of values that are summed over stages: the loss, requests, products of updates and squared
    norms."""
    return 1 + NUM_REQUESTS + (NUM_PRODUCTS + 1) * num_groups


@dataclass(frozen=True)
class Sums:
    """The results of a batch, combined over all stages."""

    loss: float
    utilisations: tuple[float, ...]
    """Utilisation of each stage. nan means that there is none yet."""
    memory: tuple[int, ...]
    """Peak memory of each stage's device or process, in bytes."""
    splits: tuple[TimeSplit, ...]
    squared_norms: tuple[float, ...]
    """Squared gradient norm of each group, over all stages."""
    products: tuple[tuple[float, ...], ...]
    """Inner products of the two latest finished updates, for each group (see optim.correction)."""
    non_finite: str | None
    """Description of the first inf or nan. None means that there is none."""
    requests: Requests
    """Requests of any stage of any replica."""


@dataclass(frozen=True)
class Finished:
    """The contribution of one stage to the sums of a finished batch."""

    gradients: dict[str, Tensor]
    loss: Tensor | None
    """Loss of the batch. It is known on the last stage and None on the others."""
    products: Tensor
    """Inner products of the latest updates, this stage's share, with shape (groups, 3)."""
    utilisation: float
    memory: int
    """Peak memory until now, in bytes."""
    split: TimeSplit
    """Times of the stage since the end of its previous batch."""
    requests: Requests
    """Requests of this stage."""


class Later:
    """Gathers that run in the background. The result of each is taken `lag` steps after its start, on all stages alike.
    By then it has usually been complete for a long time."""

    def __init__(self, background: Executor, lag: int) -> None:
        self._background, self._lag = background, lag
        self._under_way: deque[Future[list[Tensor]]] = deque()

    def exchange(self, gather: Callable[[], list[Tensor]]) -> list[Tensor] | None:
        """Starts a gather and returns the result of the one that was started `lag` steps ago. None means that there is
        none yet."""
        self._under_way.append(self._background.submit(gather))
        return self._under_way.popleft().result() if len(self._under_way) > self._lag else None

    def finish(self) -> None:
        """Waits for all gathers in progress. Every stage has started the same number of them, so all of them
        complete."""
        while self._under_way:
            self._under_way.popleft().result()


@dataclass(frozen=True)
class Reducer:
    """Sums the results of a finished batch over replicas and stages."""

    transport: Transport
    group_names: Sequence[str]
    group_of: Mapping[str, int]
    """Index of the group of every parameter, by name."""
    tied: Mapping[str, Tied]
    """Tied parameters of this stage, by name."""
    is_global: bool
    """Whether to sum over all stages before the update. If not, the sums are those of this stage alone, and the other
    stages get them later."""
    owners: Mapping[str, int] | None = None
    """Replica that steps each parameter. None means that all replicas do."""
    dtype: torch.dtype | None = None
    """Dtype in which gradients are summed over replicas and gradients of tied weights are exchanged. None means that of
    the gradients."""
    later: Later | None = None
    """Background gathers, used if the reduction is not global. None means that the other stages do not get the sums."""

    def reduce(self, finished: Finished, waiting: Waiting) -> Sums:
        """Replaces the gradients in `finished` by their sums over replicas and over the holders of tied weights, and
        returns the other sums. Waits for the other replicas and stages."""
        stage, num_stages = self.transport.stage, self.transport.num_stages
        requests = _as_numbers(finished.requests, finished.products.device)
        if self.transport.num_replicas > 1:
            self._add_replicas(finished, requests, waiting)
        for name, tied in self.tied.items():
            if self._is_own(name):
                gradient = finished.gradients[name] = finished.gradients[name].contiguous()
                self.transport.add_stages(gradient, tied.stages, waiting, self.dtype)
        sums = self._vector(finished, requests)
        if self.owners is not None:
            self.transport.add_replicas([sums]).wait(waiting)
        facts = torch.tensor([finished.utilisation, finished.memory, *finished.split], dtype=torch.float64)
        vector = torch.cat([facts, fetch(sums, stage, self.transport.timeout_seconds, waiting)])
        everyone = tuple(range(num_stages))
        if self.is_global:
            return self._add_up(self.transport.gather(vector, everyone).wait(waiting), everyone)
        own = self._add_up([vector], [stage])
        vectors = None
        if self.later is not None:
            vectors = self.later.exchange(lambda: self.transport.gather(vector, everyone).wait(waiting))
        told = self._add_up(vectors or self._without_others(vector), everyone)
        return replace(
            own,
            requests=told.requests if vectors else Requests(),
            utilisations=told.utilisations,
            memory=told.memory,
            splits=told.splits,
        )

    def _without_others(self, vector: Tensor) -> list[Tensor]:
        """Returns the vectors of all stages when only that of this stage is known: no utilisation, and zeros."""
        unknown = torch.zeros_like(vector)
        unknown[0] = math.nan
        return [vector if stage == self.transport.stage else unknown for stage in range(self.transport.num_stages)]

    def _is_own(self, name: str) -> bool:
        return self.owners is None or self.owners[name] == self.transport.replica

    def _add_replicas(self, finished: Finished, requests: Tensor, waiting: Waiting) -> None:
        """Sums over replicas. Only the gradients that this replica steps remain."""
        gradients = finished.gradients
        names = sorted(gradients)
        sums = [gradients[name] if self.dtype is None else gradients[name].to(self.dtype) for name in names]
        if self.owners is None:
            losses = [] if finished.loss is None else [finished.loss]
            self.transport.add_replicas([*sums, *losses, requests]).wait(waiting)
        else:  # the loss is summed later, with the vector
            self.transport.add_replicas(sums, [self.owners[name] for name in names]).wait(waiting)
        for name, total in zip(names, sums, strict=True):
            gradient = gradients.pop(name)
            if self._is_own(name):
                gradients[name] = total.to(gradient.dtype)

    def _vector(self, finished: Finished, requests: Tensor) -> Tensor:
        """Returns the vector [loss, requests..., products..., squared norms...]."""
        device = finished.products.device
        squares = [torch.zeros((), dtype=torch.float64, device=device) for _ in self.group_names]
        for name, gradient in finished.gradients.items():
            if name not in self.tied or self.transport.stage == self.tied[name].stages[0]:  # tied weights count once
                group = self.group_of[name]
                norm = torch.linalg.vector_norm(gradient, dtype=norm_dtype(gradient))
                squares[group] = squares[group] + norm.to(torch.float64).square()
        loss = squares[0].new_zeros(()) if finished.loss is None else finished.loss.to(torch.float64)
        return torch.cat(
            [loss.reshape(1), requests.to(torch.float64), finished.products.flatten(), torch.stack(squares)]
        )

    def _add_up(self, vectors: Sequence[Tensor], stages: Sequence[int]) -> Sums:
        facts, rows = zip(*((row[:NUM_FACTS], row[NUM_FACTS:]) for row in map(Tensor.tolist, vectors)), strict=True)
        num_groups = len(self.group_names)
        non_finite = None
        for stage, row in zip(stages, rows, strict=True):
            if not math.isfinite(row[0]):
                non_finite = non_finite or f"the loss is {row[0]}"
            for name, square in zip(self.group_names, row[-num_groups:], strict=True):
                if not math.isfinite(square):
                    non_finite = non_finite or f"the gradient of group {name!r} on stage {stage} is {square}"
        totals = [_total(column) for column in zip(*rows, strict=True)]
        products = totals[1 + NUM_REQUESTS : -num_groups]
        return Sums(
            loss=totals[0],
            utilisations=tuple(utilisation for utilisation, *_ in facts),
            memory=tuple(int(memory) for _, memory, *_ in facts),
            splits=tuple(TimeSplit(*split) for _, _, *split in facts),
            squared_norms=tuple(totals[-num_groups:]),
            products=tuple(tuple(products[NUM_PRODUCTS * i : NUM_PRODUCTS * (i + 1)]) for i in range(num_groups)),
            non_finite=non_finite,
            requests=Requests(*(total > 0 for total in totals[1 : 1 + NUM_REQUESTS])),
        )


def norm_dtype(gradient: Tensor) -> torch.dtype:
    """Returns the dtype in which the squares of a gradient are added up. On a GPU, where a sum is a tree, float32 is
    accurate enough, and float64 would need a copy of the gradient in float64."""
    return torch.promote_types(gradient.dtype, torch.float32) if gradient.is_cuda else torch.float64


def _total(column: Sequence[float]) -> float:
    return math.fsum(column) if all(map(math.isfinite, column)) else math.nan


def _as_numbers(requests: Requests, device: torch.device) -> Tensor:
    numbers = torch.zeros(len(requests), device=device)
    # Usually nothing is requested. Then nothing needs to be sent to a device.
    return torch.tensor(requests, device=device).to(numbers.dtype) if any(requests) else numbers
