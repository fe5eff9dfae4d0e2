"""benchmarks/stage_speed.py: what it counts as useful, and that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slipstream.model.decoder import decoder
from slipstream.model.presets import PRESETS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_useful_work_is_six_for_every_weight_a_token_meets_and_attention_over_half_the_sequence(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from stage_speed import flops_per_token

    model = PRESETS["tiny"]
    layers = decoder(model)
    visible = (model.sequence_length + 1) / 2
    attention = 12 * model.dim * visible
    block = sum(p.numel() for p in layers.block1.parameters() if p.ndim > 1)
    assert flops_per_token(model, 1, 2) == pytest.approx(2 * (6 * block + attention))
    assert flops_per_token(model, 0, 3) == flops_per_token(model, 1, 2)  # looking up an embedding is no product
    assert flops_per_token(model, 5, 1) == 6 * model.dim * model.vocab_size


def test_a_quick_run_leaves_figures_behind(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import stage_speed

    output = tmp_path / "stage.json"
    words = ["--device", "cpu", "--quick", "--preset", "moe-10b", "--stage", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["stage_speed.py", *words])
    stage_speed.main()
    found = json.loads(output.read_text())
    assert found["layers"] == ["block2", "block3", "head"]
    seconds = found["seconds"]
    assert 0 < seconds["forward"] < seconds["step"] and 0 < seconds["backward"] < seconds["step"]
    assert found["tokens_per_second"] == pytest.approx(4 * 64 / seconds["step"])
    assert 0 < found["mfu"]["of_measured_ceiling"] < 1
    assert "MFU" in capsys.readouterr().out
