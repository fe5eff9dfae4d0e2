"""A mixture of experts in the place of a block's SwiGLU: of many small ones, each token goes through a few.

    scores  = sigmoid(router x)                                one per expert, in float32 or finer
    chosen  = the experts_per_token largest of scores + bias
    y       = sum over chosen of scores_e / (sum of the chosen scores) * expert_e(x), plus shared(x)

No token is dropped and no expert has a capacity. The bias steers the choice and nothing else: it keeps the experts
evenly loaded without a loss of its own (DeepSeek-V3, arXiv:2412.19437; Wang et al., arXiv:2408.15664). Here it is a
parameter whose gradient is by how much each expert was overloaded, and whose optimizer takes the sign of that
(`optim.balance_experts`). So it is accumulated over microbatches, delayed, versioned and stepped as any weight is, on
a stage that never sees the loss, and whatever the loss is multiplied by. docs/guides/experts.md says more.

Every sum is made in a fixed order, also on a GPU: rows are only ever permuted, never scattered onto each other.
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
        """shared: what every token goes through besides."""
        super().__init__()
        self.router = Router(dim, num_experts, experts_per_token)
        self.experts = Experts(dim, num_experts, expert_dim)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> the same
        tokens = x.flatten(0, -2)
        chosen, shares, loads = self.router(tokens)
        copies = chosen.shape[1]
        # Row r is copy r % copies of token r // copies. Sorted by expert, and by row where the expert is the same.
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
    """Beside coarser weights too: its steps are small, and its gradient counts tokens."""

    def __init__(self, dim: int, num_experts: int, experts_per_token: int) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.bias = nn.Parameter(torch.empty(num_experts))
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The chosen experts (tokens, experts_per_token), their shares (likewise), and how many rows every expert got.

        A share's gradient reaches the scores; the choice has none."""
        precise = torch.promote_types(tokens.dtype, torch.float32)
        scores = torch.sigmoid(F.linear(tokens.to(precise), self.weight.to(precise)))
        chosen = (scores.detach() + self.bias.detach()).topk(self.experts_per_token, dim=-1).indices
        shares = scores.gather(-1, chosen)
        shares = (shares / shares.sum(-1, keepdim=True)).to(tokens.dtype)
        num_experts = len(self.bias)
        loads = (chosen.flatten().unsqueeze(1) == torch.arange(num_experts, device=chosen.device)).sum(0)
        # Times num_experts it is a whole number, and the microbatches' add up to the same in any order.
        overload = num_experts * loads - chosen.numel()
        return chosen, _WithOverload.apply(shares, self.bias, overload.to(self.bias.dtype)), loads


class Experts(nn.Module):
    """SwiGLUs, stacked: Muon takes a stack of matrices for what it is and orthogonalises each."""

    def __init__(self, dim: int, num_experts: int, expert_dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, expert_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, expert_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        for stack in (self.gate, self.up, self.down):
            nn.init.normal_(stack, std=0.02)
        _keep_from_compilers()

    def forward(self, rows: Tensor, loads: Tensor) -> Tensor:
        """rows: those of the first expert, then those of the second, and so on, as many as `loads` says."""
        if not _has_grouped_kernel(rows, self.gate):
            return _by_expert(rows, loads, self.gate, self.up, self.down)
        ends = loads.cumsum(0).int()
        hidden = F.silu(F.grouped_mm(rows, self.gate.mT, offs=ends)) * F.grouped_mm(rows, self.up.mT, offs=ends)
        return F.grouped_mm(hidden, self.down.mT, offs=ends)


def _has_grouped_kernel(rows: Tensor, stack: Tensor) -> bool:
    """torch's kernel is for bfloat16 and rows of whole 16 bytes. On Blackwell it makes up gradients for experts without
    tokens, and on Hopper it does not (pytorch/pytorch#172439): so it is used there alone."""
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in stack.shape[1:])
        and torch.cuda.get_device_properties(rows.device).major == 9
    )


def _expert_by_expert(rows: Tensor, loads: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    sizes = _sizes(rows, loads)

    def products(parts: Tensor, stack: Tensor) -> Tensor:
        # unbind, and not stack[i]: the gradient of each stack[i] would be a whole stack of zeros around one matrix.
        pairs = zip(parts.split(sizes), stack.unbind(), strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in pairs])

    return products(F.silu(products(rows, gate)) * products(rows, up), down)


_by_expert = _expert_by_expert


@cache
def _keep_from_compilers() -> None:
    """Its shapes are those of the data, and every load would be another graph. Done where experts are made, and not for
    everyone who imports this: it takes as long as importing torch."""
    global _by_expert
    _by_expert = torch.compiler.disable(_expert_by_expert)


def _sizes(rows: Tensor, loads: Tensor) -> list[int]:
    """The loads as numbers, which on a GPU waits for it."""
    if loads.is_meta:  # there are no numbers: evenly loaded
        num_experts = len(loads)
        return [len(rows) // num_experts + (i < len(rows) % num_experts) for i in range(num_experts)]
    return [int(load) for load in loads.tolist()]


class _Rearrange(torch.autograd.Function):
    """Row i of the result is row order[i] of x, each of whose rows stands there `copies` times in a row.

    The backward adds up a row's copies in their order; that of index_select adds them as they come."""

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
    """Passes the shares on; in the backward the bias gets the overload for a gradient."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, bias: Tensor, overload: Tensor) -> Tensor:
        ctx.save_for_backward(overload)
        return shares.view_as(shares)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (overload,) = ctx.saved_tensors
        return gradients[0], overload, None
