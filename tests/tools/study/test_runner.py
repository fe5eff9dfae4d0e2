"""`slipstream study` from end to end: what it runs, what it leaves, and how it ends when something goes wrong."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from harness import forks
from study_folder import GRID, STEPS, Study

from slipstream import cli
from slipstream.config.toml import load_toml
from slipstream.tools.study import runner as command
from slipstream.tools.study.delayed import DelayedRun
from slipstream.tools.study.record import Record, read_records
from slipstream.train.build import build_components

pytestmark = forks


def numbers(record: Record) -> Record:
    """A record without what the clock says."""
    return replace(record, seconds=0.0, tokens_per_second=0.0, optimizer_share=0.0)


# ---- what it leaves


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> tuple[Study, int, str]:
    """Three cells, two at a time: the study, its exit code, and what it said."""
    here = tmp_path_factory.mktemp("finished")
    result = Study(here, text_file)
    result.write()
    with pytest.MonkeyPatch.context() as patch, (here / "said").open("w") as said:
        patch.setattr(sys, "stdout", said)
        code = result.run("--jobs", "2")
    return result, code, (here / "said").read_text()


def test_a_study_ends_well_and_leaves_records_table_and_figures(finished: tuple[Study, int, str]) -> None:
    study, code, _ = finished
    assert code == 0
    names = {path.name for path in study.folder.iterdir()}
    assert names == {"cells", "grid.toml", "cells.jsonl", "table.md", "loss.png", "gap.png", "cosine.png"}
    assert (study.folder / "grid.toml").read_text() == study.path.read_text()
    for name in ("loss.png", "gap.png", "cosine.png"):
        assert (study.folder / name).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in study.folder.glob("cells/*")} == {cell.name for cell in study.cells}
    for cell in study.cells:
        assert {path.name for path in study.path_of(cell).parent.iterdir()} == {
            "config.toml",
            "metrics.jsonl",
            "record.json",
        }


def test_every_cell_has_its_configuration_beside_it(finished: tuple[Study, int, str]) -> None:
    study = finished[0]
    for cell in study.cells:
        assert load_toml(study.path_of(cell).with_name("config.toml")) == cell.config


def test_metrics_have_a_line_for_every_step_and_every_evaluation(finished: tuple[Study, int, str]) -> None:
    study = finished[0]
    for cell in study.cells:
        lines = study.path_of(cell).with_name("metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        trained = [row for row in rows if "loss" in row]
        assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
        assert [row["tokens"] for row in trained] == [64 * (step + 1) for step in range(STEPS)]
        held_out = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
        assert held_out == [(e.step, e.loss) for e in study.record(cell).evaluations[1:]]
        bits = [row["val_bits_per_byte"] for row in rows if "val_loss" in row]
        assert bits == pytest.approx([loss / math.log(2) for _, loss in held_out])


def test_a_record_says_what_was_run_and_what_came_of_it(finished: tuple[Study, int, str]) -> None:
    study = finished[0]
    sync = study.cells[0]
    for cell in study.cells:
        record = study.record(cell)
        assert (record.id, record.baseline, record.mode) == (cell.id, sync.id, cell.mode)
        assert (record.study, record.optimizer, record.seed) == ("grid", "adamw", 0)
        assert (record.learning_rate, record.steps, record.tokens) == (0.003, STEPS, 64 * STEPS)
        assert record.setting == {"optimizer.learning_rate": 0.003}
        assert [(e.step, e.tokens) for e in record.evaluations] == [(0, 0), (3, 192), (6, 384)]
        assert record.final_loss == record.evaluations[-1].loss
        assert record.bits_per_byte == pytest.approx(record.final_loss / math.log(2))  # tokens are bytes
        assert [step for step, _ in record.cosines["all"]] == [1, 2, 3, 4, 5]
        assert record.seconds > 0 and record.tokens_per_second > 0 and 0 < record.optimizer_share < 1
        run = DelayedRun(cell, build_components(cell.config), torch.device("cpu"))
        losses = [run.evaluate().item()] + [run.evaluate().item() for done in run.train() if done % 3 == 0]
        assert [e.loss for e in record.evaluations] == losses
        assert record.parameters == sum(weight.numel() for weight in run.weights().values())


def test_lines_and_table_show_every_cell(finished: tuple[Study, int, str]) -> None:
    study, _, said = finished
    assert said.startswith("study grid: 3 cells, 0 of them done before, 2 at a time; writing ")
    for mode in ("sync", "async", "ef"):
        record = next(r for r in read_records(study.folder / "cells.jsonl") if r.mode == mode)
        loss, bits = f"{record.final_loss:.4f}", f"{record.bits_per_byte:.4f}"
        line = (
            rf"^\[[123]/3\] adamw {mode} seed 0 optimizer.learning_rate=0.003: held-out loss {loss} "
            rf"\({bits} bits per byte\), "
        )
        assert re.search(line, said, re.MULTILINE)
        assert re.search(rf"^\| adamw +\| {mode} +\| 0.003 \| +1 \| +{loss} \| +{bits} \|", study.table, re.MULTILINE)
    assert all(f"[{number}/3]" in said for number in (1, 2, 3))
    assert study.table in said
    assert said.endswith("out: cells.jsonl, table.md, loss.png, gap.png, cosine.png\n")


def test_all_records_are_in_one_file_in_the_order_of_the_grid(finished: tuple[Study, int, str]) -> None:
    study = finished[0]
    assert read_records(study.folder / "cells.jsonl") == [study.record(cell) for cell in study.cells]


# ---- going on


def test_one_job_or_two_give_the_same_numbers(finished: tuple[Study, int, str], study: Study, no_figures: None) -> None:
    study.write()
    assert study.run("--jobs", "1") == 0
    two = finished[0]
    for cell in study.cells:
        assert numbers(study.record(cell)) == numbers(two.record(cell))
    assert len({study.record(cell).final_loss for cell in study.cells}) == 3


def test_a_finished_cell_is_not_run_again(study: Study, no_figures: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.run() == 0
    before, cells = study.times(), study.cells
    (study.folder / "table.md").unlink()
    capsys.readouterr()

    assert study.run() == 0
    said = capsys.readouterr().out
    assert said.startswith("study grid: 3 cells, 3 of them done before, ")
    assert "[1/" not in said
    assert study.times() == before
    assert "| ef" in study.table  # what was missing of it, it writes again

    # one that is lost is made again, alone
    lost = cells[2]
    kept = study.record(lost)
    study.path_of(lost).unlink()
    assert study.run() == 0
    said = capsys.readouterr().out
    assert "3 cells, 2 of them done before" in said
    assert re.findall(r"^\[.*\] adamw (\w+)", said, re.MULTILINE) == ["ef"]
    after = study.times()
    assert {name for name in after if after[name] != before[name]} == {lost.name}
    assert numbers(study.record(lost)) == numbers(kept)

    # one that is added is run, alone, and the table has all
    study.write(GRID + "train.seed = [0, 1]\n")
    assert study.run("--only", "adamw") == 0
    said = capsys.readouterr().out
    assert "6 cells, 3 of them done before" in said
    assert sorted(re.findall(r"^\[.*\] adamw (\w+) seed 1", said, re.MULTILINE)) == ["async", "ef", "sync"]
    assert {name: study.times()[name] for name in after} == after
    assert len(read_records(study.folder / "cells.jsonl")) == 6

    # and the folder's own copy of the grid will do as well
    assert cli.run(["study", str(study.folder / "grid.toml"), "--output", str(study.folder)]) == 0
    assert "6 cells, 6 of them done before" in capsys.readouterr().out


def test_only_runs_the_optimizers_it_names(study: Study, no_figures: None, capsys: pytest.CaptureFixture[str]) -> None:
    study.write('[[grid]]\nmode = "ef"\noptimizer.name = ["adamw", "muon", "torch.optim.SGD"]\n')
    assert study.run("--only", "torch.optim.SGD", "muon") == 0
    assert "study grid: 2 cells, 0 of them done before" in capsys.readouterr().out
    assert {name.split("-")[0] for name in study.times()} == {"SGD", "muon"}
    before = study.times()
    assert study.run("--only", "adamw") == 0
    assert "study grid: 1 cells, 0 of them done before" in capsys.readouterr().out
    assert before.items() < study.times().items()
    assert len(study.times()) == 3
    assert all(name in study.table for name in ("adamw", "muon", "torch.optim.SGD"))


def test_a_cell_with_two_places_in_the_grid_is_run_once(
    study: Study, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    study.write('[[grid]]\nmode = "async"\n[[grid]]\nmode = ["sync", "ef"]\noptimizer.error_feedback = [0.0, 1.0]\n')
    assert study.run() == 0
    assert "study grid: 3 cells, " in (said := capsys.readouterr().out)
    assert re.findall(r"^\[(\d/\d)\]", said, re.MULTILINE) == ["1/3", "2/3", "3/3"]
    records = read_records(study.folder / "cells.jsonl")
    assert [(r.mode, r.setting.get("optimizer.error_feedback")) for r in records] == [
        ("async", None),
        ("sync", None),
        ("ef", 0.0),
        ("ef", 1.0),
    ]
    assert records[0].id == records[2].id


def test_a_pipeline_of_double_depth_has_a_baseline_too(study: Study, no_figures: None) -> None:
    study.write("""
