"""What a stage's clock says of the costs of its actions."""

import pytest
import torch

from slipstream.pipeline.clock import Activity, Clock, Span
from slipstream.schedule import Action, Op
from slipstream.tools.bench.contenders import costs_of

FORWARD, BACKWARD, UPDATE, BETWEEN = 0.02, 0.05, 0.003, 0.001


def clock_of(num_steps: int, num_microbatches: int) -> Clock:
    """A stage that waits for the sums of an update only when the batch after it has ended, as two_bw does."""
    clock, now = Clock(torch.device("cpu"), 0, num_microbatches), 0.0

    def add(activity: Activity, op: Op, microbatch: int, seconds: float) -> None:
        nonlocal now
        clock.spans.append(Span(Action(0, op, microbatch, 0), activity, now, now + seconds))
        now += seconds + BETWEEN

    for microbatch in range(num_steps * num_microbatches):
        if microbatch % num_microbatches == 0 and microbatch >= 2 * num_microbatches:
            add(Activity.WAIT_SUMS, Op.UPDATE, microbatch - num_microbatches - 1, UPDATE)
        add(Activity.FORWARD, Op.FORWARD, microbatch, FORWARD)
        add(Activity.BACKWARD, Op.BACKWARD, microbatch, BACKWARD)
    return clock


@pytest.mark.parametrize("num_microbatches", [4, 16])
def test_what_an_action_costs_beside_its_computation_does_not_depend_on_when_updates_end(num_microbatches: int) -> None:
    costs = costs_of(clock_of(10, num_microbatches), num_microbatches, num_warm_up=3, num_steady=8)
    assert (costs.forward, costs.backward) == (pytest.approx(FORWARD), pytest.approx(BACKWARD))
    assert costs.sums == pytest.approx(UPDATE)
    # an update has a pause of its own
    assert BETWEEN * 0.9 < costs.overhead < BETWEEN * (1 + 1 / num_microbatches)
