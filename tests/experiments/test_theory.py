"""The numbers of docs/research/theory.md: the stability table, its formulas, delayed LMO descent on a small problem."""

import math
from pathlib import Path

import lmo
import numpy as np
import pytest
import stability
import theory
from page import with_table
from stability import VARIANTS

REPOSITORY = Path(__file__).resolve().parents[2]

# By beta, in the order of stability.VARIANTS, as strings: the last digit printed is the tolerance. Worked out before
# these scripts existed, by another program.
PUBLISHED = {
    0.0: ("2", "1.00", "0.62", "2", "1.00", "0.83", "0.62"),
    0.9: ("38", "1.00", "2.70", "13.6", "2.53", "3.86", "3.45"),
    0.95: ("78", "1.00", "4.00", "26.9", "3.75", "7.32", "6.78"),
    0.99: ("398", "1.00", "9.51", "134", "9.14", "34.7", "33.4"),
}


def rounding(printed: str) -> float:
    return 0.5 * 10.0 ** -len(printed.partition(".")[2])


@pytest.mark.parametrize("beta", PUBLISHED)
def test_limits_agree_with_the_published_table(beta):
    for variant, printed in zip(VARIANTS, PUBLISHED[beta], strict=True):
        limit = stability.largest_stable_rate(beta, variant.nesterov, variant.delay, variant.lam)
        assert limit == pytest.approx(float(printed), abs=rounding(printed) * (1 + 1e-6)), variant.label


def first_root_on_the_circle(beta: float, nesterov: bool, delay: int, lam: float, trend: float = 0.0) -> float:
    """Another way to the limit, which cannot step over a narrow window.

    With r on the unit circle the recurrence gives the rate that puts a root there; it counts where it is real and
    positive. No rate below the smallest of these moves a root across.
    """
    angle = np.linspace(1e-4, np.pi, 50_001)
    q = np.exp(-1j * angle)
    feedback = (1 - beta) * q ** (1 + delay) * (1 + lam * delay * (1 - q) * (1 + trend * (1 - q)))
    if nesterov:
        feedback = feedback * (1 + beta * (1 - q))
    rate = -(1 - q) * (1 - beta * q) / feedback
    crossing = np.flatnonzero(rate.imag[:-1] * rate.imag[1:] <= 0)
    share = rate.imag[crossing] / (rate.imag[crossing] - rate.imag[crossing + 1])
    candidates = [*(rate.real[crossing] + share * np.diff(rate.real)[crossing]), rate.real[-1]]
    return min(candidate for candidate in candidates if candidate > 0)


