"""The fit finds the law that made its data."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from slipstream.tools.tune.fit import End, Fit, fit, lambert, least_squares, priors
from slipstream.tools.tune.laws import measured_gap

TARGET = 2.4e7, 4.8e8
"""Parameters and tokens: eight times the largest proxy's."""


def best_rate(n: float, d: float, b: float) -> float:
    return 0.012 * (n / 1e6) ** -0.25 * (d / 2e7) ** -0.1 * (b / 8192) ** 0.55


def true_loss(n: float, d: float, b: float, rate: float, is_late: bool) -> float:
    x = math.log(rate / best_rate(n, d, b))
    y = math.log(b / 9000) - 0.5 * math.log(d / 2e7)
    floor = 0.6 + 0.45 * (n / 1e6) ** -0.3 + 0.35 * (d / 2e7) ** -0.33
    # The bowl is skewed, as real ones are: too high a rate costs more. And it becomes flatter, as real ones do.
    wrong = (0.02 * x**2 * (1 + 0.15 * math.tanh(x)) + 0.008 * y**2) * (floor - 0.6) / 0.8
    return floor + wrong + is_late * 0.05 * (d / b / 2441) ** -1.1


def guess(n: float, d: float) -> tuple[float, float]:
    return 0.02 * (n / 1e6) ** -0.5, 0.58 * d**0.571


def branches(noise: float, seed: int = 0) -> list[End]:
    random, ends = np.random.default_rng(seed), []
    for index, n in enumerate((3e5, 1.2e6, 3e6)):
        longest = 20 * n
        middle = 2.0 ** round(math.log2(0.58 * (longest / 2) ** 0.571))
        rate = 0.012 * (n / 1e6) ** -0.3
        settings = [(middle, rate * factor, True) for factor in ((0.35, 0.7, 1.4, 2.8) if index == 0 else (0.5, 1, 2))]
        for factor in (0.5, 2):
            settings += [(middle * factor, rate, True), (middle * factor, rate * factor, True)]
        for number, (batch, its_rate, is_late) in enumerate([*settings, (middle, rate, False)]):
            shared = random.standard_normal()
            for d in (longest / 4, longest / 2, longest):
                error = noise * (shared + random.standard_normal()) / math.sqrt(2)
                loss = true_loss(n, d, batch, its_rate, is_late) * (1 + error)
                ends.append(End(f"{index}.{number}", n, d, batch, its_rate, is_late, loss))
    return ends


@cache
def fitted_to_branches(noise: float, seed: int) -> Fit:
    return fitted(branches(noise, seed))


def fitted(ends: list[End], num_samples: int = 40) -> Fit:
    return fit(ends, lambda some: priors(some, True, guess, measured_gap("muon", True), 1.0), num_samples)


def best_setting(is_late: bool) -> tuple[float, float]:
    n, d = TARGET
    batches = np.exp(np.linspace(8, 14, 1201))
    losses = [true_loss(n, d, b, best_rate(n, d, b), is_late) for b in batches]
    batch = float(batches[int(np.argmin(losses))])
    return batch, min(losses)


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.002, 1), (0.002, 2)])
def test_the_target_is_predicted(noise, seed, is_late):
    found, (n, d) = fitted_to_branches(noise, seed), TARGET
    batch, lowest = best_setting(is_late)
    chosen = float(found.batch(n, d, is_late))
    its_rate = float(found.rate(n, d, chosen))
    assert 0.5 < chosen / batch < 2
    assert 1 / 1.5 < its_rate / best_rate(n, d, chosen) < 1.5
    actual = true_loss(n, d, chosen, its_rate, is_late)
    assert actual / lowest - 1 < 0.005
    low, high = found.loss_band(n, d, chosen, its_rate, is_late)
    assert low < actual < high and (high - low) / actual < 0.1
    assert low < float(found.loss(n, d, chosen, its_rate, is_late)) < high


