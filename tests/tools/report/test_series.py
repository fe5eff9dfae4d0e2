"""Fewer points than steps, and still every extreme and every gap."""

import numpy as np
import pytest

from slipstream.tools.report.series import MAX_POINTS, evenly, series, short, thin


def test_a_short_column_is_drawn_whole() -> None:
    values = np.arange(MAX_POINTS, dtype=float)
    assert thin(values).tolist() == list(range(MAX_POINTS))


@pytest.mark.parametrize("where", [0, 1, 7_777, 49_998, 49_999])
@pytest.mark.parametrize("spike", [-50.0, 50.0, np.nan])
def test_a_spike_or_a_gap_of_one_step_survives(where: int, spike: float) -> None:
    values = np.sin(np.arange(50_000) / 700)
    values[where] = spike
    kept = thin(values)
    assert len(kept) <= MAX_POINTS
    assert where in kept
    assert {0, 49_999} <= set(kept.tolist())


def test_the_extremes_of_every_stretch_are_kept() -> None:
    values = np.random.default_rng(0).normal(size=49_900)
    kept = thin(values)
    drawn = values[kept]
    for begin in range(0, 49_900, 100):  # 499 stretches
        inside = (kept >= begin) & (kept < begin + 100)
        assert drawn[inside].min() == values[begin : begin + 100].min()
        assert drawn[inside].max() == values[begin : begin + 100].max()


def test_a_thinned_line_has_means_beside_its_extremes_and_not_too_many_points() -> None:
    steps = np.arange(1.0, 40_001.0)
    values = np.where(steps % 2 == 0, 3.0, 1.0)
    values[30_000:] = np.nan
    line = series("loss", 0, steps, values)
    assert len(line["x"]) + len(line["means"]["x"]) <= MAX_POINTS
    assert line["means"]["y"][0] == pytest.approx(2.0, abs=0.05)
    assert line["means"]["y"][-1] is None


def test_what_is_not_finite_becomes_a_gap() -> None:
    line = series("loss", 0, np.array([1.0, 2.0, 3.0]), np.array([1.5, np.nan, np.inf]))
    assert line["x"] == [1, 2, 3]
    assert line["y"] == [1.5, None, None]
    assert line["means"] is None


def test_numbers_are_short_and_whole_where_they_can_be() -> None:
    assert short(2.4403701623280845) == 2.44037
    assert short(4096.0) == 4096 and isinstance(short(4096.0), int)
    assert short(float("nan")) is None


def test_even_samples_have_both_ends() -> None:
    assert evenly(0, 10).tolist() == []
    assert evenly(3, 10).tolist() == [0, 1, 2]
    kept = evenly(10_000, 100)
    assert len(kept) == 100 and kept[0] == 0 and kept[-1] == 9_999
