"""A mixture of experts that replaces the SwiGLU of a block: each token passes through a few of many small SwiGLUs.

    scores  = sigmoid(router x)                                one per expert, in float32 or finer
    chosen  = the experts_per_token largest of scores + bias
    y       = sum over chosen of scores_e / (sum of the chosen scores) * expert_e(x), plus shared(x)

No token is dropped, and no expert has a capacity limit. The bias affects only the choice of experts. It keeps the load
of the experts even without an auxiliary loss (DeepSeek-V3, arXiv:2412.19437; Wang et al., arXiv:2408.15664). Here the
bias is a parameter. Its gradient is the overload of each expert, and its optimizer uses only the sign of the gradient
(`optim.balance_experts`). So the bias is accumulated over microbatches, delayed, versioned and updated like any weight.
This works on a stage that never sees the loss, and does not depend on the scale of the loss. docs/guides/experts.md
explains more.

Every sum is computed in a fixed order, also on a GPU: rows are only permuted, never added by a scatter.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixture(nn.Module):
    def __init__(
        self, dim: int, num_experts: int, experts_per_token: int, expert_dim: int, shared: nn.Module | None
    ) -> None:
        """shared: module that every token passes through, in addition to its experts. None means that there is none."""
        super().__init__()
        self.router = Router(dim, num_experts, experts_per_token)
        self.experts = Experts(dim, num_experts, expert_dim)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> the same
        tokens = x.flatten(0, -2)
        chosen, shares, loads = self.router(tokens)
        copies = chosen.shape[1]
        # Row r is copy r % copies of token r // copies. Rows are sorted by expert. Rows of the same expert keep their
        # order.
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        rows = _Rearrange.apply(tokens, order, inverse, copies)
        rows = _Rearrange.apply(self.experts(rows, loads), inverse, order, 1)
        mixed = torch.bmm(shares.unsqueeze(1), rows.unflatten(0, (-1, copies))).squeeze(1)
        if self.shared is not None:
            mixed = mixed + self.shared(tokens)
        return mixed.view_as(x)


class Router(nn.Module):
    keeps_dtype = ("bias",)
    """Names of the parameters that keep their dtype when weights are cast to a coarser one. The updates of the bias are
    small, and its gradient is a count of tokens."""

    def __init__(self, dim: int, num_experts: int, experts_per_token: int) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.bias = nn.Parameter(torch.empty(num_experts))
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the chosen experts (tokens, experts_per_token), their shares (same shape), and the number of rows of
        every expert.

        The gradient of a share flows to the scores; the choice has no gradient.
        """
        precise = torch.promote_types(tokens.dtype, torch.float32)
        scores = torch.sigmoid(F.linear(tokens.to(precise), self.weight.to(precise)))
        chosen = (scores.detach() + self.bias.detach()).topk(self.experts_per_token, dim=-1).indices
        shares = scores.gather(-1, chosen)
        shares = (shares / shares.sum(-1, keepdim=True)).to(tokens.dtype)
        num_experts = len(self.bias)
        loads = (chosen.flatten().unsqueeze(1) == torch.arange(num_experts, device=chosen.device)).sum(0)
        # Multiplied by num_experts the overload is a whole number, so the sum over microbatches does not depend on
        # their order.
        overload = num_experts * loads - chosen.numel()
        return chosen, _WithOverload.apply(shares, self.bias, overload.to(self.bias.dtype)), loads


class Experts(nn.Module):
    """The SwiGLUs of all experts, stacked. Muon orthogonalises each matrix of a stack separately."""

    def __init__(self, dim: int, num_experts: int, expert_dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, expert_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, expert_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        for stack in (self.gate, self.up, self.down):
            nn.init.normal_(stack, std=0.02)
        _keep_from_compilers()

    def forward(self, rows: Tensor, loads: Tensor) -> Tensor:
        """Applies every expert to its rows.

        rows: the rows of the first expert, then those of the second, and so on. loads: number of rows of every expert.
        """
        if not _has_grouped_kernel(rows, self.gate):
            return _by_expert(rows, loads, self.gate, self.up, self.down)
        ends = loads.cumsum(0).int()
        hidden = F.silu(F.grouped_mm(rows, self.gate.mT, offs=ends)) * F.grouped_mm(rows, self.up.mT, offs=ends)
        return F.grouped_mm(hidden, self.down.mT, offs=ends)


def _has_grouped_kernel(rows: Tensor, stack: Tensor) -> bool:
    """Returns whether torch's grouped kernel can be used.

    The kernel needs bfloat16 and rows whose size is a multiple of 16 bytes. On Blackwell it returns wrong gradients for
    experts without tokens; on Hopper it does not (pytorch/pytorch#172439). So it is used on Hopper only.
    """
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in stack.shape[1:])
        and torch.cuda.get_device_properties(rows.device).major == 9
    )


def _expert_by_expert(rows: Tensor, loads: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    sizes = _sizes(rows, loads)

    def products(parts: Tensor, stack: Tensor) -> Tensor:
        # unbind instead of stack[i], because the gradient of each stack[i] would be a whole stack of zeros around one
        # matrix.
        pairs = zip(parts.split(sizes), stack.unbind(), strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in pairs])

    return products(F.silu(products(rows, gate)) * products(rows, up), down)


_by_expert = _expert_by_expert


@cache
def _keep_from_compilers() -> None:
    """Excludes the function from torch.compile, because its shapes depend on the data and every load would need another
    graph.

    This is done when experts are created, not on import, because it takes as long as importing torch.
    """
    global _by_expert
    _by_expert = torch.compiler.disable(_expert_by_expert)


def _sizes(rows: Tensor, loads: Tensor) -> list[int]:
    """Returns the loads as integers. On a GPU this synchronises with the device."""
    if loads.is_meta:  # meta tensors have no values: assume even loads
        num_experts = len(loads)
        return [len(rows) // num_experts + (i < len(rows) % num_experts) for i in range(num_experts)]
    return [int(load) for load in loads.tolist()]


class _Rearrange(torch.autograd.Function):
    """Permutes rows: row i of the result is row order[i] of x after each row of x is repeated `copies` times.

    The backward adds the copies of a row in a fixed order. The backward of index_select adds them in any order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        rows = gradients[0].index_select(0, inverse)
        return rows if ctx.copies == 1 else rows.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class _WithOverload(torch.autograd.Function):
    """Returns the shares unchanged. In the backward, the gradient of the bias is the overload."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, bias: Tensor, overload: Tensor) -> Tensor:
        ctx.save_for_backward(overload)
        return shares.view_as(shares)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (overload,) = ctx.saved_tensors
        return gradients[0], overload, None