[[grid]]
mode = "sync"
pipeline.microbatches = 3
[[grid]]
mode = "ef"
pipeline.microbatches = 3
pipeline.depth = "double"
""")
    assert study.run() == 0
    sync, delayed = read_records(study.folder / "cells.jsonl")
    assert delayed.baseline == sync.id


def test_without_output_it_writes_below_runs_and_first_names_cells_that_will_have_no_gap(
    study: Study, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    study.write('[[grid]]\nmode = ["async", "ef"]\noptimizer.momentum = 0.9\n', top='name = "mine"\n')
    assert cli.run(["study", "grid.toml", "--jobs", "1"]) == 0
    assert Path("runs", "study-mine", "table.md").exists()
    said = capsys.readouterr().out
    assert "2 cells will have no gap, first muon async seed 0 optimizer.momentum=0.9: " in said
    assert said.index("add mode = 'sync' beside theirs") < said.index("[1/2]")


# ---- cells that go wrong


def test_a_cell_that_diverges_is_recorded_and_the_study_goes_on(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    study.write(GRID.replace("0.003", "[0.003, 1e30]"))
    assert study.run("--jobs", "2") == 0
    records = [study.record(cell) for cell in study.cells]
    assert [record.final_loss is None for record in records] == [False, True] * 3
    for record in records:
        if record.final_loss is None:
            assert [e.step for e in record.evaluations] == [0]  # those after are not numbers
            assert record.steps == STEPS
            assert record.tokens_per_second == pytest.approx(3 * 64 / record.seconds)  # of the steps it made
    said = capsys.readouterr().out
    assert len(re.findall(r"^\[.*learning_rate=1e\+30: diverged, ", said, re.MULTILINE)) == 3
    lines = [line for line in study.table.splitlines() if "1e+30" in line and "| adamw" in line]
    assert sum("1 of 1" in line for line in lines) >= 3
    for name in ("loss.png", "gap.png", "cosine.png"):
        assert (study.folder / name).exists()
    before = study.times()
    assert study.run() == 0
    assert study.times() == before  # it would diverge again


def test_if_all_cells_diverge_the_study_still_ends_well(study: Study, no_figures: None) -> None:
    study.write(GRID.replace("0.003", "1e30"))
    assert study.run() == 0
    assert study.table.count("1 of 1") == 3


FAULTY = """
import torch

