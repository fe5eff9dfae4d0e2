"""Counts the bytes of text that tokens stand for, so that losses of different tokenizers can be compared."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np

from ..model.decoder import IGNORE
from .batches import ValidationBatches
from .byte_tokenizer import BYTES


@dataclass(frozen=True)
class TextSize:
    """The size of the text that is evaluated."""

    num_tokens: int
    """Number of targets that count in the loss."""
    num_bytes: int
    """Number of bytes that these targets stand for."""

    def bits_per_byte(self, loss: float) -> float:
        """Returns a loss in nats per token as bits per byte."""
        return loss * self.num_tokens / math.log(2) / self.num_bytes


def text_size(batches: ValidationBatches, tokenizer: str, tokenizer_json: bytes | None) -> TextSize | None:
    """Returns the size of the text that every evaluation reads. None means that it is unknown.

    tokenizer, tokenizer_json: name and file of the tokenizer, as in `Corpus`.
    """
    num_tokens = sum(map(batches.num_tokens, range(len(batches))))
    if tokenizer == "bytes":
        return TextSize(num_tokens, num_tokens)
    lengths = None if tokenizer_json is None else byte_lengths(tokenizer_json)
    if lengths is None:
        return None
    num_bytes = 0
    for index in range(len(batches)):
        targets = batches(index)[1].numpy()
        targets = targets[targets != IGNORE]
        if targets.max() >= len(lengths):  # the ids are not of this tokenizer
            return None
        num_bytes += int(lengths[targets].sum())
    return TextSize(num_tokens, num_bytes) if num_bytes else None


def byte_lengths(tokenizer_json: bytes) -> np.ndarray | None:
    """Returns the number of bytes of every token id. Special tokens are no text and have 0 bytes.

    Returns None if the tokens do not stand for certain bytes, as those of a tokenizer that drops spaces, or if the
    tokenizers library is missing. A ByteLevel tokenizer writes every byte as one letter.
    """
    if (json.loads(tokenizer_json).get("decoder") or {}).get("type") != "ByteLevel":
        return None
    try:
        import tokenizers
    except ImportError:
        return None
    library = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    letters = frozenset(BYTES)
    sizes = {
        number: len(token) if letters.issuperset(token) else len(token.encode())
        for token, number in library.get_vocab(with_added_tokens=False).items()
    }
    for number, added in library.get_added_tokens_decoder().items():  # these are matched in the text as they are
        sizes[number] = 0 if added.special else len(added.content.encode())
    lengths = np.zeros(max(sizes, default=-1) + 1, dtype=np.int64)
    lengths[list(sizes)] = list(sizes.values())
    return lengths
