"""Several replicas of a pipeline against the oracle, which knows nothing of them: a batch is a batch."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from harness import TIMEOUT_SECONDS, Task, even_cut, forks, language_model, largest_difference, network, run_reference
from torch import Tensor

from slipstream import Group, Pipeline, StepReport, launch
from slipstream.optim import muon_and_adamw
from slipstream.pipeline.comm import Mesh, Transport
from slipstream.schedule import Schedule

NUM_STEPS = 22
Part = tuple[int, int, dict[str, Tensor], list[StepReport]]
"""Replica, stage, weights and reports of a process or thread."""


def groups(lam: float = 1.0) -> list[Group]:
    return muon_and_adamw(
        muon_lr=0.02,
        adamw_lr=0.01,
        muon_ns_dtype=torch.float64,
        weight_decay=0.1,
        error_feedback=lam,
        clip_norm=0.05,
    )


def run_replicas(
    task: Task, num_stages: int, num_replicas: int, launching: dict[str, Any], lam: float = 1.0, **options: Any
) -> list[Part]:
    def worker(transport: Transport) -> Part:
        pipeline = Pipeline(
            transport, copy.deepcopy(task.model), data=task.data, loss=task.loss, optimizer=groups(lam), **options
        )
        reports = [report for report in pipeline.run() if isinstance(report, StepReport)]
        weights = {name: weight.clone() for name, weight in pipeline.weights().items()}
        return transport.replica, transport.stage, weights, reports

    return launch(
        worker,
        num_stages,
        num_replicas=num_replicas,
        timeout_seconds=TIMEOUT_SECONDS,
        start_method="fork",
        **{"threads": True, **launching},
    )


def follow_the_oracle(
    task: Task, num_stages: int, num_replicas: int, num_microbatches: int, launching: dict[str, Any], **options: Any
) -> None:
    """Every replica, and to the bit each other. The oracle has one batch of all microbatches."""
    sizes = even_cut(task, num_stages)
    lam = 0.0 if options.get("schedule") == "paci" else 1.0
    parts = run_replicas(
        task,
        num_stages,
        num_replicas,
        launching,
        lam,
        num_microbatches=num_microbatches,
        num_steps=NUM_STEPS,
        layers_per_stage=sizes,
        **options,
    )
    schedule = Schedule(options.pop("schedule", "two_bw"), num_stages, num_microbatches, NUM_STEPS)
    expected, losses = run_reference(
        task,
        groups(lam),
        num_microbatches=num_microbatches * num_replicas,
        num_steps=NUM_STEPS,
        delays=[schedule.delay(stage) for stage in range(num_stages)],
        drift_warmups=[num_stages - 1 - stage for stage in range(num_stages)] if schedule.name == "paci" else None,
        layers_per_stage=sizes,
        **options,
    )
    first = {stage: weights for replica, stage, weights, _ in parts if replica == 0}
    assert largest_difference({k: v for weights in first.values() for k, v in weights.items()}, expected) <= 1e-12
    for _, stage, weights, reports in parts:
        assert all(torch.equal(weight, first[stage][name]) for name, weight in weights.items())
        assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-12)


def test_every_rank_has_one_place_and_neighbours_are_near():
    for placement in ("pipeline", "replica"):
        mesh = Mesh(3, 2, placement)
        places = [mesh.place(rank) for rank in range(mesh.size)]
        assert sorted(places) == sorted(product(range(2), range(3)))
        assert [mesh.rank(*place) for place in places] == list(range(6))
    assert [Mesh(3, 2).place(rank) for rank in (0, 1, 3)] == [(0, 0), (0, 1), (1, 0)]
    assert [Mesh(3, 2, "replica").place(rank) for rank in (0, 1, 3)] == [(0, 0), (1, 0), (1, 1)]
    assert Mesh(3).name(2) == "stage 2" and Mesh(3, 2).name(5) == "stage 2 of replica 1"


@pytest.mark.parametrize(
    ("num_stages", "num_replicas", "num_microbatches"), [(2, 2, 2), (1, 3, 1), (4, 2, 4), (2, 3, 5)]
)
def test_replicas_follow_the_oracle_of_the_whole_batch(num_stages, num_replicas, num_microbatches):
    follow_the_oracle(network(), num_stages, num_replicas, num_microbatches, {})


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw"])
def test_replicas_with_tied_weights_follow_the_oracle(schedule):
    follow_the_oracle(language_model(tied=True), 2, 2, 2, {}, schedule=schedule)


def test_replicas_of_pipedream_follow_the_oracle():
    follow_the_oracle(network(), 3, 2, 3, {}, schedule="pipedream")


def test_replicas_with_a_synchronous_start_follow_the_oracle():
    follow_the_oracle(language_model(tied=False), 2, 2, 2, {}, sync_start_steps=7)


@forks
@pytest.mark.parametrize("placement", ["pipeline", "replica"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_replicas_in_processes_follow_the_oracle(placement, shared_memory):
    launching = {"threads": False, "placement": placement, "shared_memory": shared_memory}
    follow_the_oracle(language_model(tied=True), 2, 2, 2, launching)


@forks
def test_a_replica_that_fails_is_named():
    task = network()

    def data(step: int, microbatch: int) -> Any:
        if step == 3 and microbatch == 1:  # the first of the second replica
            raise RuntimeError("no such page")
        return task.data(step, microbatch)

    with pytest.raises(RuntimeError, match=r"replica 1: stage . failed at .*no such page"):
        run_replicas(Task(task.model, data, task.loss), 2, 2, {"threads": False}, num_microbatches=2, num_steps=6)


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_a_nan_that_one_replica_sees_stops_them_all(threads):
    task = network()

    def data(step: int, microbatch: int) -> Any:
        inputs, targets = task.data(step, microbatch)
        return (inputs * float("nan") if (step, microbatch) == (3, 1) else inputs), targets

    with pytest.raises(RuntimeError, match=r"step 3 stops the run: the "):
        run_replicas(Task(task.model, data, task.loss), 2, 2, {"threads": threads}, num_microbatches=2, num_steps=6)
