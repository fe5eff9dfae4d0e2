"""Learning-rate multipliers by update index."""

from __future__ import annotations

import pytest

from slipstream.optim.learning_rate import SCHEDULES, learning_rate_schedule


def every(name: str, warmup_steps: int = 10, total_steps: int = 100, decay_steps: int = 20, final: float = 0.1):  # type: ignore[no-untyped-def]
    return learning_rate_schedule(
        name, warmup_steps=warmup_steps, total_steps=total_steps, decay_steps=decay_steps, final_fraction=final
    )


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
    assert [every("constant", 2)(step) for step in (0, 1, 2, 10**6)] == [0.5, 1.0, 1.0, 1.0]


def test_cosine_and_linear_are_halfway_in_the_middle() -> None:
    assert every("cosine", 10, 110)(60) == pytest.approx(0.55)
    assert every("linear", 10, 110)(60) == pytest.approx(0.55)
    assert every("cosine", 0, 100, final=0.0)(25) == pytest.approx((1 + 0.5**0.5) / 2)


def test_wsd_holds_the_peak_until_the_decay() -> None:
    multiplier = every("wsd", final=0.0)
    assert {multiplier(step) for step in range(9, 81)} == {1.0}
    assert [multiplier(step) for step in (85, 90, 100)] == pytest.approx([0.75, 0.5, 0.0])


def test_one_minus_sqrt_holds_the_peak_and_falls_with_the_root_of_the_decay_that_has_passed() -> None:
    multiplier = every("1-sqrt", decay_steps=16, final=0.0)
    assert {multiplier(step) for step in range(9, 85)} == {1.0}
    assert [multiplier(step) for step in (85, 88, 93, 99, 100)] == pytest.approx(
        [1 - 1 / 4, 1 - 2 / 4, 1 - 3 / 4, 1 - (15 / 16) ** 0.5, 0.0], abs=1e-15
    )
    assert every("1-sqrt", decay_steps=16, final=0.2)(88) == pytest.approx(0.2 + 0.8 / 2)


def test_run_may_consist_of_warmup_alone() -> None:
    assert every("cosine", 10, 10)(9) == 1.0
    assert every("wsd", 10, 10, 0)(9) == 1.0


def test_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="schedule 'step' is unknown: choose one of constant, cosine, linear, wsd, 1-sqrt"
    ):
        every("step")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: every("constant", -1), "warmup_steps is -1: use 0 or more"),
        (lambda: every("cosine", 20, 10), "total_steps is 10: use at least the 20 of warmup_steps"),
        (lambda: every("linear", 20, 10), "total_steps is 10: use at least the 20 of warmup_steps"),
        (lambda: every("wsd", 0, 10, -1), "decay_steps is -1: use 0 or more"),
        (lambda: every("wsd", 5, 10, 6), "decay_steps is 6: use at most the 5 that warm-up leaves"),
        (lambda: every("cosine", 0, 10, final=1.1), "final_fraction is 1.1: use a value from 0 to 1"),
    ],
)
def test_bad_setting_is_refused_by_name(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()
