"""benchmarks/checkpoint_pause.py: which steps have checkpoints, and what is counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from harness import forks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def pause(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import checkpoint_pause

    return checkpoint_pause


def test_blocks_take_turns_and_each_has_the_time_to_write_what_it_saves(pause):
    plan = pause.Plan(num_pairs=2, block_steps=4, every=2)
    assert [plan.has_checkpoints(block) for block in range(4)] == [True, False, False, True]
    assert [done for done in range(plan.num_steps) if plan.saves(done)] == [2, 6, 8, 18, 20]
    assert [plan.block(step) for step in (5, 6, 9, 10, 21, 22)] == [None, 0, 0, 1, 3, None]


def test_what_a_block_with_checkpoints_takes_longer_is_theirs(pause):
    """Steps of a second, and half a second more for every checkpoint."""
    plan = pause.Plan(num_pairs=2, block_steps=4, every=2)
    clock, ends = 0.0, []
    for step in range(plan.num_steps):
        clock += 1.5 if plan.saves(step) and step >= pause.WARM_UP else 1.0
        ends.append(clock)
    saved = [done for done in range(plan.num_steps) if plan.saves(done)]
    copies = [pause.Copied(done, 0.1, 0.05) for done in saved]
    # That of step 8 is late: the block ends with step 9.
    parts = [pause.Written(done, ends[done - 1], 3.0 if done == 8 else 0.5, 0.4, 1000) for done in saved]
    quicker = [end - 0.01 * i for i, end in enumerate(ends)]
    stages = [pause.StageRun(ends, copies, parts, 5, []), pause.StageRun(quicker, copies, parts[:-1], 5, [])]
    result = pause.evaluate(plan, stages)
    assert result.share == pytest.approx(0.25) and result.share_error == pytest.approx(0)
    assert result.seconds_per_checkpoint == pytest.approx([0.5, 1.0])  # of the second pair, one is missing
    assert result.copy_share == pytest.approx(0.05) and result.copy_core_seconds == pytest.approx([0.1] * 3)
    assert (result.num_asked, result.num_saved, result.num_late) == (4, 3, 2)  # one stage has no part of step 20
    assert result.written_bytes == 2000 and result.writing_core_seconds == pytest.approx([0.8] * 3)
    assert "25.00 % ± 0.00" in pause.table(result, plan.every)


@forks
def test_a_short_run_leaves_figures_and_a_page_behind(pause, monkeypatch, tmp_path):
    options = ["--preset", "tiny", "--sequence-length", "16", "--blocks", "2", "--steps", "2", "--every", "2"]
    places = ["--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "pause.json")]
    monkeypatch.setattr(sys, "argv", ["checkpoint_pause.py", *options, *places])
    pause.main()
    figures = json.loads((tmp_path / "pause.json").read_text())
    assert len(figures["result"]["pairs"]) == 1 and figures["plan"]["every"] == 2
    assert "added to a step, one checkpoint in 2" in (tmp_path / "pause.md").read_text()
    assert str(tmp_path) not in (tmp_path / "pause.md").read_text()
    assert list((tmp_path / "runs").iterdir()) == []
