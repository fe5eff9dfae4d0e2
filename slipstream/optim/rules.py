"""The update rules: functions from a gradient and the state of the rule to the complete update.

Every rule returns u such that new = old - u. The learning rate is part of u, decoupled weight decay is not. A rule
writes its own state and nothing else. It never writes the gradient, which with delay may still be in use elsewhere, nor
a parameter.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .kernels import halves_products, symmetric_product

SCALES = ("spectral", "match_rms_adamw")
NS_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
WIDE = 2
"""Smallest ratio of columns to rows for which several steps of Newton-Schulz at once need fewer FLOPs."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
"""Norm of a matrix below which Newton-Schulz treats it as noise."""
AT_ONCE = 3
"""Number of steps that are made at once; see `_iterate_in_bf16`."""


def newton_schulz(
    matrices: Tensor,  # (rows, cols) or (n, rows, cols)
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    may_overwrite: bool = False,  # `matrices`; in bf16 its memory replaces a temporary
) -> Tensor:
    """Orthogonalises each matrix separately: U S V^T becomes about scale U V^T.

    This is Keller Jordan's quintic iteration (https://kellerjordan.github.io/posts/muon). Its coefficients are chosen
    for the steepest slope at zero, not for convergence. Singular values end between 0.68 and 1.21; those that are tiny
    relative to the norm of the matrix end below. `dtype` is that of the iteration; the result has the dtype of
    `matrices`. In bf16, a gradient that was summed in another order changes the result by 4e-3, so schedules can be
    compared only in fp32 or fp64. A matrix whose norm is below EPS is treated as noise: its result becomes smaller
    with it.
    """
    if matrices.ndim not in (2, 3):
        raise ValueError(
            f"a tensor of shape {tuple(matrices.shape)} is no matrix: pass (rows, cols) or (n, rows, cols)"
        )
    if steps < 1:
        raise ValueError(f"steps is {steps}: use at least 1 Newton-Schulz step")
    rows, cols = matrices.shape[-2:]
    X = matrices.to(dtype).reshape(-1, rows, cols)
    if dtype == torch.bfloat16:
        is_free = may_overwrite or matrices.dtype != dtype  # in the second case X is a copy
        X = _iterate_in_bf16(X, steps, scale, is_free and X.is_contiguous())
    else:
        X = _iterate(X, steps)
        if scale != 1:
            X = X.mul_(scale)
    return X.reshape(matrices.shape).to(matrices.dtype)


