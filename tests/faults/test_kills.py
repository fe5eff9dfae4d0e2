"""The short version of `make test-faults`: a few kills, a SIGTERM, a truncated checkpoint. See faults/."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.faults.kills import train_with_kills
from tests.faults.others import Case, truncated
from tests.faults.runs import Shape, differences, undisturbed

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(400),
]

SHAPE = Shape(stages=2, steps=24, every=3, timeout_seconds=60.0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(SHAPE, tmp_path_factory.mktemp("undisturbed"))


def test_a_training_that_is_killed_again_and_again_ends_as_if_it_had_not_been(expected, tmp_path):
    """Four times, unless whoever kills is so slow that the training is over before."""
    lines: list[str] = []
    kills, faults = train_with_kills(SHAPE, 4, 3, tmp_path, expected, lines.append)
    assert not faults, (faults, lines)
    assert 2 <= len(kills) <= 4, lines
    assert all(kill.resumed == kill.newest for kill in kills if kill.newest < SHAPE.steps), lines


def test_a_training_that_is_told_to_end_and_finds_its_checkpoint_truncated_goes_on_from_the_one_before(
    expected, tmp_path
):
    case = Case("truncated", tmp_path, [], SHAPE)
    truncated(case)
    assert not case.faults + differences(case.run_folder, expected)


def test_a_difference_is_seen(expected, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(expected, other, ignore=shutil.ignore_patterns("checkpoints"))
    assert differences(other, expected) == []
    rows = (other / "metrics.jsonl").read_text().splitlines()
    changed = json.dumps({**json.loads(rows[3]), "loss": 1.0})
    (other / "metrics.jsonl").write_text("\n".join([*rows[:3], changed, *rows[4:]]))
    assert len(differences(other, expected)) == 1
    (other / "metrics.jsonl").write_text("\n".join(rows[:-1]))
    (other / "summary.json").write_text((other / "summary.json").read_text().replace('_checksum": "', '_checksum": "0'))
    assert len(differences(other, expected)) == 2
    (other / "summary.json").unlink()
    assert "no summary" in differences(other, expected)[0]
