"""Held-out losses by source, from the batches to the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import folder_of, summary_of
from settings import changed
from torch import nn

from slipstream import Evaluation, EvaluationPart, EvaluationReport, Pipeline, launch
from slipstream.config.schema import Config
from slipstream.data import validation_batches
from slipstream.data.mixture import Source
from slipstream.data.tokens import Tokens
from slipstream.errors import ConfigError
from slipstream.model.decoder import IGNORE, next_token_loss
from slipstream.tools.loading import find_source, load
from slipstream.tools.report.read import read_metrics
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.delayed import DelayedRun
from slipstream.train.build import build_components, read_corpus
from slipstream.train.trainer import train


def test_every_batch_is_of_one_source_and_the_windows_are_those_of_the_mixture() -> None:
    tokens = Tokens((np.arange(100, dtype=np.int64), np.arange(1000, 1061, dtype=np.int64)))
    sources = (Source("a", 3.0, 0, 100), Source("b", 1.0, 0, 61))
    mixed = validation_batches(tokens, 10, 4, 3, sources)
    apart = validation_batches(tokens, 10, 4, 3, sources, per_source=True)
    assert [part.name for part in apart.parts] == ["a", "b"]
    windows = [sorted(start for part in each.parts for start in part.starts) for each in (mixed, apart)]
    assert windows[0] == windows[1]
    assert [apart.indices(part) for part in range(2)] == [range(0, 3), range(3, 4)]
    for index in range(len(apart)):
        inputs, targets = apart(index)
        assert inputs.shape == (4, 10)
        read = inputs[(targets != IGNORE).any(1)]
        assert len(read) * 10 == apart.num_tokens(index)
        assert (read >= 1000).all() == (index == 3)
        assert (read >= 1000).any() == (index == 3)


def test_a_pipeline_reports_the_loss_of_every_part() -> None:
    def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2, 3), float(index)), torch.zeros(2, 3)

    def worker(transport) -> list[EvaluationReport]:  # type: ignore[no-untyped-def]
        pipeline = Pipeline(
            transport,
            [nn.Identity(), nn.Linear(3, 3), nn.Identity()],
            data=lambda step, microbatch: batch(1),
            loss=lambda outputs, targets: outputs.sum() * 0 + outputs.shape[0],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            num_microbatches=2,
            num_steps=3,
            evaluation=Evaluation(batch, 5, parts=(EvaluationPart(2), EvaluationPart(3, scale=0.5))),
        )
        return [report for report in pipeline.run() if isinstance(report, EvaluationReport)]

    first, last = launch(worker, 2, threads=True, timeout_seconds=60)
    assert first[-1].loss is None
    assert first[-1].part_losses == ()
    assert last[-1].loss == pytest.approx(2.0)
    assert last[-1].part_losses == (2.0, 3.0)


@pytest.fixture
def two(tiny: Config, tmp_path: Path) -> Config:
    """A run that trains on numbers and is evaluated on numbers and on letters."""
    for name, text in (("train", "1 2 3 4 5 6 7 8 9 0 "), ("numbers", "0 9 8 7 6 5 4 3 2 1 "), ("letters", "abcde ")):
        (tmp_path / f"{name}.txt").write_text(text * 400)
    return changed(
        tiny,
        data__sources=(str(tmp_path / "train.txt"),),
        data__validation_sources=(str(tmp_path / "numbers.txt"), str(tmp_path / "letters.txt")),
        evaluation__per_source=True,
        evaluation__batches=6,
        evaluation__every_steps=4,
        train__steps=8,
    )


def test_a_run_reports_each_and_the_model_agrees(two: Config) -> None:
    train(two)
    lines = (folder_of(two) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "val_loss" in row]
    assert len(rows) == 2
    names = list(two.data.validation_sources)
    validation = build_components(two).validation
    assert validation is not None
    layers = load(find_source(folder_of(two), None, print), torch.device("cpu"), torch.float32)
    sums, counts = [], []
    for part in range(2):
        sums.append(sum(float(next_token_loss(layers(x), y)) for x, y in map(validation, validation.indices(part))))
        counts.append(sum(map(validation.num_tokens, validation.indices(part))))
    expected = dict(zip(names, (s / n for s, n in zip(sums, counts, strict=True)), strict=True))
    assert rows[-1]["val_losses"] == pytest.approx(expected, rel=1e-4)
    assert rows[-1]["val_loss"] == pytest.approx(sum(sums) / sum(counts), rel=1e-4)
    assert expected[names[1]] > expected[names[0]]
    assert summary_of(two)["val_losses"] == rows[-1]["val_losses"]
    read = read_metrics(folder_of(two) / "metrics.jsonl")
    assert {name: list(losses) for name, losses in read.validation_parts.items()} == {
        name: [row["val_losses"][name] for row in rows] for name in names
    }


def test_a_study_has_the_losses_of_the_pipeline(two: Config) -> None:
    config = changed(two, train__dtype="float64", optimizer__newton_schulz_dtype="float64")
    train(config)
    delayed = DelayedRun(Cell(config), build_components(config), torch.device("cpu"))
    list(delayed.train())
    losses = delayed.evaluate_sources()
    assert losses == pytest.approx(summary_of(config)["val_losses"], rel=1e-10)
    (numbers, letters), mean = losses.values(), delayed.evaluate().item()
    assert numbers < mean < letters


def test_a_source_with_too_little_held_out_text_is_refused(two: Config, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("0 9 8 7 6 5 4 3 2 1 " * 400)
    (tmp_path / "letters.txt").write_text("abc")
    config = changed(two, data__validation_sources=(*two.data.validation_sources, str(tmp_path / "more.txt")))
    takes = r"model\.sequence_length = 16 takes 17 tokens and there are 4 for validation"
    for each in (two, config):
        with pytest.raises(ConfigError, match=rf"{takes} in '.*letters.txt': .* or set evaluation.per_source = false"):
            build_components(each)
    assert build_components(changed(two, evaluation__per_source=False)).validation is not None
    assert build_components(changed(two, model__sequence_length=3)).validation is not None
    (tmp_path / "numbers.txt").write_text("123")
    read_corpus.cache_clear()  # a process reads a corpus once
    with pytest.raises(ConfigError, match=f"{takes}: shorten it, or give data.validation_sources more text, or set"):
        build_components(two)


def test_a_weighted_source_with_too_little_held_out_text_is_refused(two: Config, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{name}.txt") for name in ("numbers", "letters", "train")]
    (tmp_path / "letters.txt").write_text("abcde " * 50)
    config = changed(two, data__sources=tuple(files), data__validation_sources=(), data__weights=(1.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match=r"takes 17 tokens and there are 15 for validation in '.*letters.txt'"):
        build_components(config)


def test_batches_too_few_for_a_source_are_refused(two: Config, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{name}.txt") for name in ("numbers", "letters")]
    fields = {"data__sources": tuple(files), "data__validation_sources": (), "data__weights": (9.0, 1.0)}
    config = changed(two, **fields, evaluation__batches=1)
    with pytest.raises(ConfigError, match=r"evaluation.batches = 1 is too few: no batch has text of '.*letters.txt'"):
        build_components(config)
    assert build_components(changed(config, evaluation__batches=6)).validation is not None


def test_one_source_of_held_out_text_is_refused(two: Config) -> None:
    config = changed(two, data__validation_sources=two.data.validation_sources[:1])
    with pytest.raises(ConfigError, match=r"evaluation\.per_source = true finds one source of held-out text"):
        build_components(config)


def test_a_file_that_is_named_twice_is_refused(two: Config, tmp_path: Path) -> None:
    config = changed(two, data__validation_sources=(str(tmp_path / "letters.txt"), str(tmp_path / "lett*.txt")))
    with pytest.raises(ConfigError, match=r"data.validation_sources names '.*letters.txt' twice: name it once"):
        build_components(config)


def test_rows_without_it_are_read_as_before(tmp_path: Path) -> None:
    rows = [{"step": 1, "val_loss": 3.0}, {"step": 2, "val_loss": 2.5, "val_losses": {"a": 2.0}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = read_metrics(tmp_path / "metrics.jsonl").validation_parts
    assert np.isnan(parts["a"][0])
    assert parts["a"][1] == 2.0