def _iterate(X: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    # The Gram matrix X X^T is the smaller one only if X is wide.
    is_tall = X.shape[1] > X.shape[2]
    if is_tall:
        X = X.mT
    # X <- X / |X|_F, which bounds every singular value by 1
    X = X / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        # X <- a X + (b A + c A A) X with A = X X^T
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if is_tall else X


def _iterate_in_bf16(X: Tensor, steps: int, scale: float, may_overwrite: bool) -> Tensor:
    """Makes the same iteration as `_iterate`, but faster. Only the products themselves read or write anything as large
    as X, and the norm of X reads it once.

    a X + (b A + c A A) X is computed as one product with B = a I + b A + c A A, because adding X to a product copies X
    first. The small matrices are divided by the norm instead of X. The last step also multiplies by `scale`. If X is
    tall, the last step multiplies from the other side, so that the result has the same memory layout as X.

    For a wide X, several steps are made at once. The Gram matrix of B X is B A B = A B B, because A and B commute, so
    the next polynomial needs no product of the size of X. Rounding errors in a small eigenvalue of A are multiplied by
    a^2 = 12 in every step that does not use X again. Therefore Gram matrices are stored in float16, which rounds eight
    times as finely as bf16. Because float16 has a narrow range, the first Gram matrix, whose trace is 1, is multiplied
    by its number of rows.
    """
    room = X.view(-1) if may_overwrite else None
    is_tall = X.shape[1] > X.shape[2]
    if is_tall:
        X = X.mT
    n, rows, cols = X.shape
    is_fine = halves_products(X)  # otherwise FLOPs hardly matter, or float16 is slow
    at_once = AT_ONCE if is_fine and cols >= WIDE * rows else 1
    gram_dtype = torch.float16 if is_fine else X.dtype
    shrinking = torch.linalg.vector_norm(X, dim=(1, 2), dtype=torch.float32).clamp_(min=EPS).reciprocal_()
    for number, step in enumerate(range(0, steps, at_once)):
        is_first, is_last = step == 0, step + at_once >= steps
        A = symmetric_product(X, scale=shrinking.square().mul_(rows) if is_first else None, dtype=gram_dtype)
        factors = shrinking if is_first else None
        if is_last and scale != 1:
            factors = torch.full_like(shrinking, scale) if factors is None else factors * scale
        unit, num_steps = (1 / rows if is_first else 1.0), min(at_once, steps - step)
        B = _several_steps(A, unit, num_steps, factors, X.dtype)
        # (B X)^T = X^T B, because B is symmetric
        left, right = (X.mT, B) if is_last and is_tall else (B, X)
        if room is not None and number % 2 == 1:
            X = torch.bmm(left, right, out=room.view(n, left.shape[1], right.shape[2]))
        else:
            X = torch.bmm(left, right)
        del A, B, left, right
    return X


def _several_steps(
    A: Tensor,
    unit: float,
    num_steps: int,
    factors: Tensor | None,  # (n,)
    dtype: torch.dtype,
) -> Tensor:
    """Returns B multiplied by `factors`, where B X is the result of `num_steps` steps on X, if X X^T = unit A."""
    B = None
    for _ in range(num_steps - 1):
        P = _polynomial(A, unit)
        A, unit = symmetric_product(A, symmetric_product(P), alpha=unit), 1.0
        B = P if B is None else symmetric_product(P, B)
        del P
    if B is None:
        return _polynomial(A, unit, factors, dtype)
    return symmetric_product(_polynomial(A, unit), B, scale=factors, dtype=dtype)


def _polynomial(A: Tensor, unit: float, factors: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    a, b, c = COEFFICIENTS
    return symmetric_product(A, alpha=c * unit**2, added=A, beta=b * unit, diagonal=a, scale=factors, dtype=dtype)


def momentum_weight(beta: float, nesterov: bool, lookahead: float) -> float:
    """Returns the weight of the momentum in the direction. The newest gradient has the rest."""
    if not nesterov:
        return 1.0
    # Nesterov looks one step ahead: beta m + (1 - beta) g. Along the same line, k steps are m + k (1 - beta) (g - m).
    return beta if lookahead == 1 else 1 - lookahead * (1 - beta)


def orthogonal_update(
    direction: Tensor, *, lr: float, ns_steps: int, ns_dtype: torch.dtype, scale: str, may_overwrite: bool = False
) -> Tensor:
    """Returns u = lr * scale(rows, cols) * orthogonalised direction, for one matrix or a stack of them, in the dtype of
    `direction`."""
    factor = lr * shape_scale(scale, *direction.shape[-2:])
    return newton_schulz(direction, ns_steps, ns_dtype, scale=factor, may_overwrite=may_overwrite)


def shape_scale(scale: str, rows: int, cols: int) -> float:
    """Returns the factor with which one learning rate works for matrices of all shapes.

    spectral         sqrt(max(1, rows / cols)), Keller Jordan's; "original" in torch.optim.Muon
    match_rms_adamw  0.2 sqrt(max(rows, cols)): updates as large as AdamW's usually are (arXiv:2502.16982)
    """
    if scale == "spectral":
        return math.sqrt(max(1, rows / cols))
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    raise ValueError(f"scale {scale!r} is unknown: choose one of {', '.join(SCALES)}")


def adamw_update(
    gradient: Tensor,
    mean: Tensor,  # m, written
    square: Tensor,  # v, written
    *,
    beta1: float,
    beta2: float,
    **settings: Any,  # the others of `adamw_step_from`
) -> Tensor:
    """Computes the update of AdamW without weight decay.

        u = lr n / (sqrt(v / (1 - beta2^t)) + eps)
        n = m / (1 - beta1^t)
        n = (beta1 m + (1 - beta1) g) / (1 - beta1^t)      with `nesterov`

    With `nesterov` the rule looks one step ahead as in NAdam, without its schedule for beta1. The operations are in the
    order of torch.optim.AdamW(foreach=False), so on a CPU old - u has the same bits.
    """
    # m <- beta1 m + (1 - beta1) g
    mean.lerp_(gradient, 1 - beta1)
    # v <- beta2 v + (1 - beta2) g^2
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return adamw_step_from(gradient, mean, square, beta1=beta1, beta2=beta2, **settings)


def adamw_step_from(
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,  # t, counted from 1
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    nesterov: bool,
) -> Tensor:
    """Computes the second half of `adamw_update`: the update from averages that already contain this gradient."""
    numerator = gradient.lerp(mean, beta1) if nesterov else mean
    # sqrt(v / (1 - beta2^t)) + eps
    denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    # u = lr numerator / (1 - beta1^t) / denominator
    rate = lr / (1 - beta1**step)
    update = numerator.mul_(rate) if nesterov else numerator.mul(rate)
    return update.div_(denominator)
