"""A tiny model to tune, and proxies of it that take seconds."""

from __future__ import annotations

import pytest
from settings import changed

from slipstream.config.schema import Config
from slipstream.tools.tune import proxies as sizes

TARGET = changed(
    Config(),
    model__dim=32,
    model__num_layers=1,
    model__num_heads=4,
    model__num_kv_heads=2,
    model__hidden_dim=48,
    model__sequence_length=16,
    optimizer__name="adamw",
    train__microbatch_size=2,
    train__device="cpu",
    evaluation__batches=4,
)


@pytest.fixture
def short(monkeypatch):
    """Proxies so short that a tuning takes seconds."""
    monkeypatch.setattr(sizes, "MIN_STEPS", 4)
    monkeypatch.setattr(sizes, "VALIDATION_TOKENS", 512)
