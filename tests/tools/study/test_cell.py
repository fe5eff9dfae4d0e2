"""A cell's id stands for its numbers: equal where they are equal, different where they are not."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import changed

from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.delayed import DelayedRun
from slipstream.train.build import build_components

DELAYED = Cell(changed(Config(), pipeline__microbatches=8))
SYNCHRONOUS = Cell(changed(DELAYED.config, pipeline__schedule="one_f_one_b"))


def with_config(cell: Cell, **fields: Any) -> Cell:
    return replace(cell, config=changed(cell.config, **fields))


# ---- equal numbers, equal id


@pytest.mark.parametrize(
    "other",
    [
        with_config(SYNCHRONOUS, optimizer__error_feedback=0.5),
        with_config(SYNCHRONOUS, optimizer__error_feedback=0.0),
        replace(SYNCHRONOUS, predictor="experiments.predictors.fitted"),
        replace(SYNCHRONOUS, predictor="two_term", predictor_weight=0.1),
        with_config(SYNCHRONOUS, pipeline__stages=4),
        with_config(SYNCHRONOUS, pipeline__stages=1),
        with_config(SYNCHRONOUS, pipeline__layers_per_stage=(1, 3)),
        with_config(SYNCHRONOUS, pipeline__sync_start_steps=9),
        with_config(SYNCHRONOUS, pipeline__schedule="gpipe"),
        replace(DELAYED, delays=(0, 0)),
        with_config(DELAYED, pipeline__schedule="pipedream", pipeline__stages=1),
        with_config(DELAYED, pipeline__schedule="paci", pipeline__stages=1, optimizer__error_feedback=0.0),
        DELAYED.synchronous(),
    ],
)
def test_a_synchronous_cell_takes_no_notice_of_what_matters_under_delay(other: Cell) -> None:
    assert other.is_synchronous
    assert other.id == SYNCHRONOUS.id


@pytest.mark.parametrize("cell", [SYNCHRONOUS, DELAYED], ids=["synchronous", "delayed"])
def test_what_is_only_said_of_a_cell_does_not_change_it(cell: Cell) -> None:
    others = [
        with_config(cell, run__name="other", run__folder="elsewhere", run__overwrite=True, run__log_every_steps=3),
        with_config(cell, train__track_alignment=False),
        with_config(cell, train__recompute_every=1),
        with_config(cell, pipeline__transport="thread", pipeline__timeout_seconds=1.0),
        with_config(cell, checkpoint__keep_last=5, checkpoint__at_end=False),
        replace(cell, mode="other", setting={"train.steps": 3}),
        replace(cell, compute_dtype=cell.config.train.dtype),
    ]
    assert {other.id for other in others} == {cell.id}


@pytest.mark.parametrize(
    "other",
    [
        with_config(DELAYED, pipeline__stages=1),
        with_config(DELAYED, pipeline__stages=4),
        with_config(DELAYED, pipeline__layers_per_stage=(1, 3)),
        with_config(DELAYED, pipeline__depth="double"),
        replace(DELAYED, delays=(1, 1)),
        replace(DELAYED, predictor_weight=0.1),
    ],
)
def test_two_bw_delays_by_one_at_any_depth(other: Cell) -> None:
    assert other.id == DELAYED.id


def test_without_error_feedback_nobody_asks_the_predictor() -> None:
    cell = with_config(DELAYED, optimizer__error_feedback=0.0)
    assert replace(cell, predictor="experiments.predictors.fitted").id == cell.id


def test_pipedream_is_its_delays() -> None:
    pipedream = with_config(DELAYED, pipeline__stages=3, pipeline__schedule="pipedream")
    assert pipedream.stage_delays == (2, 1, 0)
    assert pipedream.id == replace(with_config(DELAYED, pipeline__stages=3), delays=(2, 1, 0)).id


# ---- different numbers, different id


def test_recomputed_blocks_cost_more_and_may_move_the_cut_that_pipedream_depends_on() -> None:
    pipedream = with_config(DELAYED, pipeline__stages=3, pipeline__schedule="pipedream")
    assert with_config(pipedream, train__recompute_every=2).id != pipedream.id
    given = with_config(pipedream, pipeline__layers_per_stage=(2, 2, 2))
    assert with_config(given, train__recompute_every=2).id == given.id


def other_values(hint: Any, value: Any) -> list[Any]:
    """Of the same type."""
    if typing.get_args(hint) and type(None) in typing.get_args(hint):
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return [0, 1, 7] if inner is int else [False, True] if inner is bool else ["uint8"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [v for v in (0, 1, 0.5, 7) if v != value and (isinstance(value, float) or isinstance(v, int))]
    if isinstance(value, tuple):
        return [("other",), ("other", "another")]
    return [{"momentum": 0.5}] if isinstance(value, dict) else ["other"]


UNASKED = {
    *("train__track_alignment", "train__non_finite", "train__recompute_every"),
    *("evaluation__prompts", "evaluation__sample_tokens"),
}
"""Fields that a study does not use."""


def all_changes() -> Iterator[dict[str, Any]]:
    """Of every field that decides numbers."""
    config = Config()
    for section in ("model", "data", "optimizer", "train", "evaluation"):
        values = getattr(config, section)
        hints = typing.get_type_hints(type(values))
        for member in dataclasses.fields(values):
            name = f"{section}__{member.name}"
            if name not in UNASKED:
                for value in other_values(hints[member.name], getattr(values, member.name)):
                    if not (name == "train__steps" and value == 0):
                        yield {name: value}
    yield from ({"pipeline__microbatches": number} for number in (5, 6, 7))


def test_every_field_that_decides_numbers_is_in_the_id() -> None:
    changes = list(all_changes())
    assert len(changes) > 80
    ids = {DELAYED.id: "nothing"}
    for change in changes:
        new = with_config(DELAYED, **change).id
        assert new not in ids, f"{change} is taken for {ids.get(new)}"
        ids[new] = str(change)


def test_of_a_synchronous_cell_too() -> None:
    unasked = {"optimizer__error_feedback", "optimizer__adamw_predictor"}
    changes = [change for change in all_changes() if not unasked & change.keys()]
    ids = [SYNCHRONOUS.id, *(with_config(SYNCHRONOUS, **change).id for change in changes)]
    assert len(set(ids)) == len(ids)


def test_not_given_is_not_zero() -> None:
    """No warm-up, and a tenth of all steps; no tying, and the preset's choice."""
    for change in ({"optimizer__warmup_steps": 0}, {"optimizer__decay_steps": 0}, {"model__tied_embeddings": False}):
        assert with_config(DELAYED, **change).id != DELAYED.id


