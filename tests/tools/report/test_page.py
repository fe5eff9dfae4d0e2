"""What the page is told: figures, curves, comparison, and that nothing from a file becomes markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import Config
from slipstream.tools.report.page import as_json, page, page_data
from slipstream.tools.report.read import Run, read_run
from slipstream.tools.report.series import MAX_POINTS
from slipstream.train.run_folder import run_folder
from slipstream.train.trainer import train

WriteRun = Callable[..., Path]


def figures_of(*runs: Run) -> dict[str, dict[str, Any]]:
    return {figure["label"]: figure for figure in page_data(runs)["figures"]}


def chart_of(data: dict[str, Any], tab: str, title: str) -> dict[str, Any]:
    return next(chart for chart in data["charts"][tab] if chart["title"] == title)


# ---- one run


def test_the_headline_figures_are_the_summarys(write_run: WriteRun) -> None:
    figures = figures_of(read_run(write_run(), "demo"))
    texts = {label: (figure["values"][0], figure["details"][0]) for label, figure in figures.items()}
    assert texts == {
        "Training loss": ("2.0000", "5.0000 at the first step"),
        "Held-out loss": ("2.1000", "lowest 2.1000 at step 40"),
        "Throughput": ("8,192 tokens/s", "in 20.0 s"),
        "Utilisation": ("85.0\u00a0%", "94.0\u00a0% expected; by stage 90.0, 80.0"),
        "Delay": ("1", "steps on every stage"),
        "Weight versions": ("2", "at most, on a stage"),
        "Peak memory": ("400 MiB", "700 MiB over all stages"),
        "Progress": ("40 of 40 steps", "163,840 tokens"),
    }


def test_a_run_that_goes_on_has_the_figures_its_metrics_hold(write_run: WriteRun) -> None:
    figures = figures_of(read_run(write_run(without=("summary.json", "trace.json"), num_steps=21), "demo"))
    values = {label: figure["values"][0] for label, figure in figures.items()}
    assert values["Training loss"] == "2.0000"
    assert values["Throughput"] == "8,192 tokens/s"
    assert values["Utilisation"] == "85.0\u00a0%"
    assert values["Delay"] == "1"
    assert values["Weight versions"] == values["Peak memory"] == "not known"


def test_a_run_that_has_just_begun_makes_a_page(write_run: WriteRun) -> None:
    run = read_run(write_run(without=("metrics.jsonl", "summary.json", "trace.json")), "demo")
    data = page_data([run])
    assert data["charts"]["overview"][0]["series"] == []
    assert data["splits"][0]["keys"] == []
    assert "demo" in page([run])


def test_curves_have_their_groups_and_gaps(write_run: WriteRun) -> None:
    data = page_data([read_run(write_run(), "demo")])
    loss = chart_of(data, "training", "Loss")
    assert [line["name"] for line in loss["series"]] == ["training", "held out"]
    assert loss["series"][1]["x"] == [10, 20, 30, 40]
    cosine = chart_of(data, "training", "Cosine of an update and what was expected of it")
    assert cosine["series"][0]["y"][:3] == [None, None, 0.8]
    assert chart_of(data, "training", "Error feedback that would have fitted best")["series"] == []
    waiting = chart_of(data, "pipeline", "Waiting, share of each step's time")["series"]
    assert waiting[0]["y"][0] == pytest.approx(0.2 / 1.0)
    assert waiting[1]["y"][1] == pytest.approx(0.1 / 0.9, rel=1e-5)


def test_a_long_run_is_thinned_and_the_page_says_so(write_run: WriteRun) -> None:
    data = page_data([read_run(write_run(num_steps=5000), "demo")])
    assert data["maxPoints"] == MAX_POINTS
    lines = [line for tab in data["charts"].values() for chart in tab for line in chart["series"]]
    assert lines and all(len(line["x"]) + len(line["means"]["x"]) <= MAX_POINTS for line in lines if line["means"])
    assert len(data["runs"][0]["clock"]["steps"]) < 500
    assert page_data([read_run(write_run(), "demo")])["maxPoints"] is None


def test_the_clock_counts_from_the_start(write_run: WriteRun) -> None:
    clock = page_data([read_run(write_run(num_steps=3), "demo")])["runs"][0]["clock"]
    assert clock == {"steps": [0, 1, 2, 3], "tokens": [0, 4096, 8192, 12288], "seconds": [0, 0.5, 1, 1.5]}


def test_time_is_split_by_the_steady_window_and_by_step(write_run: WriteRun) -> None:
    split = page_data([read_run(write_run(num_steps=3), "demo")])["splits"][0]
    assert split["keys"] == ["forward", "backward", "update", "data", "wait_gradients"]
    assert split["window"][0] == [0.3, 0.6, 0, 0, 0.1]
    assert split["steps"] == [0, 1, 2, 3]
    assert split["sums"][1][4] == pytest.approx([0, 0, 0.1, 0.3])


def test_the_timeline_starts_at_its_first_box(write_run: WriteRun) -> None:
    timeline = page_data([read_run(write_run(), "demo")])["timelines"][0]
    assert timeline["numStages"] == 2
    assert timeline["spans"][0] == [0, "F", 0, 0, 0.0, 900.0, 0]


def test_what_the_trainer_writes_is_understood(tiny: Config) -> None:
    train(tiny)
    run = read_run(run_folder(tiny), "tiny")
    data = page_data([run])
    assert run.notes == ()
    assert all(value != "not known" for figure in data["figures"] for value in figure["values"])
    missing = [chart["title"] for tab in data["charts"].values() for chart in tab if not chart["series"]]
    assert missing == []
    assert data["timelines"][0]["numStages"] == 2
    for shares in data["splits"][0]["window"]:
        assert sum(shares) == pytest.approx(1)
    assert "threads of one process" in data["memory"][0]["about"]


# ---- several


def test_the_best_of_several_runs_is_marked(write_run: WriteRun) -> None:
    better = read_run(write_run("better", last_loss=1.5), "better")
    worse = read_run(write_run("worse", last_loss=2.5), "worse")
    unfinished = read_run(write_run("young", without=("metrics.jsonl", "summary.json")), "young")
    figures = figures_of(worse, better, unfinished)
    assert figures["Training loss"]["best"] == (False, True, False)
    assert figures["Throughput"]["best"] == (False, False, False)  # the same, so none is best
    assert figures["Delay"]["best"] == (False, False, False)  # neither way is better


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("data.tokenizer", "mine.json", "Training loss"),
        ("data.tokenizer", "mine.json", "Held-out loss"),
        ("evaluation.batches", 3, "Held-out loss"),
        ("train.device", "cuda", "Peak memory"),
    ],
)
def test_none_is_best_where_nothing_can_be_compared(write_run: WriteRun, name: str, value: Any, label: str) -> None:
    better = read_run(write_run("better", last_loss=1.5), "better")
    worse = read_run(write_run("worse", last_loss=2.5), "worse")
    alike = {"data.tokenizer": "bytes", "evaluation.batches": 8, "train.device": "cpu"}
    better, worse = (replace(run, config=run.config | alike) for run in (better, worse))
    other = replace(worse, config=worse.config | {name: value})
    figure = figures_of(other, better)[label]
    assert figure["best"] == (False, False) and figure["meaning"].endswith(f"not to be compared, {name} differs")
    assert "not to be compared" not in figures_of(worse, better)[label]["meaning"]


def test_a_models_size_decides_whether_throughputs_are_compared(write_run: WriteRun) -> None:
    small, large = (read_run(write_run(name), name) for name in ("small", "large"))
    large = replace(large, summary=large.summary | {"parameters": 10**9, "tokens_per_second": 1.0})
    assert figures_of(small, large)["Throughput"]["best"] == (False, False)


def test_a_number_that_no_float_holds_is_not_known(write_run: WriteRun) -> None:
    run = read_run(write_run("absurd"), "absurd")
    run = replace(run, summary=run.summary | {"peak_memory_bytes": [10**400]})
    assert figures_of(run)["Peak memory"]["values"] == ("not known",)


def test_throughput_is_that_of_many_steps_because_a_drain_makes_several_updates_at_once(write_run: WriteRun) -> None:
    run = read_run(write_run("drained"), "drained")
    seconds, rates = run.metrics.column("seconds").copy(), run.metrics.column("tokens_per_second").copy()
    rates[-1], seconds[-1] = 100 * rates[-1], seconds[-1] / 100
    columns = run.metrics.columns | {("seconds",): seconds, ("tokens_per_second",): rates}
    run = replace(run, metrics=replace(run.metrics, columns=columns))
    drawn = chart_of(page_data([run]), "training", "Throughput")["series"][0]["y"]
    assert max(drawn) < 1.06 * min(drawn)


def test_the_head_says_where_a_run_changed_its_shape_and_was_taken_up(write_run: WriteRun) -> None:
    run = read_run(write_run("turned"), "turned")
    turn = {"step": 20, "before": "2 x 1", "after": "4 x 1", "bytes_moved": 1, "pause_seconds": 0.1}
    (run.folder / "config.until-step-5.toml").write_text("")
    head = page_data([replace(run, summary=run.summary | {"reshapes": [turn], "resumed_at": 10})])["runs"][0]
    assert [mark["step"] for mark in head["turns"]] == [5, 10, 20]  # on every chart
    assert "2 x 1 -> 4 x 1 (stages x replicas) after step 20" in head["facts"]
    assert "resumed after step 5" in head["facts"] and "resumed after step 10" in head["facts"]
    (run.folder / "config.until-step-5.toml").unlink()
    assert not any("->" in fact or "resumed" in fact for fact in page_data([run])["runs"][0]["facts"])


def test_several_runs_share_axes_under_their_names(write_run: WriteRun) -> None:
    runs = [read_run(write_run(name), name) for name in ("left", "right")]
    loss = chart_of(page_data(runs), "overview", "Loss")
    assert [(line["name"], line["run"]) for line in loss["series"]] == [
        ("left, training", 0),
        ("left, held out", 0),
        ("right, training", 1),
        ("right, held out", 1),
    ]


def test_differences_of_configuration_are_found(write_run: WriteRun) -> None:
    left = read_run(write_run("left", learning_rate=0.02), "left")
    right = read_run(write_run("right", learning_rate=0.01), "right")
    config = {row["path"]: row for row in page_data([left, right])["config"]}
    assert [path for path, row in config.items() if row["differs"]] == ["optimizer.learning_rate"]
    assert config["optimizer.learning_rate"]["values"] == ["0.02", "0.01"]


def test_a_setting_that_one_run_does_not_have_differs(write_run: WriteRun) -> None:
    left, right = write_run("left"), write_run("right")
    with (right / "config.toml").open("a") as file:
        file.write("seed = 7\n")
    config = {row["path"]: row for row in page_data([read_run(left, "left"), read_run(right, "right")])["config"]}
    assert config["train.seed"]["values"] == [None, "7"] and config["train.seed"]["differs"]


# ---- the document


def test_nothing_from_a_file_becomes_markup(write_run: WriteRun) -> None:
    name = "</script><script>alert(1)</script><!--&amp;\u2028"
    run = read_run(write_run(), name)
    text = page([run])
    assert "<script>alert" not in text and text.count("</script>") == 2
    inlined = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert inlined and "<" not in inlined[1]
    assert json.loads(inlined[1])["runs"][0]["name"] == name


def test_json_holds_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json([float("nan")])


def test_the_page_needs_nothing_from_elsewhere_and_is_small(write_run: WriteRun) -> None:
    text = page([read_run(write_run(), "demo")])
    assert not re.search(r"(?:src|href|action)\s*=\s*[\"']?(?:https?:)?//", text)
    assert not re.search(r"@import|url\(\s*[\"']?(?!#)\w|fetch\(|XMLHttpRequest|import\(", text)
    data = re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data and len(text.encode()) - len(data[1].encode()) < 60_000


def test_templates_are_installed_with_the_package() -> None:
    """Every file the page is made of matches a pattern of pyproject.toml's package data."""
    root = Path(__file__).parents[3]
    patterns = re.search(r'"slipstream\.tools\.report" = \[(.*)\]', (root / "pyproject.toml").read_text())
    assert patterns
    suffixes = {Path(item.strip(' "')).suffix for item in patterns[1].split(",")}
    others = {path.suffix for path in (root / "slipstream" / "tools" / "report").iterdir() if path.is_file()} - {".py"}
    assert others == suffixes
