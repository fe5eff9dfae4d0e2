"""A contender's memory is what its process grew by, at most."""

from __future__ import annotations

import sys

import pytest
import torch
from harness import forks

from slipstream.tools.bench.contenders import Contender, Refused, World
from slipstream.tools.bench.memory import peak_memory

CONTENDER = Contender("r", 2)
WORLD = World("emulated", 2, (CONTENDER,), num_rounds=1, num_steps=5)
MEBIBYTE = 2**20

pytestmark = [forks, pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked")]


def test_what_a_process_held_for_a_while_counts(monkeypatch):
    def run(contender, world, transport, num_steps):
        torch.ones(transport.stage * 64 * MEBIBYTE // 4)  # freed at once

    monkeypatch.setattr("slipstream.tools.bench.memory.run", run)
    assert 60 * MEBIBYTE < peak_memory(CONTENDER, WORLD) < 96 * MEBIBYTE


@pytest.mark.parametrize("error", [Refused("no"), RuntimeError("broken")])
def test_a_contender_that_does_not_run_has_no_memory(monkeypatch, error):
    def run(*arguments):
        raise error

    monkeypatch.setattr("slipstream.tools.bench.memory.run", run)
    assert peak_memory(CONTENDER, WORLD) is None
