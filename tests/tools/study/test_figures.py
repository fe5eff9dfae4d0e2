"""Pictures of a study: they are drawn, they hold something, and no record that may occur breaks them."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.figures import draw_axis, draw_course
from slipstream.tools.study import figures
from slipstream.tools.study.figures import draw_cosines, draw_gaps, draw_losses
from slipstream.tools.study.record import Evaluation, Record
from slipstream.tools.study.results import rows

Drawing = Callable[[list[Record], Path], Path | None]

STEPS = 200


def cell(mode: str, gap: float | None, seed: int = 0, optimizer: str = "muon", **changes: Any) -> Record:
    """A run that ends `gap` above 2.0, the loss of sync; None: it diverged half-way."""
    steps = changes.pop("steps", STEPS)
    name = f"{optimizer} {seed} {steps}"
    end = 2.0 + (gap or 0.0) + 0.01 * seed
    places = np.linspace(0, 1, 11 if gap is not None else 6)
    curve = [Evaluation(int(steps * x), int(steps * 1e5 * x), end + 6 * math.exp(-9 * x)) for x in places]
    values: dict[str, Any] = {
        "id": f"{name} {mode} {changes}" if mode != "sync" else f"{name} sync",
        "setting": {},
        "baseline": f"{name} sync",
        "learning_rate": 0.01,
        "final_loss": None if gap is None else curve[-1].loss,
        "evaluations": curve,
        "cosines": {"matrices": [(s, 0.9 - s / 1000) for s in range(1, steps, 2)], "rest": [(1, 0.4), (3, 0.5)]},
    }
    values |= changes
    rest = {"parameters": 1000, "seconds": 1.0, "tokens_per_second": 1.0, "optimizer_share": 0.1, "study": "main"}
    return Record(optimizer=optimizer, mode=mode, seed=seed, steps=steps, tokens=int(steps * 1e5), **values, **rest)


def grid(modes: dict[str, float | None], seeds: int = 2, **changes: Any) -> list[Record]:
    return [cell(mode, gap, seed, **changes) for mode, gap in modes.items() for seed in range(seeds)]


def draw_axis_of_steps(records: list[Record], path: Path) -> Path | None:
    return draw_axis(records, "train.steps", path)


ALL = [draw_losses, draw_gaps, draw_course, draw_cosines, draw_axis_of_steps]

DELAYED = {"sync": 0.0, "async": 0.3, "ef": 0.1}
TWO_OPTIMIZERS = grid(DELAYED) + grid(DELAYED, optimizer="torch.optim.SGD")
WIDE = grid({"sync": 0.0, "async": 0.9, "ef": 0.0004, "half": -0.01})
POSITIVE_AND_WIDE = grid({"sync": 0.0, "async": 0.9, "ef": 0.03})
NO_GAP = grid({"sync": 0.0, "async": 0.0, "ef": -0.2}, seeds=1)
MANY_SETTINGS = [
    record for k in range(1, 8) for record in grid(DELAYED, steps=100 * k, setting={"train.steps": 100 * k})
]
ONE_FAR_ABOVE = grid({"sync": 0.0, "async": 5.0, "ef": 0.1})
ONE_DIVERGED = [*grid(DELAYED), cell("async", None, seed=5), cell("sync", 0.0, seed=5)]
NO_ASYNC_AND_NO_SYNC = [
    *grid({"sync": 0.0, "ef": 0.1}),
    *grid({"sync": None, "async": 0.3}, optimizer="lion"),
    *grid(DELAYED, optimizer="adamw"),
]
MANY_MODES = grid({**DELAYED, **{f"mode {index}": 0.1 * index for index in range(12)}})
SETTINGS = [
    *grid(DELAYED),
    *grid({"ef": 0.2}, setting={"optimizer.error_feedback": 0.5}),
    *grid({"ef": 0.1}, setting={"optimizer.error_feedback": 1.0}),
    *grid(DELAYED, steps=20),
]


def assert_picture(path: Path | None, expected: Path) -> None:
    from matplotlib import image

    assert path == expected
    pixels = image.imread(path)
    height, width = pixels.shape[:2]
    assert 900 <= width <= 2000 and 250 <= height <= 3000
    # Drawn in ink and colour: not a blank page, nor only a frame.
    colourful = np.ptp(pixels[..., :3], axis=-1) > 0.3
    assert colourful.mean() > 1e-4


@pytest.mark.parametrize(
    ("draw", "records"),
    [
        pytest.param(draw_losses, TWO_OPTIMIZERS, id="losses of two optimizers"),
        pytest.param(draw_losses, ONE_FAR_ABOVE, id="losses, one far above"),
        pytest.param(draw_losses, ONE_DIVERGED, id="losses, one diverged"),
        pytest.param(draw_losses, SETTINGS, id="losses of several settings"),
        pytest.param(draw_losses, MANY_SETTINGS, id="losses of many settings"),
        pytest.param(draw_cosines, MANY_SETTINGS, id="cosines of many settings"),
        pytest.param(draw_gaps, WIDE, id="gaps over orders of magnitude"),
        pytest.param(draw_gaps, NO_GAP, id="no gaps"),
        pytest.param(draw_gaps, ONE_DIVERGED, id="gaps, one diverged"),
        pytest.param(draw_gaps, NO_ASYNC_AND_NO_SYNC, id="gaps without async, or with sync diverged"),
        pytest.param(draw_gaps, MANY_MODES, id="gaps of many modes"),
        pytest.param(draw_gaps, SETTINGS, id="gaps of several settings"),
        pytest.param(draw_course, TWO_OPTIMIZERS, id="course of two optimizers"),
        pytest.param(draw_course, WIDE, id="course, one below sync"),
        pytest.param(draw_course, ONE_DIVERGED, id="course, one diverged"),
        pytest.param(draw_cosines, TWO_OPTIMIZERS, id="cosines of two optimizers"),
        pytest.param(draw_cosines, SETTINGS, id="cosines of several settings"),
        pytest.param(draw_axis_of_steps, WIDE, id="axis over orders of magnitude"),
        pytest.param(draw_axis_of_steps, POSITIVE_AND_WIDE, id="axis over positive orders of magnitude"),
        pytest.param(draw_axis_of_steps, ONE_DIVERGED, id="axis, one diverged"),
        pytest.param(draw_axis_of_steps, SETTINGS, id="axis of several settings"),
    ],
)
def test_a_study_is_drawn(tmp_path: Path, draw: Drawing, records: list[Record]):
    pytest.importorskip("matplotlib")
    assert_picture(draw(records, tmp_path / "a.png"), tmp_path / "a.png")


@pytest.mark.parametrize("draw", ALL)
def test_where_all_diverged_there_still_is_a_picture(tmp_path: Path, draw: Drawing):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    assert draw(grid({"sync": None, "async": None}), path) == path
    assert path.stat().st_size > 5000


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_record_is_drawn_or_not_but_never_breaks(tmp_path: Path, draw: Drawing, mode: str):
    pytest.importorskip("matplotlib")
    drawn = draw([cell(mode, 0.1)], tmp_path / "a.png") is not None
    assert drawn is (draw is draw_losses or (draw is draw_cosines and mode == "async"))
    assert (tmp_path / "a.png").exists() is drawn


@pytest.mark.parametrize("draw", ALL)
def test_nothing_to_draw_is_no_picture(tmp_path: Path, draw: Drawing):
    assert draw([], tmp_path / "a.png") is None
    assert draw([cell("async", 0.1, evaluations=[], cosines={})], tmp_path / "a.png") is None
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("draw", ALL)
def test_without_matplotlib_there_is_no_picture(tmp_path: Path, draw: Drawing, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert draw(grid(DELAYED), tmp_path / "a.png") is None


def test_more_settings_than_styles_of_lines_get_a_panel_for_every_synchronous_run():
    late = grid({"ef": 0.1}, steps=100, setting={"train.steps": 100, "pipeline.sync_start_steps": 50})
    table = rows([*MANY_SETTINGS, *late])
    names, owners, labels = figures._owners(table)
    assert names == [f"muon\nsteps {100 * k}" for k in range(1, 8)]
    assert [names[owner] for owner in owners] == [f"muon\nsteps {row.axes['train.steps']}" for row in table]
    assert set(labels) == {"", "sync_start_steps 50"}
    alone = [cell("ef", gap, steps=70, learning_rate=gap) for gap in (0.1, 0.2)]  # against one that is not there
    table = rows([*MANY_SETTINGS, *alone])
    names, owners, labels = figures._owners(table)
    assert names == [f"muon\nsteps {steps}" for steps in (*range(100, 701, 100), 70)]
    assert [label for owner, label in zip(owners, labels, strict=True) if owner == 7] == ["lr 0.1", "lr 0.2"]
    few = rows(SETTINGS)
    names, owners, labels = figures._owners(few)
    assert names == ["muon"] and set(owners) == {0} and len(set(labels)) > 1


def test_records_from_a_file_are_drawn_though_json_has_no_nan(tmp_path: Path):
    pytest.importorskip("matplotlib")
    odd = cell("async", None, evaluations=[Evaluation(0, 0, 5.0), Evaluation(100, 10_000_000, math.nan)])
    records = [Record.from_json(record.to_json()) for record in [*grid(DELAYED, seeds=1), odd]]
    for draw in (draw_losses, draw_cosines):
        assert_picture(draw(records, tmp_path / "a.png"), tmp_path / "a.png")


def test_an_axis_may_be_any_number_that_the_settings_hold(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    records = grid({"sync": 0.0})
    for momentum in (0.0, 0.5, 0.9, 0.95, 0.98, 0.99):
        for nesterov in (True, False):
            setting = {"optimizer.momentum": momentum, "optimizer.nesterov": nesterov}
            records += grid({"async": 0.2 - 0.1 * momentum + 0.05 * nesterov}, setting=setting)
    assert_picture(draw_axis(records, "optimizer.momentum", path), path)
    assert draw_axis(records, "optimizer.nesterov", path) is None
    assert draw_axis(records, "optimizer.beta1", path) is None


def test_the_loss_axis_leaves_out_the_first_evaluations_and_keeps_every_end_that_fits():
    low, high = figures._loss_range(grid(DELAYED))
    assert low < 2.0 and 2.3 < high < 4.0
    # One far above must not squeeze the rest.
    _, high = figures._loss_range(grid({**DELAYED, "half": 5.0}))
    assert high < 4.0


def test_seeds_are_averaged_where_all_were_evaluated():
    x, mean, least, greatest = figures._over_seeds([[(0, 4.0), (5, 3.0), (10, 2.0)], [(0, 5.0), (10, 3.0)]])
    assert (x.tolist(), mean.tolist()) == ([0, 10], [4.5, 2.5])
    assert (least.tolist(), greatest.tolist()) == ([4.0, 2.0], [5.0, 3.0])
    assert all(len(values) == 0 for values in figures._over_seeds([]))


def test_smoothing_keeps_a_constant_and_the_length():
    assert figures._smooth(np.full(1000, 0.7)) == pytest.approx(np.full(1000, 0.7))
    assert figures._smooth(np.array([0.1, 0.9])).tolist() == pytest.approx([0.1, 0.9])
