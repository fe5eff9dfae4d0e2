"""Predictors on sequences whose next member is known."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from chosen_predictors import NOBODY, make_predictor, predictor_of
from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.predictors import MEMORY
from slipstream.optim import AdamW, Muon
from slipstream.tools.study.predictors import Predictor


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_walk(num: int, seed: int = 0) -> list[list[Tensor]]:
    """Updates in two pieces that resemble each other, as an optimizer's do."""
    drift = random(12, seed=seed)
    updates = [drift + 0.5 * random(12, seed=1000 * seed + t) for t in range(num)]
    return [[u[:5].clone(), u[5:].clone()] for u in updates]


def forecasts(predictor: Predictor, updates: Sequence[list[Tensor]], optimizer: Optimizer = NOBODY) -> list[Tensor]:
    return [torch.cat(predictor([u.clone() for u in pieces], optimizer)) for pieces in updates]


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (found - expected).norm() <= tolerance * expected.norm()


# ---- last, two_term


def test_last_expects_the_last_update_again() -> None:
    updates = random_walk(4)
    for found, update in zip(forecasts(predictor_of("last"), updates), updates, strict=True):
        assert torch.equal(found, torch.cat(update))


@pytest.mark.parametrize("weight", [0.5, 1.0, 0.0, -0.5, -1.0])
def test_two_term_carries_the_change_on(weight: float) -> None:
    updates = random_walk(5)
    flat = [torch.cat(pieces) for pieces in updates]
    found = forecasts(predictor_of("two_term", weight), updates)
    assert torch.equal(found[0], flat[0])  # of one update nothing follows but itself
    for forecast, (v, u) in zip(found[1:], itertools.pairwise(flat), strict=True):
        torch.testing.assert_close(forecast, u + weight * (u - v), rtol=1e-13, atol=1e-13)


# ---- adaptive, fitted


@pytest.mark.parametrize("c", [0.9, 1.3, 0.1, -0.5, -1.5])
def test_adaptive_finds_the_ratio_of_a_geometric_sequence(c: float) -> None:
    u = random(12)
    updates = [[c**t * u[:5], c**t * u[5:]] for t in range(6)]
    for forecast, following in itertools.islice(
        zip(forecasts(predictor_of("adaptive"), updates), updates[1:], strict=False), 1, None
    ):
        assert_close(forecast, torch.cat(following), 2e-6)


def test_adaptive_averages_the_normal_equations_over_steps() -> None:
    """Every step weighs the same, however large its update, and ever less as it gets older."""
    updates = random_walk(12)
    flat = [(1 + t) * torch.cat(pieces) for t, pieces in enumerate(updates)]
    found = forecasts(predictor_of("adaptive"), [[u] for u in flat])
    weight, cross, square = 1.0, 0.0, 0.0
    for t, (v, u) in enumerate(itertools.pairwise(flat), start=1):
        cross = MEMORY * cross + weight * float(u @ v / (u @ u))
        square = MEMORY * square + weight * float(v @ v / (u @ u))
        weight = 1 - MEMORY
        assert_close(found[t], cross / square * u, 2e-6)


def recurrence(a: float, b: float, num: int) -> list[list[Tensor]]:
    """u[t] = a u[t-1] + b u[t-2]"""
    sequence = [random(12, seed=1), random(12, seed=2)]
    while len(sequence) < num:
        sequence.append(a * sequence[-1] + b * sequence[-2])
    return [[u[:5], u[5:]] for u in sequence]


@pytest.mark.parametrize(
    ("a", "b"),
    [*((2 * math.cos(w), -1.0) for w in (0.3, 1.0, 2.5)), (0.6, 0.3), (0.0, 1.0), (1.5, -0.7)],
)
def test_fitted_finds_the_coefficients_of_a_recurrence(a: float, b: float) -> None:
    """The first three turn: each update is the one before, rotated by an angle."""
    updates = recurrence(a, b, 10)
    found = forecasts(predictor_of("fitted"), updates)
    for t in range(2, 9):
        assert_close(found[t], torch.cat(updates[t + 1]), 1e-4)
        u, v = torch.cat(updates[t]), torch.cat(updates[t - 1])
        coefficients = torch.linalg.lstsq(torch.stack([u, v], dim=1), found[t].unsqueeze(1)).solution.flatten()
        assert coefficients.tolist() == pytest.approx([a, b], abs=1e-4)


