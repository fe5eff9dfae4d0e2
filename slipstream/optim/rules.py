"""The update rules: a gradient and the rule's own state in, the complete update out.

An optimizer turns a delayed gradient into an update, and this is where it happens. Every rule returns u such
that new = old - u, learning rate included; decoupled weight decay is not part of u. A rule writes its own
state and nothing else: never the gradient, which under delay someone may still hold, and no parameter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kernels import halves_products, symmetric_product

SCALES = ("spectral", "match_rms_adamw")
NS_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
WIDE = 2
"""Times as many columns as rows, from where on several steps of Newton-Schulz at once are fewer FLOPs."""
AT_ONCE = 3
"""Steps; see `_iterate_in_bf16`."""


def newton_schulz(
    matrices: Tensor,  # (rows, cols) or (n, rows, cols)
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    eps: float = 1e-7,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    scale: float = 1.0,
    may_overwrite: bool = False,  # `matrices`, whose memory then saves a temporary in bf16
) -> Tensor:
    """Orthogonalise each matrix on its own: U S V^T becomes about scale U V^T.

    Keller Jordan's quintic iteration (https://kellerjordan.github.io/posts/muon). Its coefficients give the
    steepest slope at zero, not convergence: singular values end up between 0.68 and 1.21, those that are tiny
    beside the matrix's norm below. `dtype` is that of the iteration, the result has the dtype of `matrices`.
    In bf16 a gradient sum taken in another order moves the result by 4e-3, so schedules can only be compared
    in fp32 or fp64. A matrix whose norm is below `eps` is taken for noise: its result shrinks with it.
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
        is_free = may_overwrite or matrices.dtype != dtype  # then X is a copy
        X = _iterate_in_bf16(X, steps, eps, coefficients, scale, is_free and X.is_contiguous())
    else:
        X = _iterate(X, steps, eps, coefficients)
        if scale != 1:
            X = X.mul_(scale)
    return X.reshape(matrices.shape).to(matrices.dtype)


def _iterate(X: Tensor, steps: int, eps: float, coefficients: tuple[float, float, float]) -> Tensor:
    a, b, c = coefficients
    # The Gram matrix X X^T is the small one only if X is wide.
    is_tall = X.shape[1] > X.shape[2]
    if is_tall:
        X = X.mT
    # X <- X / |X|_F, which bounds every singular value by 1
    X = X / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        # X <- a X + (b A + c A A) X with A = X X^T
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if is_tall else X


def _iterate_in_bf16(
    X: Tensor,
    steps: int,
    eps: float,
    coefficients: tuple[float, float, float],
    scale: float,
    may_overwrite: bool,
) -> Tensor:
    """The same for speed: nothing as large as X is read or written but by the products themselves, and once to be
    measured.

    a X + (b A + c A A) X is taken as one product with B = a I + b A + c A A, because adding X to a product copies it
    first. The norm divides the small matrices instead of X. The last step multiplies by `scale`, and from the other
    side where X is tall, so that its result lies in memory as X did.

    Of a wide X several steps are taken at once: the Gram matrix of B X is B A B = A B B, since they commute, so that
    the next polynomial needs no product of X's size. What rounding adds to a small eigenvalue of A is multiplied by
    a^2 = 12 in every step that does not look at X again. Therefore Gram matrices are kept in float16, which rounds
    eight times as finely as bf16, and for its narrow range the first one, whose trace is 1, is kept times its rows.
    """
    room = X.view(-1) if may_overwrite else None
    is_tall = X.shape[1] > X.shape[2]
    if is_tall:
        X = X.mT
    n, rows, cols = X.shape
    is_fine = halves_products(X)  # elsewhere FLOPs hardly matter, or float16 is slow
    at_once = AT_ONCE if is_fine and cols >= WIDE * rows else 1
    gram_dtype = torch.float16 if is_fine else X.dtype
    shrinking = torch.linalg.vector_norm(X, dim=(1, 2), dtype=torch.float32).clamp_(min=eps).reciprocal_()
    for number, step in enumerate(range(0, steps, at_once)):
        is_first, is_last = step == 0, step + at_once >= steps
        A = symmetric_product(X, scale=shrinking.square().mul_(rows) if is_first else None, dtype=gram_dtype)
        factors = shrinking if is_first else None
        if is_last and scale != 1:
            factors = torch.full_like(shrinking, scale) if factors is None else factors * scale
        unit, num_steps = (1 / rows if is_first else 1.0), min(at_once, steps - step)
        B = _several_steps(A, unit, num_steps, coefficients, factors, X.dtype)
        # (B X)^T = X^T B, for B is symmetric
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
    coefficients: tuple[float, float, float],
    factors: Tensor | None,  # (n,)
    dtype: torch.dtype,
) -> Tensor:
    """B, times `factors`, with B X what becomes of X in so many steps if X X^T = unit A."""
    B = None
    for _ in range(num_steps - 1):
        P = _polynomial(A, unit, coefficients)
        A, unit = symmetric_product(A, symmetric_product(P), alpha=unit), 1.0
        B = P if B is None else symmetric_product(P, B)
        del P
    if B is None:
        return _polynomial(A, unit, coefficients, factors, dtype)
    return symmetric_product(_polynomial(A, unit, coefficients), B, scale=factors, dtype=dtype)


