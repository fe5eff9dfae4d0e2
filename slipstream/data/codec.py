"""Turns prompts into tokens, and what a model adds to them into text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .tokens import DataError, optional


class Codec:
    def __init__(self, tokenizer_json: bytes | None, whose: str) -> None:
        """tokenizer_json: None means that every byte is the token of its own number. whose: what needs the codec, for
        the error message where the tokenizers library is missing."""
        self._library = None
        if tokenizer_json is not None:
            tokenizers = optional("tokenizers", "text", whose)
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

    def stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Yields text as it becomes known. A letter may need several tokens."""
        known: list[int] = []
        said = ""
        for number in ids:
            known.append(number)
            text = self.decode(known)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(said) :]
                said = text
        yield self.decode(known)[len(said) :]


def codec_of_corpus(tokenizer: str, tokenizer_json: bytes | None) -> Codec:
    """Returns the codec for `evaluation.prompts`. tokenizer, tokenizer_json: name and file, as in `Corpus`."""
    is_bytes = tokenizer == "bytes"
    if tokenizer_json is None and not is_bytes:
        raise DataError("evaluation.prompts needs the tokenizer, which data.sources does not tell: leave it out.")
    return Codec(None if is_bytes else tokenizer_json, "evaluation.prompts")
