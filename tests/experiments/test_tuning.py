"""The sweep at the target finds the best setting, also beyond its first edges."""

import json
import math
from pathlib import Path

import pytest
import tuning
from settings import changed

from slipstream.config.schema import Config
from slipstream.config.toml import to_toml
from slipstream.tools.study.grid import Grid
from slipstream.tools.study.record import Record
from slipstream.tools.tune import fit as fitting

TARGET = changed(Config(), model__dim=32, model__num_layers=1, model__sequence_length=16, train__device="cpu")
BEST_RATE, BEST_SEQUENCES = 0.03, 16


def loss_of(rate: float, sequences: int, is_late: bool) -> float:
    best = BEST_RATE * math.sqrt(sequences / BEST_SEQUENCES)
    late = 0.03 if is_late else 0.0
    return 2 + 0.02 * math.log(rate / best) ** 2 + 0.01 * math.log(sequences / BEST_SEQUENCES) ** 2 + late


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuning.Sweep:
    """A prediction whose rate and batch are four times too small, and runs whose losses follow a law."""
    said = {"rate": 0.004, "rate_band": [0.002, 0.008], "batch": 4 * 16, "batch_band": [10.0, 90.0], "loss": 2.02}
    said |= {"loss_band": [2.0, 2.05], "gap": 0.02, "gap_band": [0.01, 0.04]}
    config = changed(TARGET, pipeline__microbatches=2, train__microbatch_size=2)
    (tmp_path / "tuned.toml").write_text(to_toml(config))
    tree = {"prediction": said, "target": {"tokens": 4e6}, "trunks": [{"flops": 1e9}, {"flops": 2e9}]}
    tree["setting"] = {"learning_rate": said["rate"]}
    (tmp_path / "tune.json").write_text(json.dumps(tree))

    def run_study(grid: Grid, *_: object) -> list[Record]:
        found = []
        for cell in grid.cells:
            section, rate = cell.config.train, cell.config.optimizer.learning_rate
            assert rate is not None
            loss = loss_of(rate, section.microbatch_size, not cell.is_synchronous) + 0.001 * section.seed
            numbers = (rate, section.steps, section.steps * section.microbatch_size * 16, 1000, loss, 1.0, 1.0, 0.1)
            place = (cell.id, grid.name, "muon", cell.mode, section.seed, cell.setting, cell.synchronous().id)
            found.append(Record(*place, *numbers))
        return found

    monkeypatch.setattr(tuning, "run_study", run_study)
    monkeypatch.setattr(fitting, "NUM_SAMPLES", 16)
    return tuning.Sweep(tmp_path, None)


def test_it_goes_on_beyond_its_edges(sweep: tuning.Sweep, tmp_path: Path) -> None:
    sweep.explore()
    found = {sequences: tuning.bottom(at) for sequences, at in sweep.losses().items()}
    assert min(found, key=lambda sequences: found[sequences][1]) == BEST_SEQUENCES
    assert math.isclose(found[BEST_SEQUENCES][0], BEST_RATE, rel_tol=0.02)
    rows = [line.strip("|").split("|") for line in tuning.compare(sweep).splitlines()[2:]]
    measured = {row[0].strip(): (row[3].strip(), row[4].strip()) for row in rows}
    batch, ratio = (float(text.split()[index]) for text, index in zip(measured["batch, tokens"], (0, 1), strict=True))
    assert batch == pytest.approx(16 * BEST_SEQUENCES, rel=0.1) and ratio == pytest.approx(0.25, rel=0.1)
    assert measured["part of the delay"] == ("0.0300 (0.0300, 0.0300)", "inside")
    assert measured["loss at the predicted setting"][1] == "**outside**"
    assert measured["lowest loss of the sweep"][0].startswith("2.03")
    tuning.draw(sweep, tmp_path / "comparison.png")


def test_guesses_are_sorted_by_what_they_lead_to(sweep: tuning.Sweep) -> None:
    rows = tuning.against(sweep, [(0.03, 16), (0.3, 16)]).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["guess 1", "**tuned**", "guess 2"]
    assert rows[0].endswith("| 2.0305 | 2.0300, 2.0310 |")


def test_the_losses_of_a_setting_by_length(sweep: tuning.Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "run_trunk", lambda cell, steps, *_: [*(100 / count for count in steps[:-1]), None])
    head, _, row = tuning.by_length(sweep, [(0.03, 16)]).splitlines()
    assert head.startswith("| rate | tokens a step | 250,000 tokens | 500,000 tokens |")
    assert row == "| 0.03 | 256 | 0.1024 | 0.0512 | 0.0256 | 0.0128 | diverged |"
