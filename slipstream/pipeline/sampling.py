"""Draws continuations of prompts at an evaluation, through the running pipeline.

Every token is one more action of the evaluation: the sequences so far pass through all stages, the last stage draws a
token for each of them and tells the first stage, which begins the next action with it. Nothing is cached between
actions, and no stage needs the weights of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..transport.base import Transport
from ..transport.link import Waiting
from ..transport.streams import fetch


@dataclass(frozen=True)
class Samples:
    """The continuations to draw at every evaluation, with the model's own probabilities."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt, at least one."""
    num_tokens: int
    """Number of tokens to draw for each prompt."""
    seed: int = 0
    """Seed of the random numbers, which are the same at every evaluation."""


class Sampler:
    """The sequences of one evaluation, as the first and the last stage see them."""

    def __init__(self, samples: Samples, transport: Transport, device: torch.device) -> None:
        self._transport, self._num_tokens = transport, samples.num_tokens
        lengths = [len(prompt) for prompt in samples.prompts]
        self._newest = torch.tensor(lengths, device=device) - 1
        """Position of the newest token of each sequence."""
        # A causal model does not see what comes after a position, so the padding has no effect.
        self._ids = torch.zeros(len(lengths), max(lengths) + samples.num_tokens, dtype=torch.int64, device=device)
        for row, prompt in enumerate(samples.prompts):
            self._ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        self._generator = torch.Generator().manual_seed(samples.seed)
        self._drawn: list[list[int]] = []

    def inputs(self, index: int, waiting: Waiting) -> Tensor:
        """Returns the sequences with which the action `index` begins, on the first stage. It waits for the tokens of
        the action before."""
        if index > len(self._drawn):
            self._append(self._transport.hear_last(waiting))
        return self._ids[:, :-1].clone()

    def draw(self, outputs: Any, waiting: Waiting) -> None:
        """Draws the next token of every sequence, on the last stage, and tells the first stage."""
        logits = fetch(_logits(outputs, self._newest), self._transport.stage, self._transport.timeout_seconds, waiting)
        probabilities = logits.double().nan_to_num().softmax(-1)
        self._append(torch.multinomial(probabilities, 1, generator=self._generator).flatten().tolist())
        if self._transport.num_stages > 1 and len(self._drawn) < self._num_tokens:
            self._transport.tell_first(self._drawn[-1])

    def continuations(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*self._drawn, strict=True))

    def _append(self, tokens: list[int]) -> None:
        self._drawn.append(tokens)
        self._newest += 1
        self._ids[torch.arange(len(tokens)), self._newest] = torch.tensor(tokens, device=self._ids.device)


def _logits(outputs: Any, positions: Tensor) -> Tensor:
    """Returns the logits of one position of each sequence. A head whose loss is computed in chunks returns its input
    and the weight of its projection instead of logits."""
    hidden, weight = outputs if isinstance(outputs, tuple) else (outputs, None)
    last: Tensor = hidden[torch.arange(len(positions)), positions]
    return last if weight is None else last @ weight.T
