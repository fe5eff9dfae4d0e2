"""Several replicas of a pipeline against the oracle, which knows nothing of them: a batch is a batch."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from harness import (
    Task,
    all_weights,
    even_cut,
    forks,
    language_model,
    largest_difference,
    network,
    run_ranks,
    run_reference,
)
from torch import Tensor, nn

from slipstream import Evaluation, Group, Pipeline
from slipstream.optim import muon_and_adamw
from slipstream.pipeline.partition import Tied
from slipstream.pipeline.zero1 import assign_owners
from slipstream.schedule import Schedule
from slipstream.transport.mesh import Mesh
from slipstream.transport.process import ProcessTransport

NUM_STEPS = 7


def groups(lam: float = 1.0) -> list[Group]:
    return muon_and_adamw(
        muon_lr=0.02,
        adamw_lr=0.01,
        adamw_predictor="nesterov",
        muon_ns_dtype=torch.float64,
        weight_decay=0.1,
        error_feedback=lam,
        clip_norm=0.05,
    )


def follow_the_oracle(
    task: Task, num_stages: int, num_replicas: int, num_microbatches: int, launching: dict[str, Any], **options: Any
) -> None:
    """Every replica, and to the bit each other. The oracle has one batch of all microbatches."""
    sizes = even_cut(task, num_stages)
    lam = 0.0 if options.get("schedule") == "paci" else 1.0
    ranks = run_ranks(
        task,
        num_stages,
        groups(lam),
        num_replicas,
        **launching,
        num_microbatches=num_microbatches,
        num_steps=NUM_STEPS,
        layers_per_stage=sizes,
        **options,
    )
    options.pop("shard_optimizer", None)
    schedule = Schedule(options.pop("schedule", "two_bw"), num_stages, num_microbatches, NUM_STEPS)
    expected, losses = run_reference(
        task,
        groups(lam),
        num_microbatches=num_microbatches * num_replicas,
        num_steps=NUM_STEPS,
        delays=[schedule.delay(stage) for stage in range(num_stages)],
        drift_warmups=[num_replicas * (num_stages - 1 - stage) for stage in range(num_stages)]
        if schedule.name == "paci"
        else None,
        layers_per_stage=sizes,
        **options,
    )
    first = [rank for rank in ranks if rank.replica == 0]
    assert [rank.stage for rank in first] == list(range(num_stages))
    assert largest_difference(all_weights(first), expected) <= 1e-12
    for rank in ranks:
        assert all(torch.equal(weight, first[rank.stage].weights[name]) for name, weight in rank.weights.items())
        assert [report.loss for report in rank.steps] == pytest.approx(losses, rel=1e-12)


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


@pytest.mark.parametrize("schedule", ["pipedream", "paci"])
def test_replicas_of_other_schedules_follow_the_oracle(schedule):
    follow_the_oracle(network(), 3, 2, 3, {}, schedule=schedule)


def test_replicas_with_a_synchronous_start_follow_the_oracle():
    follow_the_oracle(language_model(tied=False), 2, 2, 2, {}, sync_start_steps=4)


@forks
@pytest.mark.parametrize(
    ("placement", "shared_memory", "sharded"),  # every two of them together
    [("pipeline", True, True), ("replica", True, False), ("pipeline", False, False), ("replica", False, True)],
)
def test_replicas_in_processes_follow_the_oracle(placement, shared_memory, sharded):
    launching = {"threads": False, "placement": placement, "shared_memory": shared_memory}
    follow_the_oracle(language_model(tied=True), 2, 2, 2, launching, shard_optimizer=sharded)


# ---- replicas that share the optimizer


@pytest.mark.parametrize(("schedule", "num_stages", "num_replicas"), [
    ("two_bw", 1, 2),
    ("two_bw", 2, 2),
    ("two_bw", 2, 3),
    ("one_f_one_b", 2, 2),
    ("gpipe", 2, 2),
    ("pipedream", 2, 3),
    ("paci", 2, 2),
])  # fmt: skip
def test_replicas_that_share_the_optimizer_follow_the_oracle(schedule, num_stages, num_replicas):
    follow_the_oracle(network(), num_stages, num_replicas, 3, {}, schedule=schedule, shard_optimizer=True)


@forks
@pytest.mark.parametrize("sharded", [True, False])
def test_messages_through_the_memory_of_hosts_follow_the_oracle(monkeypatch, sharded):
    """As between GPUs over gloo; here without the GPUs."""
    monkeypatch.setattr("slipstream.transport.world.ProcessTransport", partial(ProcessTransport, is_staged=True))
    launching = {"threads": False, "shared_memory": False}
    follow_the_oracle(language_model(tied=True), 2, 2, 2, launching, shard_optimizer=sharded)


def test_tied_weights_are_stepped_alike_where_replicas_share_the_optimizer():
    follow_the_oracle(language_model(tied=True), 2, 3, 2, {}, shard_optimizer=True, sync_start_steps=3)


def test_evaluations_see_the_masters_of_all_owners():
    """With error feedback the working copies are ahead of them."""
    task = language_model(tied=False)

    def run(**options: Any) -> list[list[float | None]]:
        ranks = run_ranks(
            task,
            2,
            groups(),
            num_replicas=2,
            num_microbatches=2,
            num_steps=9,
            evaluation=Evaluation(lambda microbatch: task.data(10**6, microbatch), 3, 2),
            **options,
        )
        return [rank.evaluations for rank in ranks]

    alone, shared = run(), run(shard_optimizer=True)
    assert len(alone[1]) == 5 and alone[1] == alone[3]
    for losses in (shared[1], shared[3]):
        assert losses == pytest.approx(alone[1], rel=1e-12)


def test_a_replica_keeps_masters_and_state_of_what_it_owns_alone():
    task = language_model(tied=False)

    def sizes(pipeline: Pipeline) -> tuple[int, int]:
        masters = sum(master.numel() for master in pipeline.versions.masters.values())
        states = [optimizer.state[master] for _, optimizer, master in pipeline.updater.optimizer_states()]
        return masters, sum(t.numel() for state in states for t in state.values() if isinstance(t, Tensor))

    def run(sharded: bool) -> list[tuple[int, int]]:
        options = {"num_microbatches": 2, "num_steps": 3, "shard_optimizer": sharded}
        return [rank.last_seen for rank in run_ranks(task, 2, groups(), num_replicas=2, look=sizes, **options)]

    whole, shared = run(sharded=False), run(sharded=True)
    for stage in (0, 1):
        for kind in (0, 1):
            parts = [shared[rank][kind] for rank in (stage, 2 + stage)]
            assert sum(parts) == whole[stage][kind]
            assert max(parts) < 0.62 * whole[stage][kind]


def test_owners_are_balanced_by_cost_and_the_same_whoever_asks():
    sizes = [(64, 64), (64, 32), (7,), (64,), (256, 8), (3, 16, 16), (64, 64), (64, 64)]
    parameters = {f"p{i}": torch.empty(*shape, device="meta") for i, shape in enumerate(sizes)}
    elementwise = {name: p.ndim == 1 for name, p in parameters.items()}
    tied = {"p4": Tied("p4", (0, 1))}
    owners = assign_owners(parameters, elementwise, tied, 3)
    assert owners == assign_owners(dict(reversed(parameters.items())), elementwise, tied, 3)
    assert owners["p4"] == 0 and set(owners) == set(parameters)
    numels = [sum(p.numel() for name, p in parameters.items() if owners[name] == replica) for replica in range(3)]
    assert max(numels) < 1.5 * min(numels)


@forks
def test_a_replica_that_fails_is_named():
    task = network()

    def data(step: int, microbatch: int) -> Any:
        if step == 3 and microbatch == 1:  # the first of the second replica
            raise RuntimeError("no such page")
        return task.data(step, microbatch)

    with pytest.raises(RuntimeError, match=r"replica 1: stage . failed at .*no such page"):
        run_ranks(Task(task.model, data, task.loss), 2, groups(), 2, threads=False, num_microbatches=2, num_steps=6)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_a_nan_that_one_replica_sees_stops_them_all(threads, sharded):
    task = network()

    def data(step: int, microbatch: int) -> Any:
        inputs, targets = task.data(step, microbatch)
        return (inputs * float("nan") if (step, microbatch) == (3, 1) else inputs), targets

    with pytest.raises(RuntimeError, match=r"step 4 stops the run: the "):
        options = {"num_microbatches": 2, "num_steps": 6, "shard_optimizer": sharded}
        run_ranks(Task(task.model, data, task.loss), 2, groups(), 2, threads=threads, **options)


@pytest.mark.parametrize("sizes", [[2, 2], [1, 3]])
def test_a_replica_that_owns_all_of_a_stage_evaluates_with_the_others(sizes):
    """The first stage of [1, 3] has one parameter, so one replica owns all that it trains."""
    task = language_model(tied=False, num_layers=2)
    ranks = run_ranks(
        task,
        2,
        partial(torch.optim.SGD, lr=0.1),
        num_replicas=2,
        timeout_seconds=10.0,
        num_microbatches=2,
        num_steps=4,
        error_feedback=1.0,
        shard_optimizer=True,
        layers_per_stage=sizes,
        evaluation=Evaluation(lambda index: task.data(1000, index), 2, every_steps=2),
    )
    assert ranks[1].evaluations == ranks[3].evaluations == pytest.approx([3.398603007100633, 3.3873866491464826])


class Either(nn.Module):
    """Uses one of its layers, depending on the data, so the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x[0, 0].item() > 0 else self.b(x)


