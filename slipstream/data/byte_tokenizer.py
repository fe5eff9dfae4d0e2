"""A tokenizer.json for models whose tokens are bytes, so that other programs can load those too."""

from __future__ import annotations

from typing import Any


def _letters_of_bytes() -> list[str]:
    """Returns the letter by which GPT-2 writes each byte: printable bytes as they are, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTES = _letters_of_bytes()


def byte_vocabulary() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(BYTES)}


def byte_tokenizer() -> dict[str, Any]:
    """Returns a tokenizer.json in which every byte is the token of its own number."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": byte_vocabulary(),
            "merges": [],
        },
    }