@pytest.mark.parametrize("cell", [SYNCHRONOUS, DELAYED], ids=["synchronous", "delayed"])
def test_precision_and_compiler_are_in_the_id(cell: Cell) -> None:
    others = [
        replace(cell, compute_dtype="bfloat16"),
        replace(cell, compute_dtype="float64"),
        replace(cell, compile_mode="default"),
        replace(cell, compile_mode="reduce-overhead"),
    ]
    assert len({cell.id, *(other.id for other in others)}) == 5


def test_whatever_delays_differently_has_another_id() -> None:
    two_term = replace(DELAYED, predictor="two_term")
    cells = [
        SYNCHRONOUS,
        DELAYED,
        with_config(DELAYED, optimizer__error_feedback=0.0),
        with_config(DELAYED, optimizer__error_feedback=0.5),
        replace(DELAYED, predictor="experiments.predictors.adaptive"),
        replace(DELAYED, predictor="experiments.predictors.fitted"),
        replace(DELAYED, predictor="experiments.predictors.momentum"),
        two_term,
        replace(two_term, predictor_weight=0.1),
        replace(two_term, predictor_weight=0.0),
        replace(DELAYED, predictor="experiments.predictors.damped"),
        replace(DELAYED, predictor="experiments.predictors.damped", predictor_weight=0.1),
        with_config(DELAYED, pipeline__sync_start_steps=5),
        with_config(DELAYED, pipeline__sync_start_steps=6),
        replace(DELAYED, delays=(2, 2)),
        replace(DELAYED, delays=(1, 0)),
        replace(DELAYED, delays=(0, 1)),
        replace(with_config(DELAYED, pipeline__layers_per_stage=(1, 3)), delays=(1, 0)),
        replace(with_config(DELAYED, pipeline__layers_per_stage=(3, 1)), delays=(1, 0)),
        replace(with_config(DELAYED, pipeline__stages=3), delays=(1, 0, 0)),
        with_config(DELAYED, pipeline__schedule="pipedream", pipeline__stages=3),
        with_config(DELAYED, pipeline__schedule="paci", pipeline__stages=3, optimizer__error_feedback=0.0),
        with_config(DELAYED, pipeline__schedule="paci", pipeline__stages=4, optimizer__error_feedback=0.0),
    ]
    assert len({cell.id for cell in cells}) == len(cells)


# ---- the baseline


@pytest.mark.parametrize(
    "cell",
    [
        SYNCHRONOUS,
        DELAYED,
        with_config(DELAYED, pipeline__depth="double"),
        with_config(DELAYED, pipeline__stages=4, pipeline__sync_start_steps=3),
        replace(DELAYED, delays=(3, 0), predictor="experiments.predictors.momentum"),
        with_config(DELAYED, pipeline__schedule="pipedream"),
        with_config(DELAYED, pipeline__schedule="paci", optimizer__error_feedback=0.0),
        with_config(DELAYED, pipeline__schedule="gpipe"),
    ],
)
def test_the_baseline_is_synchronous_and_its_own_baseline(cell: Cell) -> None:
    baseline = cell.synchronous()
    assert baseline.is_synchronous
    assert baseline.mode == "sync"
    assert baseline.id == SYNCHRONOUS.id
    assert baseline.synchronous().id == baseline.id
    assert (baseline.id == cell.id) == cell.is_synchronous


