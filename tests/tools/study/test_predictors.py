"""Predictors inside a run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from chosen_predictors import NOBODY, OTHERS, path_of, predictor_of
from settings import changed
from torch import Tensor
from torch.optim import Optimizer

from slipstream.config.schema import Config
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.delayed import DelayedRun
from slipstream.tools.study.predictors import Predictor
from slipstream.train.build import build_components


@pytest.fixture
def config(tiny: Config) -> Config:
    return changed(
        tiny,
        train__steps=8,
        train__dtype="float64",
        optimizer__newton_schulz_dtype="float64",
        pipeline__microbatches=2,
        pipeline__layers_per_stage=(2, 2),  # both stages have matrices
        evaluation__every_steps=0,
    )


def weights_of(cell: Cell) -> dict[str, Tensor]:
    run = DelayedRun(cell, build_components(cell.config), torch.device("cpu"))
    for _ in run.train():
        pass
    return run.weights()


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("delays", [(), (2, 1)], ids=["two_bw", "two and one"])
def test_a_coefficient_of_zero_is_plain_delay_whatever_is_expected(delays: tuple[int, ...], config: Config) -> None:
    plain = Cell(changed(config, optimizer__error_feedback=0.0), delays=delays)
    expected = weights_of(plain)
    for name in ("last", "two_term", *OTHERS):
        found = weights_of(replace(plain, predictor=name))
        assert all(torch.equal(found[key], expected[key]) for key in expected), name


@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("delays", [(), (2, 1)], ids=["two_bw", "two and one"])
def test_two_term_without_weight_is_last_as_the_pipeline_does_it(
    lam: float, delays: tuple[int, ...], config: Config
) -> None:
    cell = Cell(changed(config, optimizer__error_feedback=lam), delays=delays)
    expected = weights_of(cell)
    assert distance(weights_of(replace(cell, predictor="two_term", predictor_weight=0.0)), expected) < 1e-12
    assert distance(weights_of(replace(cell, predictor="two_term", predictor_weight=0.5)), expected) > 1e-6


def test_every_predictor_goes_its_own_way(config: Config) -> None:
    found = {name: weights_of(Cell(config, predictor=name)) for name in ["last", "two_term", *OTHERS]}
    found["async"] = weights_of(Cell(changed(config, optimizer__error_feedback=0.0)))
    for one, other in itertools.combinations(found, 2):
        assert distance(found[one], found[other]) > 1e-6, f"{one} is {other}"


def test_adamw_without_look_ahead_is_foretold_by_its_last_update(config: Config) -> None:
    """Whose numerator and denominator are the momentum's own: there is no fresh noise to leave out."""
    cell = Cell(changed(config, optimizer__name="adamw", optimizer__learning_rate=0.003))
    assert (
        distance(
            weights_of(replace(cell, predictor="experiments.predictors.momentum")),
            weights_of(replace(cell, predictor="last")),
        )
        < 1e-12
    )


def test_what_a_pipeline_expects_of_adamw_is_its_update_with_nesterovs_term(config: Config) -> None:
    cell = Cell(changed(config, optimizer__name="adamw", optimizer__learning_rate=0.003))
    own = weights_of(cell)
    assert (
        distance(weights_of(replace(cell, predictor="experiments.predictors.damped", predictor_weight=0.0)), own)
        < 1e-12
    )
    assert distance(weights_of(replace(cell, predictor="last")), own) > 1e-6


def test_beside_muon_a_pipeline_expects_the_last_update_of_adamw_too_unless_told(config: Config) -> None:
    own = weights_of(Cell(config))
    assert distance(weights_of(Cell(config, predictor="last")), own) < 1e-12
    told = Cell(changed(config, optimizer__adamw_predictor="nesterov"))
    assert distance(weights_of(told), own) > 1e-6
    assert (
        distance(
            weights_of(replace(told, predictor="experiments.predictors.damped", predictor_weight=0.0)), weights_of(told)
        )
        < 1e-12
    )


@pytest.mark.parametrize("name", ["two_term", "adaptive", "fitted"])
def test_every_group_has_a_predictor_that_knows_nothing_of_the_others(name: str, config: Config) -> None:
    """What one was told, told again to another that is new, gets the same answers."""
    run = DelayedRun(
        Cell(config, predictor=path_of(name), delays=(2, 1)), build_components(config), torch.device("cpu")
    )
    told: dict[str, list[tuple[list[Tensor], list[Tensor]]]] = {}

    def listening(group: str, predictor: Predictor) -> Predictor:
        def answer(updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
            passed = [u.clone() for u in updates]
            found = predictor(updates, optimizer)
            told.setdefault(group, []).append((passed, [w.clone() for w in found]))
            return found

        return answer

    for state in run.groups:
        state.predictor = listening(state.group.name, state.predictor)
    for _ in run.train():
        pass
    assert list(told) == ["matrices", "rest"]
    for answers in told.values():
        fresh = predictor_of(name)
        assert len(answers) == config.train.steps
        for passed, found in answers:
            assert len(passed) == 2  # a piece for each delay
            assert all(torch.equal(w, v) for w, v in zip(fresh(passed, NOBODY), found, strict=True))


def test_what_is_expected_is_taken_off_once_for_every_step_of_delay(config: Config) -> None:
    """x = z - lam d w, for slabs that lag by 2 and by 1."""
    cell = Cell(
        changed(config, optimizer__error_feedback=0.5), predictor="experiments.predictors.adaptive", delays=(2, 1)
    )
    run = DelayedRun(cell, build_components(cell.config), torch.device("cpu"))
    said: list[Tensor] = []

    def ones(updates: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        said.extend(updates)
        return [torch.ones_like(u) for u in updates]

    for state in run.groups:
        state.predictor = ones
    next(run.train())
    slabs = [slab for state in run.groups for slab in state.slabs]
    assert [slab.delay for slab in slabs] == [2, 1, 2, 1]
    for slab in slabs:
        torch.testing.assert_close(slab.versions[-1], slab.master - 0.5 * slab.delay, rtol=0, atol=1e-12)
    assert sum(update.numel() for update in said) == sum(weight.numel() for weight in run.weights().values())