@pytest.mark.parametrize("delay", [0, 1, 2, 9])
@pytest.mark.parametrize("lam", [0.0, 1.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_limit_is_the_first_root_on_the_circle(nesterov, lam, delay):
    for beta in (0.0, 0.5, 0.95):
        limit = stability.largest_stable_rate(beta, nesterov, delay, lam)
        assert limit == pytest.approx(first_root_on_the_circle(beta, nesterov, delay, lam), rel=1e-6)


@pytest.mark.parametrize("trend", stability.TRENDS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_limit_with_a_trend_is_the_first_root_on_the_circle(nesterov, trend):
    for beta in (0.5, *stability.TREND_BETAS):
        limit = stability.largest_stable_rate(beta, nesterov, 1, 1.0, trend)
        assert limit == pytest.approx(first_root_on_the_circle(beta, nesterov, 1, 1.0, trend), rel=1e-6)


def simulated_growth(
    rate: float, beta: float, nesterov: bool, delay: int, lam: float, trend: float = 0.0, steps: int = 6000
) -> float:
    """|z| late in a run over |z| early in it, playing the update as it is written."""
    z, momentum, in_flight, path, last = 1.0, 0.0, [1.0] * (delay + 1), [], 0.0
    for _ in range(steps):
        gradient = in_flight.pop(0)
        momentum = beta * momentum + (1 - beta) * gradient
        update = rate * (beta * momentum + (1 - beta) * gradient if nesterov else momentum)
        z -= update
        in_flight.append(z - lam * delay * (update + trend * (update - last)))
        last = update
        path.append(abs(z))
        if abs(z) > 1e100:
            break
    tenth = len(path) // 10
    return max(path[-tenth:]) / max(path[:tenth])


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.95])
@pytest.mark.parametrize(
    "variant", [*stability.VARIANTS, stability.Variant("four steps, lam 1", True, 4, 1.0)], ids=str
)
def test_a_simulation_decays_inside_the_limit_and_grows_outside(variant, beta):
    setting = (beta, variant.nesterov, variant.delay, variant.lam)
    limit = stability.largest_stable_rate(*setting)
    assert simulated_growth(0.95 * limit, *setting) < 0.01
    assert simulated_growth(1.05 * limit, *setting) > 100


@pytest.mark.parametrize("trend", [0.5, 1.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_simulation_with_a_trend_decays_inside_the_limit_and_grows_outside(nesterov, trend):
    setting = (0.9, nesterov, 1, 1.0, trend)
    limit = stability.largest_stable_rate(*setting)
    assert simulated_growth(0.95 * limit, *setting) < 0.01
    assert simulated_growth(1.05 * limit, *setting) > 100


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_to_expect_nesterovs_update_of_ema_is_to_expect_beta_of_its_trend(beta):
    """On a quadratic; once there has been an update before."""
    z, momentum, in_flight, last = 1.0, 0.0, [1.0, 1.0], None
    for _ in range(50):
        gradient = in_flight.pop(0)
        momentum = beta * momentum + (1 - beta) * gradient
        update, with_nesterov = 0.3 * momentum, 0.3 * (beta * momentum + (1 - beta) * gradient)
        if last is not None:
            assert with_nesterov == pytest.approx(update + beta * (update - last), abs=1e-12)
        z, last = z - update, update
        in_flight.append(z - with_nesterov)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
def test_limits_follow_the_formulas_of_the_page(beta):
    def limit(nesterov: bool, delay: int, lam: float) -> float:
        return stability.largest_stable_rate(beta, nesterov, delay, lam)

    assert limit(False, 0, 0.0) == pytest.approx(2 * (1 + beta) / (1 - beta))
    assert limit(False, 1, 0.0) == pytest.approx(1.0)
    for lam in (0.25, 0.5, 1.0, 1.5):
        c = limit(False, 1, lam) * (1 - beta)
        assert lam**2 * c**2 + (1 - beta * lam) * c == pytest.approx(1 - beta)
    # Nesterov one step late is EMA one step late with lam = beta.
    assert limit(True, 1, 0.0) == pytest.approx(limit(False, 1, beta))


def test_full_feedback_raises_the_limit_only_above_half():
    assert stability.largest_stable_rate(0.45, False, 1, 1.0) < 1
    assert stability.largest_stable_rate(0.5, False, 1, 1.0) == pytest.approx(1.0)
    assert stability.largest_stable_rate(0.55, False, 1, 1.0) > 1


def test_nesterov_and_feedback_together_keep_a_third_of_the_horizon():
    assert stability.largest_stable_rate(0.999, True, 1, 1.0) * 0.001 == pytest.approx(1 / 3, rel=0.01)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99])
def test_expecting_nesterovs_update_of_ema_keeps_half_of_the_horizon_and_no_other_trend_more(beta):
    limit = stability.largest_stable_rate(beta, False, 1, 1.0, beta)
    assert limit * (1 - beta) == pytest.approx(1 / 2, rel=1e-3)
    assert max(stability.largest_stable_rate(beta, False, 1, 1.0, 0.05 * i) for i in range(41)) < 1.002 * limit


def test_a_limit_outside_the_scan_is_an_error():
    with pytest.raises(ValueError, match="not between"):
        stability.largest_stable_rate(0.9999, False, 0, 0.0)


# ---------------------------------------------------------------- LMO descent


@pytest.fixture(scope="module", params=[lmo.sign_problem, lmo.spectral_problem], ids=["sign", "spectral"])
def problem(request):
    return request.param(4)


def test_the_lmo_attains_the_dual_norm(problem):
    gradients = np.random.default_rng(5).normal(size=(50, *problem.start.shape[1:]))
    products = (gradients * problem.lmo(gradients)).sum(axis=(-2, -1))
    np.testing.assert_allclose(products, problem.dual_norm(gradients), rtol=1e-9)


def test_smoothness_is_the_largest_curvature_that_a_step_can_meet(problem):
    step = problem.lmo(np.random.default_rng(5).normal(size=(500, *problem.start.shape[1:])))
    for _ in range(20):  # a power iteration in the LMO's norm: |H step|* never falls
        step = problem.lmo(problem.hessian @ step)
    assert problem.dual_norm(problem.hessian @ step).max() == pytest.approx(problem.smoothness)


def test_delayed_runs_converge_at_the_synchronous_rate(problem):
    rows = lmo.rate_study(problem, betas=(0.8, 0.9, 0.95))
    steps = [row.steps for row in rows]
    slopes = [lmo.log_slope(steps, [row.gradient_norm[method] for row in rows]) for method in range(3)]
    assert all(-0.35 < slope < -0.15 for slope in slopes)
    assert max(slopes) - min(slopes) < 0.02
    assert rows[-1].excess[0] < rows[0].excess[0]
    for row in rows:
        assert row.gradient_norm[1] - row.gradient_norm[0] < row.delay_share


def test_at_the_best_rate_the_delay_costs_less_with_momentum(problem):
    betas = (0.0, 0.95)
    rates = [lmo.best_rate(problem, beta, 300) for beta in betas]
    norms, _ = lmo.descend(problem, betas, rates, 300, lmo.NOISE)
    sync, delay, feedback = norms.mean(axis=2).T
    excess = delay / sync - 1
    assert 0 < excess[1] < excess[0] / 2
    assert abs(feedback[1] - sync[1]) < 0.3 * (delay[1] - sync[1])


def test_at_a_fixed_rate_the_delay_costs_more_with_momentum_and_feedback_takes_most_of_it_back(problem):
    norms, _ = lmo.descend(problem, (0.0, 0.95), (0.01, 0.01), 300, lmo.NOISE)
    sync, delay, feedback = norms.mean(axis=2).T
    excess = delay / sync - 1
    assert excess[1] > 2 * excess[0] > 0
    assert feedback[1] - sync[1] < 0.3 * (delay[1] - sync[1])


def test_a_delayed_run_without_noise_ends_at_a_loss_proportional_to_the_horizon():
    problem = lmo.sign_problem(4)
    _, losses = lmo.descend(problem, (0.9, 0.99), (0.01, 0.01), 1000, 0.0)
    sync, delay, _ = losses.mean(axis=2).T
    assert delay[1] / delay[0] == pytest.approx(10, rel=0.2)
    assert np.all(delay > 10 * sync)


def test_feedback_without_momentum_or_noise_ends_worse_than_plain_delay():
    problem = lmo.sign_problem(8)
    _, losses = lmo.descend(problem, (0.0,), (0.01,), 1000, 0.0)
    sync, delay, feedback = losses.mean(axis=2)[0]
    assert sync < delay < feedback


# ---------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def rows():
    return lmo.read_rows(theory.DOCS / "theory.json")


def test_the_page_holds_the_tables_that_the_script_computes(rows):
    page = (theory.DOCS / "theory.md").read_text(encoding="utf-8")
    for name, table in theory.tables(rows).items():
        assert with_table(page, name, theory.SCRIPT, table) == page, name


def test_a_page_without_a_place_for_the_table_is_an_error():
    with pytest.raises(ValueError, match="0 places for the rate table"):
        with_table("no marker here", "rate table", theory.SCRIPT, "| |")


def test_the_log_holds_what_the_script_measures(rows):
    problem = lmo.sign_problem(lmo.SEEDS)
    again = lmo.rate_study(problem, betas=lmo.RATE_BETAS[:2])
    logged = [row for row in rows if row.study == "rate" and row.problem == "sign"][:2]
    for new, old in zip(again, logged, strict=True):
        assert (new.beta, new.steps, new.rate, new.bound) == (old.beta, old.steps, old.rate, old.bound)
        # Another BLAS may flip the sign of an entry near zero, and the runs part from there.
        assert new.gradient_norm == pytest.approx(old.gradient_norm, rel=1e-2)


def test_every_logged_run_stays_below_its_bound(rows):
    for row in rows:
        sync, delay, feedback = row.gradient_norm
        assert sync <= row.bound[0] and delay <= row.bound[1]
        # The mismatch with feedback is at most 2 eta, as for two steps of delay.
        assert feedback <= row.bound[1] + row.delay_share
        assert math.isclose(row.bound[1] - row.bound[0], row.delay_share, rel_tol=1e-2)


def test_a_figure_is_drawn_from_the_log_and_carries_no_date(rows, tmp_path):
    pytest.importorskip("matplotlib")
    lmo.draw_lmo(rows, tmp_path / "figure.svg")
    figure = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert figure.rstrip().endswith("</svg>") and "<dc:date>" not in figure
