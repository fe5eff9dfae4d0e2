"""What processes ask for reaches all of them, also where no update waits for the other stages."""

from __future__ import annotations

import math
from functools import partial
from itertools import count

import pytest
import torch
from harness import all_weights, even_cut, forks, largest_difference, network, run_ranks, run_reference

from slipstream import Evaluation, Group
from slipstream.pipeline import Requests
from slipstream.schedule import Schedule

SGD = [Group("all", partial(torch.optim.SGD, lr=0.05))]
NUM_STAGES, M, NUM_STEPS = 4, 2, 40


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
@pytest.mark.parametrize("schedule", ["pipedream", "paci", "two_bw"])
@pytest.mark.parametrize("asking", [0, 3])
def test_a_stop_that_one_stage_asks_for_ends_all_after_the_same_update(schedule, asking, threads):
    task, m = network(), M if schedule != "two_bw" else NUM_STAGES

    def requests(transport):
        batches = count()
        return lambda: Requests(stop=next(batches) == 5 and transport.stage == asking, save=True)

    ranks = run_ranks(
        task,
        NUM_STAGES,
        SGD,
        threads=threads,
        requests=requests,
        look=lambda pipeline: pipeline.schedule.global_update,
        schedule=schedule,
        num_microbatches=m,
        num_steps=NUM_STEPS,
        layers_per_stage=even_cut(task, NUM_STAGES),
    )
    num_made = {len(rank.steps) for rank in ranks}
    made = max(num_made)
    assert len(num_made) == 1 and 6 < made < NUM_STEPS
    assert {rank.last_seen for rank in ranks} == {schedule == "two_bw"}  # the others wait for nobody
    assert len({tuple(report.save for report in rank.steps) for rank in ranks}) == 1
    assert ranks[0].steps[-1].save
    for rank in ranks:
        assert {len(facts) for s in rank.steps for facts in (s.utilisations, s.memory, s.splits)} == {NUM_STAGES}
        assert all(map(math.isfinite, rank.steps[-1].utilisations))  # known by now
    delays = [Schedule(schedule, NUM_STAGES, m).delay(stage) for stage in range(NUM_STAGES)]
    warmups = [NUM_STAGES - 1 - stage for stage in range(NUM_STAGES)] if schedule == "paci" else None
    expected, _ = run_reference(
        task,
        SGD,
        num_microbatches=m,
        num_steps=made,
        delays=delays,
        drift_warmups=warmups,
        layers_per_stage=even_cut(task, NUM_STAGES),
    )
    assert largest_difference(all_weights(ranks), expected) <= 1e-12


@pytest.mark.parametrize(("schedule", "num_stages", "m"), [("paci", 4, 4), ("paci", 5, 1), ("pipedream", 3, 4)])
def test_where_a_run_stops_no_stage_has_begun_or_evaluated_more_than_another(schedule, num_stages, m):
    task = network(num_layers=10)

    def requests(transport):
        batches = count()
        return lambda: Requests(stop=next(batches) == 5 and transport.stage == 0)

    ranks = run_ranks(
        task,
        num_stages,
        SGD,
        requests=requests,
        look=lambda pipeline: len(pipeline.executor._in_flight),
        schedule=schedule,
        num_microbatches=m,
        num_steps=NUM_STEPS,
        evaluation=Evaluation(lambda index: task.data(1000, index), 9, every_steps=1),
    )
    assert len({len(rank.steps) for rank in ranks}) == 1 and len(ranks[0].steps) < NUM_STEPS
    assert len({len(rank.evaluations) for rank in ranks}) == 1
    assert {rank.last_seen for rank in ranks} == {0}
