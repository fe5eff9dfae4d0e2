"""`slipstream report` from the command line: where the page goes, and every mistake in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.cli.report import names

WriteRun = Callable[..., Path]


def test_a_run_gets_its_page_beside_its_files(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run()
    assert cli.run(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert "report.html" in capsys.readouterr().out


def test_several_runs_get_one_page_here(write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["report", str(write_run("left")), str(write_run("right"))]) == 0
    assert "left, right" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_output_goes_where_it_is_told(write_run: WriteRun, tmp_path: Path) -> None:
    folder = write_run()
    assert cli.run(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists() and not (folder / "report.html").exists()


def test_a_name_is_looked_for_below_runs(write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    write_run("named").rename(tmp_path / "runs" / "named")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["report", "named"]) == 0
    assert (tmp_path / "runs" / "named" / "report.html").exists()


def test_runs_of_the_same_name_are_told_apart_by_their_paths() -> None:
    assert names([Path("a/run"), Path("b/run"), Path("b/other")]) == ["a/run", "b/run", "other"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "RUN"),
        (["nowhere"], "run = 'nowhere' is no run: it does not exist"),
        (["EMPTY"], "is no run: it has none of config.toml, metrics.jsonl, summary.json"),
        (["RUN", "RUN"], "is given 2 times: name it once"),
        (["RUN", "--output", "no/such/folder.html"], "cannot be written (no/such is no folder): choose another"),
        (["RUN", "--output", "EMPTY"], "is a folder: name a file, such as"),
        (["GARBAGE"], "metrics.jsonl line 1 is no update and no evaluation"),
        (["RUN", "--outptu", "x.html"], "did you mean --output?"),
    ],
)
def test_a_mistake_is_one_sentence(
    write_run: WriteRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    garbage = write_run("garbage")
    (garbage / "metrics.jsonl").write_text("garbage\n")
    places = {"RUN": str(write_run()), "EMPTY": str(tmp_path / "empty"), "GARBAGE": str(garbage)}
    assert cli.run(["report", *(places.get(argument, argument) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    assert words in said
    assert not list(tmp_path.rglob("*.html"))


def test_a_link_to_itself_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert cli.run(["report", "loop"]) == 2
    assert capsys.readouterr().err.startswith("slipstream: run = 'loop' is no run: ")
