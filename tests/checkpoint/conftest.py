"""What tests of checkpoints share."""

import os

import pytest


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves what it wrote to the system, synced or not; an fsync is an operation all the same."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
