"""benchmarks/time_to_loss.py: what counts as the time of a run on a machine where others take cores away."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import time_to_loss

    return time_to_loss


def played(script, disturbed: set[int], num_turns: int = 20, slower_from: int = 1000):
    """Turns of 5 s, 10 s apart, with steps of 0.1 s, or 0.5 s in the disturbed ones. From `slower_from` on steps take
    twice as long. The first step ends after 2 s."""
    turns, moments = [], []
    for i in range(num_turns):
        begin = 10.0 * i
        turns.append(script.Turn(begin, begin + 5, 0.3 if i in disturbed else 0.0))
        step = (0.5 if i in disturbed else 0.1) * (2 if i >= slower_from else 1)
        before = 2.0 - step if i == 0 else 0.0
        moments += [round(begin + before + n * step, 6) for n in range(1, round((5 - before) / step) + 1)]
    return turns, moments


def test_steps_of_disturbed_turns_take_as_long_as_the_others(script):
    disturbed = {3, 4, 11}
    turns, moments = played(script, disturbed)
    weights = script.weights_of(turns, moments)
    assert [i for i, weight in enumerate(weights) if weight != 1] == sorted(disturbed)
    first, last = (script.computed_until(moment, turns, weights) for moment in (moments[0], moments[-1]))
    assert last - first == pytest.approx(0.1 * (len(moments) - 1), rel=1e-6)


def test_the_others_are_those_of_the_same_time_because_a_machine_may_become_slower(script):
    turns, moments = played(script, {5, 55}, num_turns=60, slower_from=30)
    weights = script.weights_of(turns, moments)
    assert weights[5] == weights[55] == pytest.approx(0.2)


def test_without_disturbance_or_with_too_few_other_turns_the_time_is_that_of_the_clock(script):
    for disturbed in (set(), set(range(11))):
        turns, moments = played(script, disturbed)
        weights = script.weights_of(turns, moments)
        assert weights == [1.0] * len(turns)
        assert script.computed_until(moments[-1], turns, weights) == pytest.approx(5 * len(turns))


def test_a_stop_in_the_middle_of_an_evaluation_is_no_part_of_it(script):
    rows = []
    for step in range(1, 61):
        after = step % 10 == 1 and step > 1
        seconds = [0.0, (5.4 if step == 21 else 0.4) if after else 0.0]
        if step % 10 == 0 and step < 60:  # the last one comes after all rows
            seconds = [0.5, 0.2]
        rows.append({"step": step, "stage_seconds": [{"evaluation": each} for each in seconds]})
        if step % 10 == 0:
            rows.append({"step": step, "val_loss": 1.0})
    assert script.evaluation_seconds(rows, statistics.median) == pytest.approx(0.6)


def test_both_runs_are_timed_to_where_they_first_have_the_loss(script):
    synchronous = script.Run(script.SYNCHRONOUS, 0, 4, [10.0, 20.0, 30.0, 40.0], [4.0, 3.0, 1.0, 2.0])
    delayed = script.Run(script.DELAYED, 0, 4, [5.0, 10.0, 15.0], [4.0, 3.0, 1.0])
    rows = [[cell.strip() for cell in row.split("|")] for row in script.table([synchronous, delayed]).split("\n")[2:]]
    assert [row[5] for row in rows] == ["25", "12"]  # 1F1B was at its final loss of 2 before its end
    assert [row[6] for row in rows] == ["1.00", "2.00"]


def test_an_output_of_another_form_is_refused(script, tmp_path):
    (tmp_path / "old.json").write_text('[{"stolen": 0.1}]')
    with pytest.raises(script.RunFailure, match="give another --output"):
        script.earlier_runs(tmp_path / "old")
