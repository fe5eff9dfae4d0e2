"""From the end of a batch to its update's deadline: everything that has to be summed over stages.

A finished batch starts a reduction and the stage goes on computing. Two messages pass, one after the other: the gradients
of tied weights, between the stages that hold a copy; then one short vector from every stage to every stage, with the loss
and the squared gradient norm of every group. All stages add up the same numbers in the same order, so all of them clip
alike and all of them see an inf or a nan in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .comm import Gathering, Transport, Waiting

NUM_PRODUCTS = 3


@dataclass(frozen=True)
class Sums:
    """What the stages together know of a batch."""

    loss: float
    squared_norms: tuple[float, ...]
    """Per group, over all stages."""
    products: tuple[tuple[float, ...], ...]
    """Per group: inner products of the two latest finished updates, see optim.correction."""
    non_finite: str | None
    """Where an inf or a nan was seen first, in words."""


@dataclass
class Reduction:
    transport: Transport
    group_names: Sequence[str]
    group_of: Mapping[str, int]
    """Parameter name to the index of its group."""
    tied: Mapping[str, tuple[int, ...]]
    """Names of this stage's tied parameters, to all the stages that hold a copy."""
    gradients: dict[str, Tensor]
    loss: Tensor | None
    """The batch's loss, where it is known: on the last stage."""
    products: Tensor
    """(groups, 3): inner products of the latest updates, this stage's share."""
    is_global: bool
    """Wait for the other stages; otherwise the sums are this stage's own."""
    _tied: list[tuple[str, Gathering]] = field(default_factory=list)
    _copied: tuple[Tensor, torch.cuda.Event | None] | None = None
    _sums: Gathering | None = None

    def __post_init__(self) -> None:
        for name, stages in self.tied.items():
            self._tied.append((name, self.transport.gather(self.gradients[name].clone(), stages)))
        self.poll()

    def poll(self) -> None:
        """Goes as far as it can without waiting: called between actions."""
        if self._copied is None and all(gathering.is_done() for _, gathering in self._tied):
            self._add_tied(lambda: "")
            self._copy_vector()
        if self._copied is not None and self._sums is None and self.is_global:
            vector, event = self._copied
            if event is None or event.query():
                self._sums = self.transport.gather(vector, tuple(range(self.transport.num_stages)))

    def finish(self, waiting: Waiting) -> Sums:
        """Waits for whatever is still under way."""
        if self._copied is None:
            self._add_tied(waiting)
            self._copy_vector()
        assert self._copied is not None
        vector, event = self._copied
        if event is not None:
            event.synchronize()  # of the norm alone: work enqueued since runs on
        if not self.is_global:
            return self._add_up([vector], [self.transport.stage])
        self.poll()
        assert self._sums is not None
        return self._add_up(self._sums.wait(waiting), range(self.transport.num_stages))

    def _add_tied(self, waiting: Waiting) -> None:
        for name, gathering in self._tied:
            first, *others = gathering.wait(waiting)
            total = first.clone()
            for other in others:
                total += other
            self.gradients[name] = total
        self._tied = []

    def _copy_vector(self) -> None:
        """[loss, products..., squared norms...] on its way to the host, without waiting for the device."""
        device = self.products.device
        squares = torch.zeros(len(self.group_names), dtype=torch.float64, device=device)
        for name, gradient in self.gradients.items():
            if self.transport.stage == self.tied.get(name, (self.transport.stage,))[0]:  # tied weights count once
                squares[self.group_of[name]] += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        loss = torch.zeros(1, dtype=torch.float64, device=device)
        if self.loss is not None:
            loss += self.loss
        vector = torch.cat([loss, self.products.flatten(), squares])
        if device.type == "cuda":
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copied = host, event
        else:
            self._copied = vector, None

    def _add_up(self, vectors: Sequence[Tensor], stages: Sequence[int]) -> Sums:
        rows = [vector.tolist() for vector in vectors]
        num_groups = len(self.group_names)
        non_finite = None
        for stage, row in zip(stages, rows, strict=True):
            if not math.isfinite(row[0]):
                non_finite = non_finite or f"the loss is {row[0]}"
            for name, square in zip(self.group_names, row[-num_groups:], strict=True):
                if not math.isfinite(square):
                    non_finite = non_finite or f"the gradient of group {name!r} on stage {stage} is {square}"
        totals = [math.fsum(column) if all(map(math.isfinite, column)) else math.nan for column in zip(*rows, strict=True)]
        products = totals[1 : 1 + NUM_PRODUCTS * num_groups]
        return Sums(
            loss=totals[0],
            squared_norms=tuple(totals[-num_groups:]),
            products=tuple(
                tuple(products[NUM_PRODUCTS * i : NUM_PRODUCTS * (i + 1)]) for i in range(num_groups)
            ),
            non_finite=non_finite,
        )