def _polynomial(
    A: Tensor,
    unit: float,
    coefficients: tuple[float, float, float],
    factors: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    a, b, c = coefficients
    return symmetric_product(A, alpha=c * unit**2, added=A, beta=b * unit, diagonal=a, scale=factors, dtype=dtype)


def momentum_direction(
    gradient: Tensor, momentum: Tensor, *, beta: float, nesterov: bool, lookahead: float = 1.0
) -> Tensor:
    """Advance the momentum by one gradient; what comes back may be the momentum itself: do not write it."""
    # m <- beta m + (1 - beta) g
    momentum.lerp_(gradient, 1 - beta)
    if not nesterov:
        return momentum
    return gradient.lerp(momentum, momentum_weight(beta, nesterov, lookahead))


def momentum_weight(beta: float, nesterov: bool, lookahead: float) -> float:
    """What the momentum counts in the direction, beside the newest gradient."""
    if not nesterov:
        return 1.0
    # Nesterov looks one step ahead, beta m + (1 - beta) g; and k steps along the same line, m + k (1 - beta) (g - m)
    return beta if lookahead == 1 else 1 - lookahead * (1 - beta)


def orthogonal_update(
    direction: Tensor, *, lr: float, ns_steps: int, ns_dtype: torch.dtype, scale: str, may_overwrite: bool = False
) -> Tensor:
    """u = lr * scale(rows, cols) * orthogonalised direction, for one matrix or a stack of them; of its dtype."""
    factor = lr * shape_scale(scale, *direction.shape[-2:])
    return newton_schulz(direction, ns_steps, ns_dtype, scale=factor, may_overwrite=may_overwrite)


def shape_scale(scale: str, rows: int, cols: int) -> float:
    """What makes one learning rate serve matrices of all shapes.

    spectral         sqrt(max(1, rows / cols)), Keller Jordan's; "original" in torch.optim.Muon
    match_rms_adamw  0.2 sqrt(max(rows, cols)): updates as large as AdamW's usually are (arXiv:2502.16982)
    """
    if scale == "spectral":
        return math.sqrt(max(1, rows / cols))
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    raise ValueError(f"scale {scale!r} is unknown: choose one of {', '.join(SCALES)}")


def muon_update(
    gradient: Tensor,  # (rows, cols) or (n, rows, cols)
    momentum: Tensor,  # same shape, written
    *,
    lr: float,
    beta: float,
    nesterov: bool,
    ns_steps: int,
    ns_dtype: torch.dtype,
    scale: str,
    lookahead: float = 1.0,
) -> Tensor:
    """Muon with its momentum as a moving average, in the convention of torch.optim.Muon."""
    direction = momentum_direction(gradient, momentum, beta=beta, nesterov=nesterov, lookahead=lookahead)
    return orthogonal_update(direction, lr=lr, ns_steps=ns_steps, ns_dtype=ns_dtype, scale=scale)


def adamw_update(
    gradient: Tensor,
    mean: Tensor,  # m, written
    square: Tensor,  # v, written
    *,
    step: int,  # t, counted from 1
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    nesterov: bool,
) -> Tensor:
    """Adam without its weight decay.

    u = lr n / (sqrt(v / (1 - beta2^t)) + eps) with n = m / (1 - beta1^t). With `nesterov`
    n = (beta1 m + (1 - beta1) g) / (1 - beta1^t): one step ahead as in NAdam, without its schedule for beta1.
    The operations stand in the order of torch.optim.AdamW(foreach=False): old - u has its bits on a CPU.
    """
    # m <- beta1 m + (1 - beta1) g
    mean.lerp_(gradient, 1 - beta1)
    # v <- beta2 v + (1 - beta2) g^2
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return adamw_step_from(
        gradient, mean, square, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, nesterov=nesterov
    )


def adamw_step_from(
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    nesterov: bool,
) -> Tensor:
    """The second half of `adamw_update`: the step that the averages, which have this gradient already, come to."""
    numerator = gradient.lerp(mean, beta1) if nesterov else mean
    # sqrt(v / (1 - beta2^t)) + eps
    denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    # u = lr numerator / (1 - beta1^t) / denominator
    rate = lr / (1 - beta1**step)
    update = numerator.mul_(rate) if nesterov else numerator.mul(rate)
    return update.div_(denominator)


def sign_update(gradient: Tensor, *, lr: float) -> Tensor:
    """u = lr sign(g)"""
    return gradient.sign().mul_(lr)
