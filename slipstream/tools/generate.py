"""Samples text from a trained model, token by token.

    layers = load(source, device, dtype)
    for token in generate(layers, [1, 2, 3], Sampling(max_tokens=20)):
        ...

With a cache, each block keeps the keys and values of all positions so far, so a new token costs the same at any length.
Without one, the whole sequence is computed again for every token; the tokens are the same. Models of transformers have
caches of their own, which are used for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import hf
from ..data import Codec
from ..errors import UsageError
from ..model.decoder import Cache
from .loading import Source


@dataclass(frozen=True)
class Sampling:
    max_tokens: int = 128
    temperature: float = 1.0
    """Divides the logits. 0 means that the most likely token is always taken."""
    top_k: int = 0
    """Only so many of the most likely tokens are drawn from. 0 means all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability are drawn from."""
    seed: int = 0
    end: int | None = None
    """Token that ends the text. None means that none does."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens = {self.max_tokens} makes no text: use 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature = {self.temperature} is no temperature: use 0 or more")
        if self.top_k < 0:
            raise UsageError(f"top_k = {self.top_k} is too small: use 0 for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p = {self.top_p} is no probability: use more than 0, up to 1")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed = {self.seed} has more than 64 bits: use a smaller number")


@torch.no_grad()
def generate(
    layers: nn.Sequential, prompt: Sequence[int], sampling: Sampling, length: int, use_cache: bool = True
) -> Iterator[int]:
    """Yields the tokens that follow the prompt. length: largest number of positions of a sequence; generation ends
    there."""
    device = next(layers.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    last_logits = _last_logits(layers, length, use_cache)
    tokens = list(prompt)
    fresh = tokens
    for _ in range(min(sampling.max_tokens, length - len(prompt))):
        logits = last_logits(torch.tensor([fresh], device=device))
        token = choose(logits.float().cpu(), sampling, generator)
        if token == sampling.end:
            return
        yield token
        tokens.append(token)
        fresh = [token] if use_cache else tokens


LastLogits = Callable[[Tensor], Tensor]
"""Function from tokens, those that follow what it has cached, to the logits of the last one."""


def _last_logits(layers: nn.Sequential, length: int, use_cache: bool) -> LastLogits:
    embedding, *blocks, head = layers
    if use_cache and isinstance(blocks[0], hf.Block):
        return _with_cache_of_transformers(layers)
    caches = [(Cache(length),) if use_cache else () for _ in blocks]

    def last_logits(ids: Tensor) -> Tensor:
        hidden = embedding(ids)
        for block, cache in zip(blocks, caches, strict=True):
            hidden = block(hidden, *cache)
        return head(hidden[:, -1:])[0, -1]

    return last_logits


def _with_cache_of_transformers(layers: nn.Sequential) -> LastLogits:
    model, cache = hf.join(layers), None

    def last_logits(ids: Tensor) -> Tensor:
        nonlocal cache
        output: Any = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        return output.logits[0, -1]

    return last_logits


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draws a token. logits: of the vocabulary, on the CPU."""
    if not logits.double().logsumexp(-1).isfinite():
        raise UsageError("the model's outputs are inf or nan, because its training diverged: use an earlier checkpoint")
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.double() / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        is_beyond = ordered.cumsum(-1) - ordered >= sampling.top_p  # the first token is never beyond
        probabilities = probabilities.index_fill(0, order[is_beyond], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def codec_of(source: Source) -> Codec:
    """Returns what turns text into tokens and back. Raises UsageError if the model does not know its tokenizer."""
    if source.tokenizer_json is None:
        raise UsageError(
            f"{source.where} does not know its tokenizer: train with data.tokenizer, or copy tokenizer.json"
        )
    return Codec(None if source.is_bytes else source.tokenizer_json, f"the tokenizer of {source.where}")