def test_a_rotation_is_what_one_term_cannot_foretell() -> None:
    updates = recurrence(2 * math.cos(1.0), -1.0, 10)
    following = torch.cat(updates[9])
    errors = {
        name: float((forecasts(predictor_of(name), updates[:9])[-1] - following).norm() / following.norm())
        for name in ("last", "adaptive", "fitted")
    }
    assert errors["fitted"] < 1e-4
    assert min(errors["last"], errors["adaptive"]) > 0.3


@pytest.mark.parametrize(("name", "num_terms"), [("adaptive", 1), ("fitted", 2)])
def test_until_there_is_something_to_fit_the_last_update_is_expected(name: str, num_terms: int) -> None:
    updates = random_walk(num_terms + 1)
    found = forecasts(predictor_of(name), updates)
    for t in range(num_terms):
        assert torch.equal(found[t], torch.cat(updates[t]))
    assert not torch.equal(found[num_terms], torch.cat(updates[num_terms]))


@pytest.mark.parametrize("name", ["adaptive", "fitted"])
def test_a_fit_is_over_all_pieces_and_whatever_their_division(name: str) -> None:
    updates = random_walk(6)
    whole = forecasts(predictor_of(name), [[torch.cat(pieces)] for pieces in updates])
    for found, expected in zip(forecasts(predictor_of(name), updates), whole, strict=True):
        assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("name", ["adaptive", "fitted"])
def test_updates_of_one_direction_leave_the_fit_sound(name: str) -> None:
    """Collinear, and the system singular: any coefficients that add up to 1 will do."""
    u = random(12)
    for forecast in forecasts(predictor_of(name), [[u]] * 8):
        assert_close(forecast, u, 1e-5)


@pytest.mark.parametrize("name", ["last", "two_term", "adaptive", "fitted"])
@pytest.mark.parametrize("zeros", [{0}, {0, 1}, {0, 1, 2, 3}, {2}, {3, 4}, set(range(8))], ids=str)
def test_updates_of_zero_leave_all_forecasts_finite(name: str, zeros: set[int]) -> None:
    """SOAP's first update is one."""
    updates = random_walk(8)
    updates = [[0 * u for u in pieces] if t in zeros else pieces for t, pieces in enumerate(updates)]
    found = forecasts(predictor_of(name), updates)
    assert all(bool(forecast.isfinite().all()) for forecast in found)
    for t in range(7, 8):
        assert float(found[t].norm()) <= 4 * max(float(torch.cat(updates[i]).norm()) for i in (t, t - 1))


def test_after_a_first_update_of_zero_the_second_is_expected_again() -> None:
    u = random(12)
    assert_close(forecasts(predictor_of("adaptive"), [[0 * u], [u]])[1], u, 1e-12)


def test_a_fit_does_not_expect_more_than_twice_an_update() -> None:
    u = random(12)
    found = forecasts(predictor_of("adaptive"), [[10.0**t * u] for t in range(4)])
    assert_close(found[-1], 2 * 10.0**3 * u, 1e-12)


# ---- momentum


def make_muon(parameters: list[nn.Parameter], **more: Any) -> Muon:
    return Muon(parameters, lr=0.02, beta=0.9, ns_dtype=torch.float64, **more)


def make_adamw(parameters: list[nn.Parameter], **more: Any) -> AdamW:
    return AdamW(parameters, lr=0.01, beta1=0.8, beta2=0.9, **more)


Make = Callable[..., Optimizer]
SHAPES: list[list[tuple[int, ...]]] = [[(6, 4), (3, 4, 5)], [(4, 6), (6, 4)]]
"""Of the parameters in each of two pieces."""


