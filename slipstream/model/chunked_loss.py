"""Computes the loss without holding all logits: projection and cross entropy over chunks of tokens.

    model, loss = decoder_and_loss(config, chunk_tokens=1024)
    loss(model(tokens), targets).backward()

Logits have the shape tokens x vocabulary. With a vocabulary of 50K or more, the logits, their softmax and their
gradient take more memory than everything else on the last stage. Here the head returns its normalised input and the
weight of its projection, and the logits of only one chunk exist at a time. The gradient of a chunk can be computed
together with its loss, so the forward computes both. Nothing is projected twice, and the gradient belongs to the
weights of the forward, even if they change afterwards. Between forward and backward, one gradient of the hidden states
and one of the weight are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .decoder import IGNORE, ModelConfig, decoder, next_token_loss


def decoder_and_loss(
    config: ModelConfig, chunk_tokens: int = 0
) -> tuple[nn.Sequential, Callable[[Any, Tensor], Tensor]]:
    """Returns the model, and the loss function for its output.

    chunk_tokens: 0 means that the model returns logits. Otherwise it returns the input and the weight of the last
    projection, and the loss projects this number of tokens at a time.
    """
    if not chunk_tokens:
        return decoder(config), next_token_loss
    return decoder(config, logits=False), partial(chunked_next_token_loss, chunk_tokens=chunk_tokens)


def chunked_next_token_loss(outputs: tuple[Tensor, Tensor], targets: Tensor, chunk_tokens: int) -> Tensor:
    """Computes `next_token_loss` of the logits that the outputs would be projected to.

    outputs: the output of `decoder(config, logits=False)`.
    """
    hidden, weight = outputs
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if not torch.is_grad_enabled():
        return _walk(hidden, weight, targets, chunk_tokens, False, False)[0]
    return cast(Tensor, _ChunkedLoss.apply(hidden, weight, targets, chunk_tokens))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        loss, *gradients = _walk(hidden, weight, targets, chunk_tokens, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (scale,) = gradients
        # In place, because the gradient of the weight is large. If a second backward uses the same graph, autograd
        # detects the change.
        return *(None if kept is None else kept.mul_(scale) for kept in ctx.saved_tensors), None, None


def _walk(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the loss and its gradients with respect to hidden and weight.

    hidden: (tokens, dim), weight: (vocabulary, dim), targets: (tokens,)
    """
    precise = torch.promote_types(weight.dtype, torch.float32)
    loss = torch.zeros((), dtype=precise, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
    weight_gradient = torch.zeros_like(weight, dtype=precise) if needs_weight else None
    for start in range(0, len(hidden), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        chunk = hidden[rows]
        chunk_loss, gradient = _project(chunk, weight, targets[rows], precise, needs_hidden or needs_weight)
        loss += chunk_loss
        if gradient is None:
            continue
        if hidden_gradient is not None:
            hidden_gradient[rows] = gradient @ weight
        if weight_gradient is not None and weight_gradient.dtype == weight.dtype:
            weight_gradient.addmm_(gradient.t(), chunk)
        elif weight_gradient is not None:  # many chunks are summed, in a finer dtype than each is computed in
            weight_gradient += gradient.t() @ chunk
        del gradient  # before the logits of the next chunk are allocated
    return loss, hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype)


def _project(
    chunk: Tensor, weight: Tensor, targets: Tensor, precise: torch.dtype, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the loss of a chunk, and its gradient with respect to the logits.

    The gradient is softmax - one-hot, and 0 where there is no target.
    """
    log_probabilities = F.log_softmax(chunk @ weight.t(), dim=-1, dtype=precise)
    loss = F.nll_loss(log_probabilities, targets, ignore_index=IGNORE, reduction="sum")
    if not needs_gradient:
        return loss, None
    is_ignored = (targets == IGNORE).unsqueeze(1)
    entries = targets.unsqueeze(1).masked_fill(is_ignored, 0)
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, entries, torch.full_like(entries, -1, dtype=precise))
    return loss, gradient.masked_fill_(is_ignored, 0.0).to(weight.dtype)
