"""`slipstream bench` from end to end, on the smallest matrix, and what it refuses."""

from __future__ import annotations

import json

import pytest
from harness import forks

from slipstream.cli.bench import main as bench
from slipstream.errors import UsageError
from slipstream.tools.bench.matrix import worlds


@forks
@pytest.mark.filterwarnings("ignore")  # torch's own, in the forked stages
def test_quick_measures_every_contender_and_writes_its_files(tmp_path, capsys):
    bench(["--quick", "--only", "emulated", "--output", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    [world] = results["worlds"]
    measured = {contender["row"]["name"]: contender["row"] for contender in world["contenders"]}
    refused = {name for name, row in measured.items() if row["failure"]}
    assert refused == {"torch DualPipeV", "slipstream two_bw, double depth"}  # two microbatches are too few for them
    assert len(measured) == 12
    for name in measured.keys() - refused:
        assert measured[name]["step_seconds"]["median"] >= 0.06, name  # two microbatches of 30 ms
        assert measured[name]["ideal"] is not None, name
    assert measured["slipstream two_bw"]["predicted_seconds"] >= 0.06
    assert "emulated" in results["prediction_errors"]
    assert (tmp_path / "out" / "figure.png").stat().st_size > 0
    line = "| slipstream two_bw |"
    assert line in (tmp_path / "out" / "table.md").read_text() and line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "1"], "stages = 1 cannot be compared: use 2 to 32"),
        (["--rounds", "0"], "rounds = 0 measures nothing: use 1 or more"),
        (["--only", "real", "--stages", "4"], "stages = 4 is for emulated compute"),
        (["--only", "surreal"], "only = 'surreal' is invalid"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_work(arguments, words, tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(UsageError, match=words):
        bench([*arguments, "--output", str(folder)])
    assert not folder.exists()


def test_results_are_never_overwritten(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UsageError, match="has results already: choose another folder"):
        bench(["--output", str(tmp_path)])


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        bench(["--output", str(tmp_path / "file" / "below")])


def test_the_matrix_has_all_m_for_equal_stages_and_slow_links_for_slipstream_alone():
    matrix = worlds(emulated_stages=[4], with_real=True, num_rounds=3)
    equal = [w for w in matrix if w.workload == "emulated" and not w.unbalanced]
    assert [w.contenders[0].num_microbatches for w in equal] == [4, 8, 16, 8, 4]
    slow = [w for w in matrix if any(contender.latency_seconds for contender in w.contenders)]
    assert len(slow) == 1 and {contender.engine for contender in slow[0].contenders} == {"slipstream"}
    (over_gloo,) = [w for w in matrix if not w.shared_memory]
    assert [contender.clip_norm for contender in over_gloo.contenders] == [None, None, 1.0]
    assert {w.num_stages for w in matrix if w.workload == "real"} == {2}
    assert {w.workload for w in matrix if w.unbalanced} == {"emulated", "real"}