def test_the_baseline_shares_all_that_is_not_delay() -> None:
    cell = replace(
        with_config(DELAYED, train__seed=3, train__steps=50, optimizer__learning_rate=0.1), compute_dtype="bfloat16"
    )
    assert cell.synchronous().config.train == cell.config.train
    assert cell.synchronous().compute_dtype == "bfloat16"
    assert cell.synchronous().id != SYNCHRONOUS.id


# ---- what the id promises, played


@pytest.fixture
def base(tiny: Config) -> Cell:
    config = changed(tiny, train__dtype="float64", optimizer__newton_schulz_dtype="float64", pipeline__microbatches=4)
    return Cell(config)


def losses(cell: Cell) -> list[float]:
    run = DelayedRun(cell, build_components(cell.config), torch.device("cpu"))
    for _ in run.train():
        pass
    return run.losses.tolist()


def test_cells_of_one_id_compute_the_same_numbers_and_others_do_not(base: Cell) -> None:
    synchronous = base.synchronous()
    cells = [
        synchronous,
        replace(
            with_config(synchronous, optimizer__error_feedback=0.3, pipeline__stages=3),
            predictor="experiments.predictors.fitted",
        ),
        with_config(base, pipeline__schedule="gpipe"),
        base,
        with_config(base, pipeline__stages=1),
        replace(base, delays=(1, 1)),
        with_config(base, pipeline__stages=4, pipeline__layers_per_stage=(1, 1, 1, 1)),
        with_config(base, optimizer__error_feedback=0.0),
        replace(with_config(base, optimizer__error_feedback=0.0), predictor="experiments.predictors.adaptive"),
        replace(base, predictor="two_term"),
        replace(base, predictor="two_term", predictor_weight=0.1),
        replace(base, predictor="experiments.predictors.adaptive"),
        with_config(base, pipeline__sync_start_steps=2),
        replace(with_config(base, pipeline__layers_per_stage=(1, 3)), delays=(1, 0)),
        replace(with_config(base, pipeline__layers_per_stage=(3, 1)), delays=(1, 0)),
        with_config(base, optimizer__warmup_steps=2),
        with_config(base, optimizer__warmup_steps=3),
    ]
    numbers = [tuple(losses(cell)) for cell in cells]
    by_id: dict[str, set[tuple[float, ...]]] = {}
    for cell, found in zip(cells, numbers, strict=True):
        by_id.setdefault(cell.id, set()).add(found)
    assert all(len(found) == 1 for found in by_id.values())
    assert len(set(numbers)) == len(by_id) == 11


# ---- names


def test_a_cell_is_called_by_optimizer_seed_and_id() -> None:
    cell = with_config(DELAYED, optimizer__name="torch.optim.SGD", train__seed=3)
    assert cell.name == f"SGD-seed3-{cell.id}"
    assert Path(cell.name).name == cell.name


# ---- mistakes


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (replace(DELAYED, predictor="lats"), "predictor = 'lats' is unknown: use last, two_term or the import path"),
        (replace(DELAYED, compute_dtype="fp8"), "compute_dtype = 'fp8' is unknown: choose one of bfloat16, float32"),
        (replace(DELAYED, compile_mode="fast"), "compile_mode = 'fast' is unknown: choose one of default, reduce"),
        (replace(DELAYED, delays=(1, 0, 0)), "delays = [1, 0, 0] has not one entry for each of pipeline.stages = 2"),
        (replace(DELAYED, delays=(-1, 0)), "delays = [-1, 0] is invalid: use 0 to train.steps = 200 for every stage"),
        (replace(DELAYED, predictor_weight=float("inf")), "predictor_weight = inf is not finite: write a number that"),
        (
            with_config(DELAYED, train__compile=True),
            "train.compile = true is for the stages of a pipeline, and a",
        ),
        (with_config(DELAYED, train__non_finite="skip"), "train.non_finite = 'skip' asks the device after every step"),
        (
            replace(with_config(DELAYED, optimizer__name="soap"), predictor="experiments.predictors.momentum"),
            "predictor = 'experiments.predictors.momentum' looks into muon and adamw, not into optimizer.name",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cell_that_cannot_be_says_so_in_one_sentence(cell: Cell, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        cell.validate()
    assert str(error.value).startswith(sentence)


def test_a_cell_that_can_be_is_left_alone() -> None:
    for cell in (
        SYNCHRONOUS,
        DELAYED,
        replace(DELAYED, delays=(2, 0), predictor="experiments.predictors.momentum", compute_dtype="bfloat16"),
    ):
        cell.validate()
