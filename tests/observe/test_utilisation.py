"""Expected utilisation from measured costs, and what was lost beside it."""

import pytest

from slipstream.observe.utilisation import explain_utilisation
from slipstream.pipeline.clock import TimeSplit
from slipstream.schedule import Schedule


def test_a_pipeline_that_never_drains_is_expected_to_be_full_and_its_waits_are_the_links():
    stage = TimeSplit(forward=4.0, backward=8.0, wait_activations=0.3, wait_gradients=0.3, other=0.6, data=0.8)
    found = explain_utilisation(Schedule("two_bw", 4, 4), [[stage] * 4] * 3)
    assert found is not None
    assert found.expected_by_stage == pytest.approx([1.0] * 4)
    assert found.measured == pytest.approx(12 / 14)
    assert found.data + found.executor == pytest.approx(1 - 12 / 13.4)
    assert found.data / found.executor == pytest.approx(0.8 / 0.6)
    assert found.expected - found.measured == pytest.approx(found.link + found.data + found.executor)


def test_the_schedules_own_bubble_is_no_loss_of_the_links():
    num_stages, m = 4, 4
    busy, bubble = 12.0, 12.0 * (num_stages - 1) / m
    stage = TimeSplit(forward=4.0, backward=8.0, wait_gradients=bubble)
    found = explain_utilisation(Schedule("one_f_one_b", num_stages, m), [[stage] * num_stages] * 2)
    assert found is not None
    assert found.expected == pytest.approx(m / (m + num_stages - 1)) == pytest.approx(busy / (busy + bubble))
    assert found.link == pytest.approx(0.0)


def test_a_stage_that_costs_more_makes_the_others_wait_and_that_is_expected():
    cheap, dear = TimeSplit(forward=1.0, backward=2.0, wait_activations=1.5), TimeSplit(forward=1.5, backward=3.0)
    found = explain_utilisation(Schedule("two_bw", 2, 4), [[cheap, dear]])
    assert found is not None
    assert found.expected_by_stage == pytest.approx([2 / 3, 1.0])
    assert found.link == pytest.approx(0.0)


def test_what_slows_one_stage_is_not_laid_upon_the_links_of_the_next():
    slow = TimeSplit(forward=1.0, backward=2.0, data=1.0)
    patient = TimeSplit(forward=1.0, backward=2.0, wait_activations=1.0)
    found = explain_utilisation(Schedule("two_bw", 2, 4), [[slow, patient]])
    assert found is not None
    assert (found.expected, found.measured, found.data) == pytest.approx((1.0, 0.75, 0.25))
    assert found.link == pytest.approx(0.0)


def test_evaluations_are_neither_expected_nor_lost():
    stage = TimeSplit(forward=1.0, backward=2.0, evaluation=5.0)
    found = explain_utilisation(Schedule("two_bw", 2, 2), [[stage, stage]])
    assert found is not None and found.measured == pytest.approx(1.0)


@pytest.mark.parametrize(
    "schedule, splits",
    [
        (Schedule("two_bw", 64, 256), [TimeSplit(forward=1.0)] * 64),
        (Schedule("two_bw", 2, 2), [TimeSplit(), TimeSplit()]),
    ],
    ids=["too large", "nothing measured"],
)
def test_nothing_is_expected_without_enough_to_go_by(schedule, splits):
    assert explain_utilisation(schedule, [splits]) is None
