"""The GPU kernels of kernels.py, in Triton, which is part of torch's CUDA builds.

They are launched on torch's current stream and never wait for it. Everything is computed in fp32.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel have types that only Triton defines)

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiling(NamedTuple):
    block: int
    """Number of rows, and of columns, of a tile of the result."""
    depth: int
    """Number of terms of the sum that are loaded at a time."""
    num_warps: int
    num_stages: int
    """Number of loads in progress at the same time."""


TILING = Tiling(block=128, depth=64, num_warps=4, num_stages=3)
ELEMENTS = 1024
"""Number of elements that one program of an elementwise kernel processes."""


@triton.jit
def _symmetric_product(
    x_ptr, y_ptr, added_ptr, scale_ptr, out_ptr, rows, depth,
    x_batch, x_row, x_col, y_batch, y_row, y_col, added_batch, added_row, added_col, out_batch, out_row,
    alpha, beta, diagonal,
    HAS_ADDED: tl.constexpr, HAS_SCALE: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Computes the tile (i, j) of one matrix, and its mirror image (j, i), in one program. Programs below the diagonal
    do nothing. A tile on the diagonal is as symmetric as X Y^T is after rounding. IS_EVEN: the tiles cover X exactly,
    so that no load needs a mask."""
    num_tiles = tl.cdiv(rows, BLOCK)
    i = tl.program_id(0) // num_tiles
    j = tl.program_id(0) % num_tiles
    if i > j:
        return
    batch = tl.program_id(1).to(tl.int64)  # a stack may hold more than 2^31 elements
    x_ptr += batch * x_batch
    y_ptr += batch * y_batch
    added_ptr += batch * added_batch
    out_ptr += batch * out_batch
    r = i * BLOCK + tl.arange(0, BLOCK)
    c = j * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, DEPTH)
    left = x_ptr + r[:, None] * x_row + k[None, :] * x_col
    right = y_ptr + c[None, :] * y_row + k[:, None] * y_col
    accumulator = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        if IS_EVEN:
            x = tl.load(left)
            y = tl.load(right)
        else:
            x = tl.load(left, mask=(r[:, None] < rows) & (k[None, :] < depth - start), other=0.0)
            y = tl.load(right, mask=(c[None, :] < rows) & (k[:, None] < depth - start), other=0.0)
        accumulator = tl.dot(x, y, accumulator)
        left += DEPTH * x_col
        right += DEPTH * y_col
    inside = (r[:, None] < rows) & (c[None, :] < rows)
    value = alpha * accumulator
    if HAS_ADDED:
        added = tl.load(added_ptr + r[:, None] * added_row + c[None, :] * added_col, mask=inside, other=0.0)
        value += beta * added.to(tl.float32)
        value += tl.where(r[:, None] == c[None, :], diagonal, 0.0)
    if HAS_SCALE:
        value *= tl.load(scale_ptr + batch)
    tile = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + r[:, None] * out_row + c[None, :], tile, mask=inside)
    if i != j:
        mirrored = (c[:, None] < rows) & (r[None, :] < rows)
        tl.store(out_ptr + c[:, None] * out_row + r[None, :], tl.trans(tile), mask=mirrored)


