"""From the end of a batch to its update: everything that has to be summed over stages.

Up to three messages pass, one after the other: gradients and loss, between the replicas of the stage; the gradients of
tied weights, between the stages that hold a copy; then one short vector from every stage to every stage, with the loss
and the squared gradient norm of every group. All stages add up the same numbers in the same order, so all of them clip
alike and all of them see an inf or a nan in the same step.

Where no update needs a sum over stages (pipedream and paci without clipping), none waits for one: the vector passes in
the background, and what the stages ask for and tell of their time is heeded some steps later, on all of them alike.

Where replicas share the optimizer, each gets the gradients of the parameters it owns and no others, and the vector is
summed over them first.
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
from ..transport.process import Waiting
from ..transport.streams import fetch
from .clock import Activity, TimeSplit
from .partition import Tied

NUM_PRODUCTS = 3
NUM_FACTS = 2 + len(Activity)
"""Utilisation, the peak of the memory, and the seconds of every activity."""


class Requests(NamedTuple):
    """What a process would like all of them to do, after the same update."""

    save: bool = False
    stop: bool = False
    busy: bool = False
    """Still at the checkpoint before: to save now, all or none must be free."""
    pause: bool = False
    """Leave off like for a stop, to go on at once in another shape."""


NUM_REQUESTS = len(Requests())


def num_sums(num_groups: int) -> int:
    """Numbers that are summed over stages: the loss, requests, products of updates and squared norms."""
    return 1 + NUM_REQUESTS + (NUM_PRODUCTS + 1) * num_groups


@dataclass(frozen=True)
class Sums:
    """What the stages together know of a batch."""

    loss: float
    utilisations: tuple[float, ...]
    """Per stage, nan where there is none yet."""
    memory: tuple[int, ...]
    """Per stage: the peak of what its device held, or its process, in bytes."""
    splits: tuple[TimeSplit, ...]
    squared_norms: tuple[float, ...]
    """Per group, over all stages."""
    products: tuple[tuple[float, ...], ...]
    """Per group: inner products of the two latest finished updates, see optim.correction."""
    non_finite: str | None
    """Where an inf or a nan was seen first, in words."""
    requests: Requests
    """What any stage of any replica asked for."""


@dataclass(frozen=True)
class Finished:
    """A stage's share of a finished batch."""

    gradients: dict[str, Tensor]
    loss: Tensor | None
    """The batch's loss, where it is known: on the last stage."""
    products: Tensor
    """(groups, 3): inner products of the latest updates, this stage's share."""
    utilisation: float
    memory: int
    """The peak until now, in bytes."""
    split: TimeSplit
    """Of the stage's time since its last batch."""
    requests: Requests
    """This stage's."""


class Later:
    """Gathers in the background, each taken `lag` steps after it was begun, by all stages alike: when it is asked for,
    it has long been there."""

    def __init__(self, background: Executor, lag: int) -> None:
        self._background, self._lag = background, lag
        self._under_way: deque[Future[list[Tensor]]] = deque()

    def exchange(self, gather: Callable[[], list[Tensor]]) -> list[Tensor] | None:
        """None: there is none of so many steps ago."""
        self._under_way.append(self._background.submit(gather))
        return self._under_way.popleft().result() if len(self._under_way) > self._lag else None

    def finish(self) -> None:
        """Waits for all that is under way: every stage has begun as many."""
        while self._under_way:
            self._under_way.popleft().result()


@dataclass(frozen=True)
class Reducer:
    transport: Transport
    group_names: Sequence[str]
    group_of: Mapping[str, int]
    """Parameter name to the index of its group."""
    tied: Mapping[str, Tied]
    """This stage's tied parameters."""
    is_global: bool
    """Sum over all stages; otherwise over this one alone, and the others hear of it later."""
    owners: Mapping[str, int] | None = None
    """Of every parameter, the replica that steps it; None: all do."""
    dtype: torch.dtype | None = None
    """That gradients of replicas are summed in, and those of tied weights exchanged in; None: that of the gradients."""
    later: Later | None = None
    """Where it is not global: how the others hear of it. None: they do not."""

    def reduce(self, finished: Finished, waiting: Waiting) -> Sums:
        """Adds the other holders' gradients to those of tied weights, in place, and returns the sums. Waits for the
        other stages to get there."""
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
        if self.later is None:
            return own
        vectors = self.later.exchange(lambda: self.transport.gather(vector, everyone).wait(waiting))
        if vectors is None:
            return replace(own, requests=Requests())
        told = self._add_up(vectors, everyone)
        return replace(
            own, requests=told.requests, utilisations=told.utilisations, memory=told.memory, splits=told.splits
        )

    def _is_own(self, name: str) -> bool:
        return self.owners is None or self.owners[name] == self.transport.replica

    def _add_replicas(self, finished: Finished, requests: Tensor, waiting: Waiting) -> None:
        """Leaves the gradients that are to be stepped here."""
        gradients = finished.gradients
        names = sorted(gradients)
        sums = [gradients[name] if self.dtype is None else gradients[name].to(self.dtype) for name in names]
        if self.owners is None:
            losses = [] if finished.loss is None else [finished.loss]
            self.transport.add_replicas([*sums, *losses, requests]).wait(waiting)
        else:  # the loss is summed with the vector
            self.transport.add_replicas(sums, [self.owners[name] for name in names]).wait(waiting)
        for name, total in zip(names, sums, strict=True):
            gradient = gradients.pop(name)
            if self._is_own(name):
                gradients[name] = total.to(gradient.dtype)

    def _vector(self, finished: Finished, requests: Tensor) -> Tensor:
        """[loss, requests..., products..., squared norms...]"""
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
    """What the squares of a gradient are added up in. On a GPU, where a sum is a tree, float32 is enough, and float64
    would cost a copy of the gradient in it."""
    return torch.promote_types(gradient.dtype, torch.float32) if gradient.is_cuda else torch.float64


def _total(column: Sequence[float]) -> float:
    return math.fsum(column) if all(map(math.isfinite, column)) else math.nan


def _as_numbers(requests: Requests, device: torch.device) -> Tensor:
    numbers = torch.zeros(len(requests), device=device)
    # Nearly always nothing is asked for: no reason to send that to a device.
    return torch.tensor(requests, device=device).to(numbers.dtype) if any(requests) else numbers