class Watched:
    """An optimizer of a few matrices, and the predictor that looks into it."""

    def __init__(self, make: Make, name: str = "momentum", weight: float = 0.0, **more: Any) -> None:
        self.pieces = [[nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in piece] for piece in SHAPES]
        self.parameters = [p for piece in self.pieces for p in piece]
        self.optimizer = make(self.parameters, **more)
        self._predict = make_predictor(name, weight, self.pieces)

    def step(self, gradients: list[Tensor]) -> Tensor:
        """Returns the update, flat."""
        before = [p.detach().clone() for p in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()
        return torch.cat([(old - p.detach()).flatten() for old, p in zip(before, self.parameters, strict=True)])

    def forecast(self) -> Tensor:
        updates = [torch.zeros(sum(p.numel() for p in piece), dtype=torch.float64) for piece in self.pieces]
        found = self._predict(updates, self.optimizer)
        assert [piece.shape for piece in found] == [update.shape for update in updates]
        return torch.cat(found)


def random_gradients(seed: int) -> list[Tensor]:
    return [random(*shape, seed=17 * seed + i) for i, shape in enumerate(shape for piece in SHAPES for shape in piece)]


@pytest.mark.parametrize("make", [make_muon, make_adamw])
@pytest.mark.parametrize("nesterov", [False, True])
def test_of_a_constant_gradient_momentum_foretells_every_update(make: Make, nesterov: bool) -> None:
    momentum = Watched(make, nesterov=nesterov)
    gradients = random_gradients(0)
    momentum.step(gradients)
    for step in range(2, 30):
        forecast = momentum.forecast()
        update = momentum.step(gradients)
        if make is make_adamw and nesterov:
            # Its numerator is (beta1 m + (1 - beta1) g) / (1 - beta1^t): too large at first, for m begins at zero.
            update *= (1 - 0.8**step) / (1 - 0.8 ** (step + 1))
        assert_close(forecast, update, 1e-7)  # eps, and the norm that Newton-Schulz begins with


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_foretold_as_if_the_next_gradient_were_the_momentum(nesterov: bool) -> None:
    momentum = Watched(make_muon, nesterov=nesterov)
    for seed in range(4):
        momentum.step(random_gradients(seed))
        forecast = momentum.forecast()
        twin = copy.deepcopy(momentum)
        expected = twin.step([momentum.optimizer.state[p]["momentum"] for p in momentum.parameters])
        assert_close(forecast, expected, 1e-12)


def test_adamw_is_foretold_as_if_the_next_gradient_and_its_square_were_their_means() -> None:
    """Which the moments then stay at, each corrected for its beginning: m' / (1 - beta^(t+1)) = m / (1 - beta^t)."""
    momentum = Watched(make_adamw)
    for step in range(1, 5):
        momentum.step(random_gradients(step))
        forecast = momentum.forecast()
        expected = []
        for parameter in momentum.parameters:
            state = momentum.optimizer.state[parameter]
            mean, square = state["mean"] / (1 - 0.8**step), state["square"] / (1 - 0.9**step)
            # The next moments, of a gradient like that, and the next update
            next_mean = (0.8 * state["mean"] + 0.2 * mean) / (1 - 0.8 ** (step + 1))
            next_square = (0.9 * state["square"] + 0.1 * square) / (1 - 0.9 ** (step + 1))
            expected.append((0.01 * next_mean / (next_square.sqrt() + 1e-8)).flatten())
        assert_close(forecast, torch.cat(expected), 1e-12)


@pytest.mark.parametrize("make", [make_muon, make_adamw])
def test_the_fresh_gradient_counts_no_more_than_any_other(make: Make) -> None:
    """Looking ahead, an update holds the newest gradient twice. What is expected next is the update of an optimizer
    that does not look ahead; of one that does not, the last update again."""
    ahead, plain = Watched(make, nesterov=True), Watched(make, nesterov=False)
    for seed in range(4):
        update, expected = ahead.step(random_gradients(seed)), plain.step(random_gradients(seed))
        assert_close(ahead.forecast(), expected, 1e-12)
        assert_close(plain.forecast(), expected, 1e-12)
        if seed:
            assert (update - expected).norm() > 0.01 * expected.norm()


def test_momentum_uses_the_learning_rate_of_the_step_just_made() -> None:
    momentum = Watched(make_muon)
    momentum.step(random_gradients(0))
    before = momentum.forecast()
    momentum.optimizer.param_groups[0]["lr"] *= 3
    assert_close(momentum.forecast(), 3 * before, 1e-12)


# ---- damped


def test_of_muon_that_does_not_look_ahead_damped_knows_the_update_if_the_gradient_comes_again() -> None:
    damped = Watched(make_muon, "damped", nesterov=False)
    for seed in range(4):
        damped.step(random_gradients(seed))
        assert_close(damped.forecast(), copy.deepcopy(damped).step(random_gradients(seed)), 1e-12)


@pytest.mark.parametrize("make", [make_muon, make_adamw])
def test_looking_ahead_is_to_count_the_gradient_again(make: Make) -> None:
    damped = Watched(make, "damped", nesterov=True)
    for seed in range(4):
        update = damped.step(random_gradients(seed))
        assert_close(damped.forecast(), update, 1e-12)


@pytest.mark.parametrize("make", [make_muon, make_adamw])
@pytest.mark.parametrize("weight", [0.65, 1.4, -1.0])
def test_damped_takes_off_a_multiple_of_what_momentum_expects(make: Make, weight: float) -> None:
    damped, repeated, momentum = Watched(make, "damped", weight), Watched(make, "damped", 0.0), Watched(make)
    for seed in range(4):
        for watched in (damped, repeated, momentum):
            watched.step(random_gradients(seed))
        expected = repeated.forecast() - weight * momentum.forecast()
        assert (damped.forecast() - expected).norm() < 1e-12 * momentum.forecast().norm()


# ---- what is whose


@pytest.mark.parametrize("name", ["last", "two_term", "adaptive", "fitted"])
def test_neither_side_overwrites_what_the_other_holds(name: str) -> None:
    """The caller may do what it likes with the updates it passed and with those it got."""
    updates = random_walk(8)
    expected = forecasts(predictor_of(name), updates)
    predictor = predictor_of(name)
    for pieces, forecast in zip(updates, expected, strict=True):
        passed = [u.clone() for u in pieces]
        found = predictor(passed, NOBODY)
        assert torch.equal(torch.cat(found), forecast)
        for tensor in (*found, *passed):
            tensor.fill_(math.nan)


@pytest.mark.parametrize("name", ["two_term", "adaptive", "fitted"])
def test_a_forecast_stays_what_it_was(name: str) -> None:
    predictor = predictor_of(name)
    kept = []
    for pieces in random_walk(8):
        passed = [u.clone() for u in pieces]
        found = predictor(passed, NOBODY)
        assert torch.equal(torch.cat(passed), torch.cat(pieces))
        kept.append((found, [w.clone() for w in found]))
    for found, then in kept:
        assert all(torch.equal(w, copied) for w, copied in zip(found, then, strict=True))


@pytest.mark.parametrize("make", [make_muon, make_adamw])
@pytest.mark.parametrize("name", ["momentum", "damped"])
def test_a_forecast_leaves_the_optimizer_alone(name: str, make: Make) -> None:
    asked, other = Watched(make, name, 0.5), Watched(make)
    for seed in range(3):
        if seed:
            asked.forecast().fill_(math.nan)
        assert torch.equal(asked.step(random_gradients(seed)), other.step(random_gradients(seed)))


def test_an_unknown_predictor_is_refused() -> None:
    with pytest.raises(ValueError, match="predictor = 'lats' is unknown: use last, two_term or the import path"):
        make_predictor("lats", 0.5, [])


def stays_bounded(rate: float, beta: float, guess: Callable[[float, float], float]) -> bool:
    """Nesterov's momentum on x^2 / 2, one step late, where guess(momentum, gradient) foretells the next update."""
    z, versions, momentum = 1.0, [1.0, 1.0], 0.0
    for _ in range(3000):
        gradient = versions.pop(0)
        momentum = beta * momentum + (1 - beta) * gradient
        z -= rate * (beta * momentum + (1 - beta) * gradient)
        versions.append(z - rate * guess(momentum, gradient))
        if abs(z) > 1e6:
            return False
    return True


def test_damped_keeps_a_quadratic_stable_at_twice_the_rate_of_last() -> None:
    beta, k = 0.95, 1.4

    def last(momentum: float, gradient: float) -> float:
        return beta * momentum + (1 - beta) * gradient

    def damped(momentum: float, gradient: float) -> float:
        return last(momentum, gradient) - k * momentum

    assert stays_bounded(6.5, beta, last) and not stays_bounded(7.0, beta, last)
    assert stays_bounded(12.5, beta, damped)