def test_the_gap_and_its_band():
    found, (n, d) = fitted_to_branches(0.002, 1), TARGET
    for batch in (8192, 65536):
        gap = true_loss(n, d, batch, 0.01, True) - true_loss(n, d, batch, 0.01, False)
        low, high = found.band(found.gap(n, d, batch, found.samples))
        assert low < gap < high and high < 5 * low
        # What a pair of runs shows may be further away.
        lower, higher = found.gap_band(n, d, batch)
        assert lower < low and high < higher and higher - lower < high - low + 8 * found.noise


def test_a_delayed_run_wants_a_smaller_batch():
    found, (n, d) = fitted(branches(0.0), 5), TARGET
    assert float(found.batch(n, d, True)) < float(found.batch(n, d, False))
    assert np.all(found.batch(n, d, True, found.samples) < found.batch(n, d, False, found.samples))
    # It is the lowest point of the law.
    batch = float(found.batch(n, d, True))
    losses = [float(found.loss(n, d, batch * factor, None, True)) for factor in (0.97, 1.0, 1.03)]
    assert losses[1] < losses[0] and losses[1] < losses[2]


def test_without_synchronous_trunks_the_gap_is_uncertain():
    def width(ends: list[End]) -> float:
        found = fitted(ends)
        low, high = found.band(found.gap(*TARGET, 16384, found.samples))
        return math.log(high / low)

    ends = branches(0.0)
    assert width([end for end in ends if end.is_late]) > 1.8 * width(ends)


def test_more_noise_makes_wider_bands():
    def width(noise: float) -> float:
        found = fitted(branches(noise, 4))
        low, high = found.band(found.loss(*TARGET, 16384, 0.008, True, found.samples))
        return high - low

    assert width(0.01) > 1.5 * width(0.001)


def test_a_law_that_bends_is_seen_at_the_largest_proxy():
    def bent(share: float) -> list[End]:
        ends = branches(0.0)
        largest = max(end.parameters for end in ends)
        return [replace(end, loss=end.loss * (1 - share)) if end.parameters == largest else end for end in ends]

    errors = [fitted(bent(share), 1).backtest.error for share in (0.0, 0.03)]
    assert errors[0] < 0.015 and errors[1] == pytest.approx(0.03, abs=0.015)


def test_the_error_of_a_backtest_grows_with_the_distance():
    backtest = fitted(branches(0.0), 1).backtest
    assert backtest.compute == 3e6 * 6e7 and backtest.ratio == pytest.approx(6.25)
    assert backtest.error_at(backtest.compute) == 0 == backtest.error_at(backtest.compute / 2)
    assert backtest.error_at(backtest.compute * 6.25**2) == pytest.approx(2 * backtest.error)


def test_two_sizes_have_no_backtest():
    assert fitted([end for end in branches(0.0) if end.parameters < 2e6], 1).backtest is None


def test_a_fit_survives_its_file():
    found = fitted(branches(0.001), 5)
    again = Fit.from_tree(found.tree())
    assert again.backtest == found.backtest is not None
    for method in ("floor", "gap", "rate"):
        arguments = TARGET if method == "floor" else (*TARGET, 8192)
        assert np.allclose(getattr(again, method)(*arguments), getattr(found, method)(*arguments), rtol=1e-12)
        drawn = getattr(again, method)(*arguments, again.samples)
        assert np.allclose(drawn, getattr(found, method)(*arguments, found.samples), rtol=1e-4)


def test_least_squares_finds_the_minimum_of_a_curved_valley():
    def rosenbrock(theta: np.ndarray) -> np.ndarray:
        x, y = theta[:, 0], theta[:, 1]
        return np.stack([10 * (y - x**2), 1 - x], axis=1)

    assert np.allclose(least_squares(rosenbrock, np.array([-1.2, 1.0])), [1, 1], atol=1e-6)


def test_lambert_inverts_x_times_its_exponential():
    x = np.array([0.0, 1e-6, 0.3, 2.0, 8.0])
    assert np.allclose(lambert(x * np.exp(x)), x, rtol=1e-9)
