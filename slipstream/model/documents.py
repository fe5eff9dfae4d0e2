"""Keeps the documents of a row apart: no token attends to another document, and positions begin anew with each.

    x, starts = Embedding(...)(tokens)        # the first layer adds the starts, and every block passes them on

A document begins with the token that ended the one before it (`document_separator`). So every token is predicted from
its own document only, and the first one from the separator alone, as when text is generated from nothing.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def max_documents(length: int) -> int:
    """Returns the largest number of documents in a row that are kept apart. If there are more, the last of them count
    as one. A limit that does not depend on the tokens lets a GPU begin before the host knows the documents."""
    return 16 + length // 64


def document_starts(tokens: Tensor, separator: int) -> Tensor:
    """Returns, for every token (batch, length), the position in its row at which its document begins."""
    begins = tokens == separator
    begins[:, 0] = True
    begins &= begins.cumsum(1) <= max_documents(tokens.shape[1])
    positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32)
    return torch.where(begins, positions, 0).cummax(1).values


class Embedding(nn.Embedding):
    """An embedding that also returns where the document of every token begins."""

    def __init__(self, vocab_size: int, dim: int, separator: int) -> None:
        super().__init__(vocab_size, dim)
        self.separator = separator

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(tokens), document_starts(tokens, self.separator)


def attention_mask(starts: Tensor) -> Tensor:
    """Returns which positions each position attends to, as booleans of (batch, 1, length, length)."""
    positions = torch.arange(starts.shape[1], device=starts.device)
    return ((positions >= starts.unsqueeze(-1)) & (positions <= positions.unsqueeze(-1))).unsqueeze(1)


def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """Returns causal attention inside each document. All tensors have the shape (batch, heads, length, head_dim)."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _attend_flash(query, key, value, starts)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask(starts))


def _attend_flash(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """Does the same with the kernel for sequences of different lengths, which skips what the mask would hide."""
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, length, _ = query.shape
    bounds = _bounds(starts)
    q, k, v = (tensor.transpose(1, 2).reshape(batch * length, heads, -1) for tensor in (query, key, value))
    mixed = cast(Tensor, varlen_attn(q, k, v, bounds, bounds, length, length, window_size=(-1, 0)))
    return mixed.view(batch, length, heads, -1).transpose(1, 2)


def _bounds(starts: Tensor) -> Tensor:
    """Returns the first token of every document of all rows, and then the number of all tokens as often as it takes to
    reach a size that does not depend on the documents."""
    batch, length = starts.shape
    is_first = starts == torch.arange(length, device=starts.device)
    most = batch * max_documents(length)
    firsts = torch.nonzero_static(is_first.flatten(), size=most + 1, fill_value=batch * length)
    return firsts.flatten().to(torch.int32)