def either(dtype: torch.dtype) -> Task:
    torch.manual_seed(0)

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        x = network().data(step, microbatch)[0].to(dtype)
        x[0, 0] = 1.0 if step % 3 else -1.0
        if dtype is torch.bfloat16 and microbatch % 2:  # and on one replica only
            x[0, 0] = -x[0, 0]
        return x, x[:, :3].float()

    loss = lambda output, target: nn.functional.mse_loss(output.to(target.dtype), target)  # noqa: E731
    return Task(nn.Sequential(Either(), nn.Linear(6, 3)).double(), data, loss)


@pytest.mark.parametrize(("num_replicas", "m"), [(1, 2), (2, 1)])
def test_a_parameter_that_a_batch_leaves_out_has_the_gradient_zero_in_every_layout(num_replicas, m):
    task, groups = either(torch.float64), [Group("all", partial(torch.optim.SGD, lr=0.1, momentum=0.9))]
    expected, _ = run_reference(task, groups, num_microbatches=2, num_steps=8, delays=[1])
    ranks = run_ranks(task, 1, groups, num_replicas=num_replicas, num_microbatches=m, num_steps=8)
    assert largest_difference(ranks[0].weights, expected) < 1e-12


def test_replicas_agree_where_one_of_them_has_no_gradient_and_the_compute_dtype_is_coarser():
    ranks = run_ranks(
        either(torch.bfloat16),
        1,
        partial(torch.optim.SGD, lr=0.1),
        num_replicas=2,
        num_microbatches=2,
        num_steps=8,
        dtype=torch.bfloat16,
        gradient_dtype=torch.float64,
    )
    assert all(torch.equal(weight, ranks[1].weights[name]) for name, weight in ranks[0].weights.items())
