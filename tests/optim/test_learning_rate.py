"""Learning-rate multipliers by update index."""

from __future__ import annotations

import pytest

from slipstream.optim.learning_rate import (
    SCHEDULES,
    constant,
    cosine,
    learning_rate_schedule,
    linear,
    one_minus_sqrt,
    wsd,
)


def every(name: str, warmup_steps: int = 10):  # type: ignore[no-untyped-def]
    return learning_rate_schedule(name, warmup_steps=warmup_steps, total_steps=100, decay_steps=20, final_fraction=0.1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_is_linear_and_never_zero(name: str) -> None:
    assert [every(name)(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_the_first_update_is_at_the_peak(name: str) -> None:
    assert every(name, warmup_steps=0)(0) == 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_multiplier_never_rises_after_warmup(name: str) -> None:
    values = [every(name)(step) for step in range(9, 120)]
    assert values == sorted(values, reverse=True)
    assert values[0] == values[1] == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "1-sqrt"])
def test_multiplier_is_clamped_after_the_end(name: str) -> None:
    assert every(name)(99) > 0.1
    assert [every(name)(step) for step in (100, 101, 10_000)] == pytest.approx([0.1] * 3, abs=1e-15)


def test_constant_stays_at_the_peak() -> None:
    assert [constant(2)(step) for step in (0, 1, 2, 10**6)] == [0.5, 1.0, 1.0, 1.0]


def test_cosine_and_linear_are_halfway_in_the_middle() -> None:
    assert cosine(10, 110, 0.1)(60) == pytest.approx(0.55)
    assert linear(10, 110, 0.1)(60) == pytest.approx(0.55)
    assert cosine(0, 100, 0.0)(25) == pytest.approx((1 + 0.5**0.5) / 2)


def test_wsd_holds_the_peak_until_the_decay() -> None:
    multiplier = wsd(10, 20, 100, 0.0)
    assert {multiplier(step) for step in range(9, 81)} == {1.0}
    assert [multiplier(step) for step in (85, 90, 100)] == pytest.approx([0.75, 0.5, 0.0])


def test_one_minus_sqrt_holds_the_peak_and_falls_with_the_root_of_the_decay_that_has_passed() -> None:
    multiplier = one_minus_sqrt(10, 16, 100, 0.0)
    assert {multiplier(step) for step in range(9, 85)} == {1.0}
    assert [multiplier(step) for step in (85, 88, 93, 99, 100)] == pytest.approx(
        [1 - 1 / 4, 1 - 2 / 4, 1 - 3 / 4, 1 - (15 / 16) ** 0.5, 0.0], abs=1e-15
    )
    assert one_minus_sqrt(10, 16, 100, 0.2)(88) == pytest.approx(0.2 + 0.8 / 2)


def test_run_may_consist_of_warmup_alone() -> None:
    assert cosine(10, 10, 0.1)(9) == 1.0
    assert wsd(10, 0, 10, 0.1)(9) == 1.0


def test_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="schedule 'step' is unknown: choose one of constant, cosine, linear, wsd, 1-sqrt"
    ):
        every("step")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant(-1), "warmup_steps is -1: use 0 or more"),
        (lambda: cosine(20, 10, 0.1), "total_steps is 10: use at least the 20 of warmup_steps"),
        (lambda: linear(20, 10, 0.1), "total_steps is 10: use at least the 20 of warmup_steps"),
        (lambda: wsd(0, -1, 10, 0.1), "decay_steps is -1: use 0 or more"),
        (lambda: wsd(5, 6, 10, 0.1), "decay_steps is 6: use at most the 5 that warm-up leaves"),
        (lambda: cosine(0, 10, 1.1), "final_fraction is 1.1: use a value from 0 to 1"),
    ],
)
def test_bad_setting_is_refused_by_name(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()
