"""A configuration to begin with."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from settings import changed

from slipstream import cli
from slipstream.cli.init import CHOSEN, explained
from slipstream.config.schema import Config
from slipstream.config.toml import load_toml


@pytest.mark.parametrize("preset", ["tiny", "moe-10b"])
def test_a_preset_becomes_a_file_that_the_trainer_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["init", preset]) == 0
    assert f"slipstream train {preset}.toml" in capsys.readouterr().out
    expected = changed(Config(), model__preset=preset, run__name=preset)
    assert load_toml(tmp_path / f"{preset}.toml") == expected
    assert cli.run(["init", preset]) == 2
    assert "exists: choose another" in capsys.readouterr().err


def test_what_is_commented_out_is_what_it_is_anyway(tmp_path: Path) -> None:
    text = explained(Config())
    whole = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert whole != text
    (tmp_path / "whole.toml").write_text(whole)
    assert load_toml(tmp_path / "whole.toml") == Config()


def test_every_field_has_its_place_and_its_meaning() -> None:
    sections = dict(re.findall(r"^\[(\w+)\]\n(.*?)(?=\n\n\n|\Z)", explained(Config()), re.MULTILINE | re.DOTALL))
    for section, text in sections.items():
        entries = text.strip("\n").split("\n\n")
        names = [member.name for member in dataclasses.fields(getattr(Config(), section))]
        assert len(entries) == len(names)
        for name, entry in zip(names, entries, strict=True):
            *meaning, line = entry.split("\n")
            assert meaning and all(each.startswith("# ") for each in meaning), entry
            assert re.match(rf"{'' if f'{section}.{name}' in CHOSEN else '# '}{name}( =|: not set)", line), entry
    assert list(sections) == [section.name for section in dataclasses.fields(Config)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["huge"], "preset = 'huge' is unknown: choose one of tiny, small,"),
        (["tiny", "--output", "no/where.toml"], "output = 'no/where.toml' cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["init", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