def symmetric_product(
    X: Tensor,
    Y: Tensor,
    alpha: float,
    added: Tensor | None,
    beta: float,
    diagonal: float,
    scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    n, rows, depth = X.shape
    out = torch.empty(n, rows, rows, dtype=dtype, device=X.device)
    base = out if added is None else added  # a pointer is required even if it is not used
    num_tiles = triton.cdiv(rows, TILING.block)
    with _device(X):
        _symmetric_product[(num_tiles * num_tiles, n)](
            X, Y, base, out if scale is None else scale, out, rows, depth,
            *X.stride(), *Y.stride(), *base.stride(), out.stride(0), out.stride(1),
            alpha, beta, diagonal,
            HAS_ADDED=added is not None, HAS_SCALE=scale is not None,
            IS_EVEN=rows % TILING.block == 0 and depth % TILING.depth == 0,
            BLOCK=TILING.block, DEPTH=TILING.depth,
            num_warps=TILING.num_warps, num_stages=TILING.num_stages,
        )  # fmt: skip
    return out


@triton.jit
def _advance_momentum(g_ptr, m_ptr, direction_ptr, num_elements, share, weight, ELEMENTS: tl.constexpr):
    """share and weight: weights of the gradient in the momentum and in the direction."""
    offsets = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = offsets < num_elements
    g = tl.load(g_ptr + offsets, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=inside).to(tl.float32)
    m += share * (g - m)
    tl.store(m_ptr + offsets, m, mask=inside)
    tl.store(direction_ptr + offsets, m + weight * (g - m), mask=inside)


def advance_momentum(gradient: Tensor, momentum: Tensor, direction: Tensor, beta: float, weight: float) -> None:
    num_elements = gradient.numel()
    with _device(gradient):
        _advance_momentum[(triton.cdiv(num_elements, ELEMENTS),)](
            gradient, momentum, direction, num_elements, 1 - beta, 1 - weight, ELEMENTS=ELEMENTS
        )


@triton.jit
def _apply_update(
    p_ptr, u_ptr, ahead_ptr, num_elements, decay, coefficient, HAS_AHEAD: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    offsets = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = offsets < num_elements
    u = tl.load(u_ptr + offsets, mask=inside).to(tl.float32)
    p = decay * tl.load(p_ptr + offsets, mask=inside).to(tl.float32) - u
    tl.store(p_ptr + offsets, p, mask=inside)
    if HAS_AHEAD:
        tl.store(ahead_ptr + offsets, p - coefficient * u, mask=inside)


def apply_update(parameter: Tensor, update: Tensor, ahead: Tensor | None, decay: float, coefficient: float) -> None:
    num_elements = parameter.numel()
    with _device(parameter):
        _apply_update[(triton.cdiv(num_elements, ELEMENTS),)](
            parameter, update, parameter if ahead is None else ahead, num_elements, decay, coefficient,
            HAS_AHEAD=ahead is not None, ELEMENTS=ELEMENTS,
        )  # fmt: skip


@triton.jit
def _adamw_step(
    p_ptr, g_ptr, m_ptr, v_ptr, ahead_ptr, num_elements,
    rate, share1, beta2, share2, root_correction, eps, decay, coefficient,
    NESTEROV: tl.constexpr, EXPECTS_NESTEROV: tl.constexpr, HAS_AHEAD: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """share1 and share2: 1 - beta1 and 1 - beta2. They are passed in because a subtraction in fp32 would be too
    inexact."""
    offsets = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = offsets < num_elements
    p = tl.load(p_ptr + offsets, mask=inside).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=inside).to(tl.float32)
    v = tl.load(v_ptr + offsets, mask=inside).to(tl.float32)
    m += share1 * (g - m)
    v = beta2 * v + share2 * g * g
    numerator = m
    if NESTEROV:
        numerator += share1 * (g - m)
    denominator = tl.sqrt(v) / root_correction + eps
    u = rate * numerator / denominator
    p = decay * p - u
    tl.store(p_ptr + offsets, p, mask=inside)
    tl.store(m_ptr + offsets, m, mask=inside)
    tl.store(v_ptr + offsets, v, mask=inside)
    if HAS_AHEAD:
        expected = u
        if EXPECTS_NESTEROV:
            expected = rate * (m + share1 * (g - m)) / denominator
        tl.store(ahead_ptr + offsets, p - coefficient * expected, mask=inside)


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    ahead: Tensor | None,
    *,
    rate: float,
    beta1: float,
    beta2: float,
    root_correction: float,
    eps: float,
    nesterov: bool,
    expects_nesterov: bool,
    decay: float,
    coefficient: float,
) -> None:
    num_elements = parameter.numel()
    with _device(parameter):
        _adamw_step[(triton.cdiv(num_elements, ELEMENTS),)](
            parameter, gradient, mean, square, parameter if ahead is None else ahead, num_elements,
            rate, 1 - beta1, beta2, 1 - beta2, root_correction, eps, decay, coefficient,
            NESTEROV=nesterov, EXPECTS_NESTEROV=expects_nesterov, HAS_AHEAD=ahead is not None, ELEMENTS=ELEMENTS,
        )  # fmt: skip


def _device(tensor: Tensor) -> Any:
    """Selects the device of a tensor, because Triton launches on the current device regardless of its arguments.

    On a CPU nothing is selected: there Triton's interpreter runs.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
