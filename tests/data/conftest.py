"""A tokenizer for the tests of data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A word-level tokenizer.json that would cut and pad and add what nobody asked for."""
    words = {"<|endoftext|>": 0, "[UNK]": 1, "the": 2, "cat": 3, "sat": 300}
    made = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [
            {"id": 0, "content": "<|endoftext|>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(made))
    return str(path)
