"""Turns the prompts of `evaluation.prompts` into tokens, and what the model adds to them into text."""

from __future__ import annotations

from collections.abc import Sequence

from .tokens import DataError


class Codec:
    def __init__(self, tokenizer: str, tokenizer_json: bytes | None) -> None:
        """tokenizer, tokenizer_json: name and file, as in `Corpus`."""
        self._library = None
        if tokenizer == "bytes":
            return
        if tokenizer_json is None:
            raise DataError("evaluation.prompts needs the tokenizer, which data.sources does not tell: leave it out.")
        try:
            import tokenizers
        except ImportError:
            raise DataError(
                "evaluation.prompts needs the tokenizers library: pip install 'slipstream[text]'."
            ) from None
        self._library = tokenizers.Tokenizer.from_str(tokenizer_json.decode())

    def encode(self, text: str) -> list[int]:
        if self._library is None:
            return list(text.encode())
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if self._library is None:
            return bytes(number for number in ids if number < 256).decode(errors="replace")
        text: str = self._library.decode(list(ids))
        return text
