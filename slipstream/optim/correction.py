"""Implements error feedback: computes the weights for the next batch from the latest update of the master weights.

The correction is applied after the optimizer, to the finished update, so it works with every optimizer. The paper
(arXiv:2606.30634) corrects the delayed step with the previous update, which it has to store:

    x[t+1] = x[t] - u[t-1] - lam (u[t-1] - u[t-2])

This equals a prediction one step ahead of the undelayed iterate z, which needs no stored update:

    z[t+1] = z[t] - u[t]              u[t] built from the gradient at x[t]
    x[t+2] = z[t+1] - lam u[t]        written into the weight version that x[t] leaves free

The optimizers of this package may predict another update than the last one. They then write x themselves
(`PredictingOptimizer`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@torch.no_grad()
def predict(working: Sequence[Tensor], master: Sequence[Tensor], coefficient: float) -> None:
    """Turns z[t], held by `working`, into x = z[t+1] - coefficient * u[t], with z[t+1] in `master`.

    u[t] = z[t] - z[t+1], where z[t] is the master before the update but after weight decay, so that decay is never
    extrapolated. Both sides have the dtype of the master, because z[t] rounded to bf16 would lose the update. With
    coefficient 0, `working` becomes a copy of `master`.
    """
    for x, z in zip(working, master, strict=True):
        # lerp with a weight w >= 1/2 computes end - (end - start) (1 - w). With w = 1 + lam this is
        # x <- z[t+1] + lam (z[t+1] - z[t])
        x.lerp_(z, 1 + coefficient)


@torch.no_grad()
def update_products(
    current: Iterable[tuple[Tensor, Tensor]],
    previous: Iterable[tuple[Tensor, Tensor]],
    previous_scale: float = 1.0,
) -> Tensor:
    """Returns <u,u'>, <u,u> and <u',u'> of an update u and another update u', usually the one before: 3 float64 on the
    device.

    For every parameter, `current` and `previous` yield (before, after), and its update is before - after. That of
    `previous` is multiplied by a scale, so that u' can be computed from a predicted copy (x - z = -lam u'). Products of
    several stages can be added.
    Without parameters the result is zeros on the CPU. At most one parameter at a time is held in float64.
    """
    partial_products = []
    for (before, after), (previous_before, previous_after) in zip(current, previous, strict=True):
        u = _difference(before, after)
        v = _difference(previous_before, previous_after)
        partial_products.append(torch.stack([u.dot(v), u.dot(u), v.dot(v)]))
    if not partial_products:
        return torch.zeros(3, dtype=torch.float64)
    cross, own, other = torch.stack(partial_products).sum(dim=0).unbind()
    return torch.stack([cross * previous_scale, own, other * previous_scale**2])


def _difference(before: Tensor, after: Tensor) -> Tensor:
    """Returns before - after, flat and in float64, which keeps every digit of nearly equal bf16 or fp32 numbers."""
    return before.to(torch.float64, copy=True).sub_(after).flatten()


@dataclass(frozen=True)
class Alignment:
    """Measures how well the update u[t] was predicted by w[t-1]: the update that was expected, or u[t-1] if nothing
    else was expected."""

    cosine: float
    """Cosine between u[t] and w[t-1]. If w[t-1] is u[t-1], error feedback helps while this is above 1/2."""
    best_coefficient: float
    """Value of lam that would have predicted u[t] best: <u[t], w[t-1]> / |w[t-1]|^2."""

    @classmethod
    def from_products(cls, products: Sequence[float]) -> Alignment:
        """Computes the alignment from the sums of `update_products`. Values are nan if an update is zero."""
        cross, own, other = products
        lengths = math.sqrt(own) * math.sqrt(other)
        return cls(
            cosine=cross / lengths if lengths > 0 else math.nan,
            best_coefficient=cross / other if other > 0 else math.nan,
        )
