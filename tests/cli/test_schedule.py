"""What `slipstream schedule` says and writes."""

import sys

import pytest

from slipstream.cli.schedule import show
from slipstream.schedule import SCHEDULES, Schedule, ScheduleError
from slipstream.schedule.simulate import Costs


def test_it_prints_the_grid_and_what_was_found():
    text = show(Schedule("two_bw", 4, 4, 3), Costs())
    assert text.startswith("S0  F0/0   F1/0 ")
    for line in (
        "two_bw: 4 stages, 4 microbatches a step",
        "  checked        108 actions of 3 steps: no deadlock",
        "  delay          1 on every stage",
        "  live versions  2 on every stage",
        "  in flight      4, 3, 2, 1 from stage 0 to 3",
        "  bubble         0.0 % of the steady state, step time 12",
    ):
        assert line in text.splitlines()


def test_paci_tells_its_drift_and_a_range_of_delays():
    text = show(Schedule("paci", 4, 2, 6, global_update=False), Costs())
    assert "  delay          0 to 2, 0 to 1, 0 to 1, 0 from stage 0 to 3" in text
    assert "  drift          a backward runs up to 2 updates after its forward" in text


def test_many_stages_are_abridged():
    text = show(Schedule("one_f_one_b", 20, 20, 1), Costs())
    assert "  in flight      20, 19, 18, 17, 16, 15, 14, 13, ..., 2, 1 from stage 0 to 19" in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_step_is_enough_to_hear_of_the_steady_state(name):
    assert "% of the steady state" in show(Schedule(name, 3, 3, 1), Costs())


def test_it_writes_drawings_by_their_suffix_and_names_them(tmp_path):
    paths = [tmp_path / "new" / "a.svg", tmp_path / "new" / "a.png"]
    text = show(Schedule("two_bw", 2, 2, 3), Costs(), paths)
    assert paths[0].read_text(encoding="utf-8").startswith("<svg")
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert all(f"  drawn in       {path}" in text for path in paths)


def test_a_suffix_it_cannot_draw_is_refused_before_anything_is_written(tmp_path):
    paths = [tmp_path / "a.svg", tmp_path / "a.pdf"]
    with pytest.raises(ScheduleError, match=r"a\.pdf cannot be drawn: end its name in one of \.svg, \.png"):
        show(Schedule("two_bw", 2, 2, 3), Costs(), paths)
    assert not paths[0].exists()


def test_a_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ScheduleError, match=r"a\.png needs matplotlib: install slipstream\[plot\]"):
        show(Schedule("two_bw", 2, 2, 3), Costs(), [tmp_path / "a.png"])
