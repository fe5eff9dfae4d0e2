"""Provides operations that have their own kernel on a GPU, with plain torch for all other cases.

    symmetric_product  X X^T and similar: half of the tiles are computed, the other half is their mirror image
    advance_momentum   momentum and direction in one pass, the direction rounded to the dtype of Newton-Schulz
    apply_update       parameter and predicted parameter in one pass
    adamw_step         all of AdamW in one pass, where plain torch needs nine passes and two temporaries

The kernels are in triton_kernels.py, which is imported when a CUDA tensor first needs one. Both implementations compute
the same formula and agree up to rounding.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

USE_TRITON = True
"""Whether to use Triton. False means plain torch everywhere, for comparison."""
MIN_ROWS = 1024
"""Smallest number of rows for which half of the tiles are computed. Smaller products have too few tiles for this to
help: there, launching kernels takes most of the time."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
INT32 = 2**31
"""Upper bound on the number of elements, because the kernels count elements in 32 bits."""


def usable(*tensors: Tensor) -> bool:
    """Returns whether the elementwise kernels can process these tensors: on a GPU, contiguous, and of a supported dtype
    and size."""
    return _on_triton(tensors[0]) and all(
        tensor.is_cuda and tensor.dtype in DTYPES and tensor.is_contiguous() and tensor.numel() < INT32
        for tensor in tensors
    )


def _on_triton(tensor: Tensor) -> bool:
    return USE_TRITON and HAS_TRITON and tensor.is_cuda


def halves_products(X: Tensor) -> bool:
    """Returns whether `symmetric_product` computes only half of the tiles.

    The meta device counts as a GPU here, because plans for GPUs are made on it.
    """
    is_there = _on_triton(X) or X.is_meta
    return is_there and X.dtype in HALVES and X.shape[1] >= MIN_ROWS and X[0].numel() < INT32


def symmetric_product(
    X: Tensor,  # (n, rows, depth), any strides
    Y: Tensor | None = None,  # same shape; X Y^T must be symmetric, as it is if both are symmetric and commute
    *,
    alpha: float = 1.0,
    added: Tensor | None = None,  # (n, rows, rows), symmetric
    beta: float = 0.0,
    diagonal: float = 0.0,
    scale: Tensor | None = None,  # (n,), float32
    dtype: torch.dtype | None = None,  # of the result, which is rounded once; None means that of X
) -> Tensor:
    """Returns scale (alpha X Y^T + beta added + diagonal I), for each matrix of the stack.

    Without Y, the product is X X^T. `diagonal` is used only together with `added`.
    """
    Y, dtype = X if Y is None else Y, X.dtype if dtype is None else dtype
    if halves_products(X):
        if X.is_meta:
            return X.new_empty(len(X), X.shape[1], X.shape[1], dtype=dtype)
        from .triton_kernels import symmetric_product as by_triton

        return by_triton(X, Y, alpha, added, beta, diagonal, scale, dtype)
    if dtype != X.dtype:
        X, Y, added = X.float(), Y.float(), None if added is None else added.float()
    if added is None:
        product = torch.bmm(X, Y.mT)
        product = product if alpha == 1 else product.mul_(alpha)
    else:
        product = torch.baddbmm(added, X, Y.mT, beta=beta, alpha=alpha)
        product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return (product if scale is None else product.mul_(scale[:, None, None])).to(dtype)


def advance_momentum(
    gradient: Tensor,
    momentum: Tensor,  # same shape, written
    direction: Tensor,  # same shape, any dtype, written
    *,
    beta: float,
    weight: float,  # of the momentum in the direction; the gradient has the rest
) -> None:
    """Computes m <- beta m + (1 - beta) g; direction <- weight m + (1 - weight) g."""
    if usable(gradient, momentum, direction):
        from .triton_kernels import advance_momentum as by_triton

        by_triton(gradient, momentum, direction, beta, weight)
        return
    momentum.lerp_(gradient, 1 - beta)
    direction.copy_(momentum if weight == 1 else gradient.lerp(momentum, weight))


def apply_update(
    parameter: Tensor,  # written
    update: Tensor,
    ahead: Tensor | None,  # written
    *,
    decay: float,
    coefficient: float,
) -> None:
    """Computes p <- decay p - u; ahead <- p - coefficient u. All tensors must be `usable`."""
    from .triton_kernels import apply_update as by_triton

    by_triton(parameter, update, ahead, decay, coefficient)
    _tell_autograd(parameter, ahead)


def adamw_step(
    parameter: Tensor,  # written, and so are mean and square
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    ahead: Tensor | None,  # written
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    nesterov: bool,
    expects_nesterov: bool,
    decay: float,
    coefficient: float,
) -> None:
    """Computes rules.adamw_update, then p <- decay p - u and ahead <- p - coefficient w.

    w is u, or with `expects_nesterov` what u would be with Nesterov's term. All tensors must be `usable`.
    """
    from .triton_kernels import adamw_step as by_triton

    by_triton(
        parameter,
        gradient,
        mean,
        square,
        ahead,
        rate=lr / (1 - beta1**step),
        beta1=beta1,
        beta2=beta2,
        root_correction=(1 - beta2**step) ** 0.5,
        eps=eps,
        nesterov=nesterov,
        expects_nesterov=expects_nesterov,
        decay=decay,
        coefficient=coefficient,
    )
    _tell_autograd(parameter, ahead)


def _tell_autograd(parameter: Tensor, ahead: Tensor | None) -> None:
    """Notifies autograd that tensors were written, which torch cannot see in a Triton kernel. A graph that still needs
    the old weights must raise an error."""
    increment_version(parameter)
    if ahead is not None:
        increment_version(ahead)
