"""From rounds to rows, a table and a document."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace

import pytest

from slipstream.tools.bench.contenders import BARE_LOOP, Contender, Round, StageCosts, World
from slipstream.tools.bench.results import Row, Spread, Table, document, doubts, markdown, prediction_errors, rows_of
from slipstream.tools.bench.turns import Outcome

BARE, OURS, THEIRS = (
    Contender(BARE_LOOP, 2),
    Contender("ours", 2, "two_bw"),
    Contender("theirs", 2, "ScheduleDualPipeV"),
)
COSTS = (StageCosts(forward=0.01, backward=0.02, update=0.0, sums=0.0, overhead=50e-6, overhead_cpu=30e-6),) * 2


def world(workload: str) -> World:
    return World(workload, 2, (BARE, OURS, THEIRS), num_rounds=3, num_steps=6)


def outcomes() -> list[Outcome]:
    bare = [Round(s, facts={"mean_stage_seconds": s / 2}) for s in (0.06, 0.06, 0.06)]
    ours = [Round(s, COSTS) for s in (0.08, 0.06, 0.064)]
    return [Outcome(BARE, tuple(bare)), Outcome(OURS, tuple(ours)), Outcome(THEIRS, (), "torch says: no")]


def table(workload: str) -> Table:
    return Table(world(workload), outcomes(), rows_of(world(workload), outcomes(), [None] * 3))


def test_a_row_has_the_median_round_and_the_spread():
    row = table("emulated").rows[1]
    assert (row.step_seconds.median, row.step_seconds.lowest, row.step_seconds.highest) == (0.064, 0.06, 0.08)
    assert row.utilisation.median == pytest.approx(0.06 / 0.064)
    assert row.per_second == pytest.approx(2 / 0.064)
    assert row.overhead_seconds == pytest.approx(50e-6)
    assert row.overhead_cpu_seconds == pytest.approx(30e-6)
    assert row.predicted_seconds == pytest.approx(0.0602)
    assert row.difference == pytest.approx(0.0602 / 0.064 - 1)


def test_real_work_is_what_the_bare_loop_took_in_the_same_round():
    row = rows_of(world("real"), outcomes(), [None, 30, None])[1]
    assert row.utilisation.median == pytest.approx(0.03 / 0.064)
    assert row.per_second == pytest.approx(2 * 256 / 0.064)
    assert row.memory_bytes == 30


def test_the_table_says_why_a_contender_has_no_figures():
    text = markdown([table("emulated")])
    assert "### emulated compute, P = 2, m = 2, equal processes" in text
    assert "- theirs: torch says: no" in text
    assert "| ours | 31.2 | 64.0 | 60.0 - 80.0 | 0.938 | 0.750 - 1.000 | 1.000 | 50 | 30 | 60.2 | -5.9 % |" in text


def test_the_prediction_error_is_the_median_over_the_matrix_whatever_the_sign():
    errors = prediction_errors([table("emulated"), table("emulated"), table("real")])
    assert errors == {"emulated": pytest.approx(1 - 0.0602 / 0.064), "real": pytest.approx(1 - 0.0602 / 0.064)}


def test_the_document_keeps_every_round():
    made = document([table("emulated")], datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC))
    read = json.loads(json.dumps(made))
    assert read["started"].startswith("2026-01-02")
    assert [each["seconds_per_step"] for each in read["worlds"][0]["contenders"][1]["rounds"]] == [0.08, 0.06, 0.064]
    assert read["worlds"][0]["contenders"][2]["failure"] == "torch says: no"
    assert read["machine"]["torch"]


def test_what_cannot_be_or_differs_from_round_to_round_is_doubted() -> None:
    quiet = Row("contender", Spread(1.0, 0.99, 1.02), 1.0, Spread(0.9, 0.9, 1.01), 1.0, *[None] * 6)
    assert doubts(quiet) == []
    (doubt,) = doubts(replace(quiet, utilisation=Spread(1.84, 1.8, 1.9)))
    assert doubt.startswith("a utilisation of 1.84 cannot be")
    (doubt,) = doubts(replace(quiet, step_seconds=Spread(0.3, 0.24, 0.534)))
    assert doubt.startswith("its rounds differ by 123 %")