class Unspeakable(RuntimeError):
    def __init__(self, first, second):
        super().__init__(f"{first}\\n{second}")

class Faulty(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 3:
            raise Unspeakable("a fault", "in two lines")
        return super().step(closure)
"""


def test_a_cell_that_raises_is_named_and_the_others_finish(
    study: Study, tmp_path: Path, no_figures: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is of a kind that cannot be sent to another process and put together again there."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    study.write('[[grid]]\nmode = ["sync", "ef"]\noptimizer.name = ["faulty.Faulty", "adamw"]\n')
    assert study.run("--jobs", "2") == 1
    said = capsys.readouterr()
    names = [cell.name for cell in study.cells if cell.name.startswith("Faulty")]
    failed = {}
    for name in names:
        path = study.folder / "cells" / name / "failure.txt"
        failed[name] = f"{name} failed with Unspeakable: a fault in two lines (traceback in {path})"
        assert "faulty.py" in path.read_text()
        assert path.read_text().endswith("Unspeakable: a fault\nin two lines\n")
        assert failed[name] in said.out.splitlines()
    assert said.err in [f"slipstream: 2 of 4 cells failed, the first was {sentence}\n" for sentence in failed.values()]
    assert {name.split("-")[0] for name in study.times()} == {"adamw"}
    assert len(study.times()) == 2
    assert study.table.count("adamw") == 2

    # mended, they are run, and nothing is left of the failure
    (tmp_path / "faulty.py").write_text(FAULTY.replace("== 3", "== -1"))
    monkeypatch.delitem(sys.modules, "faulty")
    before = study.times()
    assert study.run() == 0
    assert "4 cells, 2 of them done before" in capsys.readouterr().out
    assert before.items() < study.times().items()
    assert not list(study.folder.glob("cells/*/failure.txt"))


# ---- mistakes


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is said instead."""
    assert cli.run(["study", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("slipstream: ") and said.err.count("\n") == 1, said.err
    return said.err


@pytest.fixture
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> NoReturn:
        pytest.fail("a cell was started")

    monkeypatch.setattr(command, "_run_cells", fail)


ARGUMENT_MISTAKES = [
    ("missing.toml", "missing.toml cannot be read (No such file or directory): check the path"),
    ("folder", "folder cannot be read (Is a directory): check the path"),
    ("grid.toml --jobs 0", "jobs = 0 is too small: use 1 or more"),
    ("grid.toml --jobs -1", "jobs = -1 is too small: use 1 or more"),
    ("grid.toml --jobs two", "jobs = 'two' is invalid: write a whole number"),
    ("grid.toml --jobs 1.5", "jobs = '1.5' is invalid: write a whole number"),
    ("grid.toml --jobs", "jobs has no value: write a whole number"),
    ("grid.toml --only lion", "only = 'lion' is no optimizer of this grid: choose from adamw"),
    ("grid.toml --only adamw sync", "only = 'sync' is no optimizer of this grid: choose from adamw"),
    ("--only adam", "only = 'adam' is no optimizer of this grid: choose from adamw, muon"),
    ("grid.toml --output text.txt", "output = 'text.txt' cannot be written (Not a directory): choose another"),
    ("grid.toml --output text.txt/a", "output = 'text.txt/a' cannot be written (Not a directory): choose another"),
    (f"grid.toml --output {'a' * 300}", "cannot be written (File name too long): choose another"),
    ("grid.toml --output", "output has no value: write a text"),
    ("grid.toml grid.toml", "'grid.toml' belongs to no option"),
    ("--jobs 1 grid.toml", "'grid.toml' belongs to no option: a configuration file comes before all options"),
    ("grid.toml --job 1", "option --job is unknown: did you mean --jobs?"),
    ("--job 1", "option --job is unknown: did you mean --jobs?"),
    ("grid.toml --train.steps 3", "option --train.steps is unknown: see slipstream study --help"),
]


@pytest.mark.parametrize(("arguments", "sentence"), ARGUMENT_MISTAKES, ids=[said for _, said in ARGUMENT_MISTAKES])
def test_a_wrong_argument_is_one_sentence_before_anything_happens(
    arguments: str, sentence: str, study: Study, nothing_is_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("text.txt").touch()
    before = sorted(Path().rglob("*"))
    assert sentence in refusal(arguments.split(), capsys)
    assert sorted(Path().rglob("*")) == before


FILE_MISTAKES = [
    ("train.sede = 1", "grid.toml: train.sede is unknown: did you mean seed?"),
    ("predictor = 'lats'", "grid.toml: predictor = 'lats' is unknown: use last, two_term"),
    ("evaluation.batches = 0", "evaluation.batches = 0 leaves nothing to compare: use 1 or more"),
    ("pipeline.stages = 9\npipeline.microbatches = 9", "pipeline.stages = 9 is more than the model's 4 layers (embed"),
    ("pipeline.layers_per_stage = [[2, 2], [1, 1]]", "pipeline.layers_per_stage = [1, 1] does not cut 4 layers into 2"),
    ("optimizer.name = ['adamw', 'adam']", "grid.toml: optimizer.name = 'adam' is unknown: use muon, adamw, "),
    ("optimizer.name = 'no.Such'", "optimizer.name = 'no.Such' cannot be imported (No module named 'no'): use muon,"),
    ("data.sources = ['no.txt']", "data.sources names 'no.txt', which does not exist: give a file, a folder or a glob"),
    ("model.sequence_length = 100000", "model.sequence_length = 100000 takes 100001 tokens and there are"),
    ("model.dim = 15", "model.dim is 15, which 2 heads cannot share evenly"),
]


@pytest.mark.parametrize(("line", "sentence"), FILE_MISTAKES, ids=[sentence for _, sentence in FILE_MISTAKES])
def test_a_wrong_grid_is_one_sentence_before_anything_happens(
    line: str, sentence: str, study: Study, nothing_is_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    study.write(f'[[grid]]\nmode = ["sync", "ef"]\n{line}\n')
    before = sorted(Path().rglob("*"))
    assert sentence in refusal(["grid.toml"], capsys)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(
    study: Study, nothing_is_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    study.write(GRID + 'train.device = "cuda"')
    assert "train.device = 'cuda' finds no CUDA device here: use train.device = 'cpu'" in refusal(["grid.toml"], capsys)


def test_an_unwritable_folder_is_refused(
    study: Study, nothing_is_run: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", deny)
    sentence = "output = 'runs/study-grid' cannot be written (Permission denied): choose another"
    assert sentence in refusal(["grid.toml"], capsys)


def test_a_folder_that_holds_something_else_is_refused(
    study: Study, nothing_is_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    study.folder.mkdir()
    (study.folder / "cells").touch()
    sentence = refusal(["grid.toml", "--output", "out"], capsys)
    assert "output = 'out' cannot be written (File exists): choose another" in sentence


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"id": 3, "evaluations": [], "cosines": {}, "new": 1}'])
def test_a_record_that_cannot_be_read_is_named_before_anything_is_run(
    text: str, study: Study, nothing_is_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study.path_of(study.cells[1])
    path.parent.mkdir(parents=True)
    path.write_text(text)
    said = refusal(["grid.toml", "--output", str(study.folder)], capsys)
    assert said.startswith(f"slipstream: {path} is no record of a cell (")
    assert said.endswith("): remove it, and it is run again\n")


def test_under_torchrun_it_is_refused(
    study: Study, nothing_is_run: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = sorted(Path().rglob("*"))
    sentence = "slipstream study is one process, or several by --jobs: start it without torchrun"
    assert sentence in refusal(["grid.toml"], capsys)
    assert sorted(Path().rglob("*")) == before


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.run(["study", "--help"])
    assert not stop.value.code
    said = capsys.readouterr().out
    assert said.startswith("usage: slipstream study [GRID.toml] [-h]")
    for option in ("--output", "--only", "--jobs"):
        assert option in said
