"""Pipelines against the one-process oracle, parameters compared in fp64."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from harness import (
    EXPERTS,
    Outcome,
    Task,
    even_cut,
    forks,
    language_model,
    largest_difference,
    network,
    run_pipeline,
    run_reference,
)
from torch import nn

from slipstream import AdamW, Evaluation, Group, Muon, muon_and_adamw
from slipstream.optim import balance_experts, is_matrix

TOLERANCE = 1e-12
NUM_STEPS = 7


def falling_rate(step: int) -> float:
    return (1 + math.cos(math.pi * step / NUM_STEPS)) / 2 + 0.1


def groups_of(name: str, lam: float, clip_norm: float | None = 0.05) -> list[Group]:
    shared = {"error_feedback": lam, "clip_norm": clip_norm, "weight_decay": 0.1}
    if name == "muon":
        return muon_and_adamw(muon_lr=0.02, adamw_lr=0.01, muon_ns_dtype=torch.float64, **shared)
    if name == "lion":
        pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
        return [Group("all", partial(pytorch_optimizer.Lion, lr=0.003), **shared)]
    optimizers = {
        "adamw": partial(AdamW, lr=0.01),
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    }
    return [Group("all", optimizers[name], **shared)]


# (stages, microbatches, optimizer, lam, tied, layers per stage or None, sync start, depth)
CASES = [
    (1, 1, "muon", 1.0, True, None, 0, "minimum"),
    (1, 3, "adamw", 0.5, False, None, 4, "minimum"),
    (2, 2, "muon", 1.0, True, None, 0, "minimum"),
    (2, 2, "adamw", 0.0, True, [1, 4], 0, "minimum"),
    (2, 4, "sgd", 0.5, False, [4, 1], 0, "minimum"),
    (2, 4, "lion", 1.0, False, None, 0, "minimum"),
    (2, 5, "muon", 0.5, False, [2, 3], 4, "minimum"),
    (2, 3, "muon", 0.0, True, None, 0, "double"),
    (4, 4, "muon", 1.0, True, None, 0, "minimum"),
    (4, 4, "sgd", 1.0, False, [1, 1, 2, 1], 3, "minimum"),
    (4, 4, "lion", 0.5, True, None, 0, "minimum"),
    (4, 8, "adamw", 1.0, False, [2, 1, 1, 1], 0, "minimum"),
    (4, 5, "adamw", 0.5, True, None, 0, "minimum"),
    (4, 9, "sgd", 1.0, False, None, 2, "double"),
]


def follow_two_bw(
    task: Task, groups: list[Group], stages: int, m: int, sizes: list[int] | None, sync_start: int, depth: str
) -> tuple[Outcome, list[float]]:
    """The pipeline, whose weights equal the oracle's, and the oracle's losses. Clipping on, learning rate varying,
    evaluation in the middle of the run."""
    shared = {
        "num_microbatches": m,
        "num_steps": NUM_STEPS,
        "layers_per_stage": sizes or even_cut(task, stages),
        "sync_start_steps": sync_start,
        "learning_rate": falling_rate,
    }
    expected, losses = run_reference(task, groups, delays=[1] * stages, **shared)
    outcome = run_pipeline(
        task,
        stages,
        groups,
        depth=depth,
        evaluation=Evaluation(lambda microbatch: task.data(10**6, microbatch), 2, 3),
        **shared,
    )
    assert largest_difference(outcome.weights, expected) <= TOLERANCE
    return outcome, losses


@pytest.mark.parametrize(("stages", "m", "optimizer", "lam", "tied", "sizes", "sync_start", "depth"), CASES)
def test_two_bw_follows_the_oracle(stages, m, optimizer, lam, tied, sizes, sync_start, depth):
    outcome, losses = follow_two_bw(
        language_model(tied), groups_of(optimizer, lam), stages, m, sizes, sync_start, depth
    )
    for reports in outcome.reports:
        assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-12)
        late = reports[sync_start + 1 :]
        assert {report.delay for report in late} == {1}
    assert len(outcome.evaluations) == 3


@pytest.mark.usefixtures("updates_in_turn")
@pytest.mark.parametrize(("stages", "m", "sync_start", "depth"), [(2, 2, 0, "minimum"), (4, 9, 3, "double")])
def test_updates_in_turn_follow_the_oracle(stages, m, sync_start, depth):
    """As on a CPU outside of tests."""
    task, groups = language_model(tied=True), groups_of("muon", 1.0)
    outcome, _ = follow_two_bw(task, groups, stages, m, None, sync_start, depth)
    assert all(split.update > 0 for report in outcome.reports[0][2:-2] for split in report.splits)


@forks
@pytest.mark.parametrize(("stages", "m", "shared_memory"), [(2, 2, True), (4, 5, True), (4, 5, False)])
def test_processes_follow_the_oracle(stages, m, shared_memory):
    task = language_model(tied=True)
    groups = groups_of("muon", 1.0)
    shared = {"num_microbatches": m, "num_steps": NUM_STEPS, "learning_rate": falling_rate, "sync_start_steps": 3}
    shared["layers_per_stage"] = even_cut(task, stages)
    expected, _ = run_reference(task, groups, delays=[1] * stages, **shared)
    outcome = run_pipeline(task, stages, groups, threads=False, shared_memory=shared_memory, **shared)
    assert largest_difference(outcome.weights, expected) <= TOLERANCE


@forks
def test_threads_and_processes_agree_bitwise():
    task = language_model(tied=True)
    groups = groups_of("adamw", 1.0)
    options = {"num_microbatches": 3, "num_steps": 8}
    threads = run_pipeline(task, 3, groups, **options)
    processes = run_pipeline(task, 3, groups, threads=False, **options)
    for name, weight in threads.weights.items():
        assert torch.equal(weight, processes.weights[name]), name


def test_the_trajectory_does_not_depend_on_the_depth_of_the_pipeline():
    task = network()
    groups = groups_of("adamw", 1.0)
    one, *others = (
        run_pipeline(task, stages, groups, num_microbatches=5, num_steps=NUM_STEPS) for stages in (1, 2, 3, 5)
    )
    for other in others:
        assert largest_difference(other.weights, one.weights) <= TOLERANCE


def test_error_feedback_can_differ_by_group():
    task = language_model(tied=False)
    groups = [
        Group("matrices", partial(Muon, lr=0.02, ns_dtype=torch.float64), is_matrix, error_feedback=1.0, clip_norm=0.1),
        Group("rest", partial(AdamW, lr=0.01), error_feedback=0.0),
    ]
    shared = {"num_microbatches": 3, "num_steps": NUM_STEPS}
    expected, _ = run_reference(task, groups, delays=[1], **shared)
    assert largest_difference(run_pipeline(task, 2, groups, **shared).weights, expected) <= TOLERANCE


@pytest.mark.parametrize("track_alignment", [True, False])
def test_both_arrangements_of_the_masters_give_the_same_weights(track_alignment):
    task = network()
    groups = groups_of("sgd", 0.0)
    shared = {"num_microbatches": 3, "num_steps": NUM_STEPS}
    expected, _ = run_reference(task, groups, delays=[1], **shared)
    outcome = run_pipeline(task, 3, groups, track_alignment=track_alignment, **shared)
    assert largest_difference(outcome.weights, expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("schedule", "stages"), [("one_f_one_b", 1), ("one_f_one_b", 2), ("one_f_one_b", 4), ("gpipe", 2), ("gpipe", 4)]
)
def test_synchronous_schedules_equal_a_plain_loop(schedule, stages):
    task = language_model(tied=stages == 2)
    model = copy.deepcopy(task.model)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(NUM_STEPS):
        for microbatch in range(4):
            inputs, targets = task.data(step, microbatch)
            (task.loss(model(inputs), targets) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for group in plain.param_groups:
            group["lr"] = 0.01 * falling_rate(step)
        plain.step()
        plain.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    outcome = run_pipeline(
        task,
        stages,
        groups_of("adamw", lam=1.0),  # without delay there is nothing to correct
        schedule=schedule,
        num_microbatches=4,
        num_steps=NUM_STEPS,
        learning_rate=falling_rate,
    )
    assert largest_difference(outcome.weights, expected) <= TOLERANCE
    assert {report.delay for reports in outcome.reports for report in reports} == {0}


@pytest.mark.parametrize("stages", [1, 3])
def test_without_delay_a_bare_torch_optimizer_is_matched_bitwise(stages):
    task = network()
    model = copy.deepcopy(task.model)
    make = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    plain = make(list(model.parameters()))
    for step in range(NUM_STEPS):
        for microbatch in range(3):
            inputs, targets = task.data(step, microbatch)
            (task.loss(model(inputs), targets) * (1 / 3)).backward()
        plain.step()
        plain.zero_grad()
    outcome = run_pipeline(
        task, stages, [Group("all", make)], schedule="one_f_one_b", num_microbatches=3, num_steps=NUM_STEPS
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(outcome.weights[name], parameter.detach()), name


@pytest.mark.parametrize(
    ("stages", "m", "clip_norm", "lam", "sync_start"),
    [(2, 1, None, 0.0, 0), (4, 2, None, 0.0, 0), (4, 3, 0.05, 0.3, 0), (4, 2, None, 0.3, 2)],
)
def test_pipedream_follows_the_oracle_with_stage_dependent_delays(stages, m, clip_norm, lam, sync_start):
    task = network()
    groups = groups_of("sgd", lam, clip_norm)
    sizes = even_cut(task, stages)
    shared = {
        "num_microbatches": m, "num_steps": NUM_STEPS, "layers_per_stage": sizes, "sync_start_steps": sync_start,
    }  # fmt: skip
    expected, _ = run_reference(task, groups, delays=[stages - 1 - s for s in range(stages)], **shared)
    outcome = run_pipeline(task, stages, groups, schedule="pipedream", **shared)
    assert largest_difference(outcome.weights, expected) <= TOLERANCE
    for stage, reports in enumerate(outcome.reports):
        delays = [min(max(0, step - sync_start), stages - 1 - stage) for step in range(NUM_STEPS)]
        assert [report.delay for report in reports] == delays


@pytest.mark.parametrize(
    ("stages", "m", "clip_norm", "sync_start"),
    [(2, 1, None, 0), (4, 2, None, 0), (4, 3, 0.05, 0), (4, 1, None, 0), (4, 2, None, 3), (2, 1, 0.05, NUM_STEPS)],
)
def test_paci_follows_the_oracle_with_drifting_weights(stages, m, clip_norm, sync_start):
    task = network()
    groups = groups_of("sgd", 0.0, clip_norm)
    sizes = even_cut(task, stages)
    shared = {
        "num_microbatches": m, "num_steps": NUM_STEPS, "layers_per_stage": sizes, "sync_start_steps": sync_start,
    }  # fmt: skip
    warmups = [stages - 1 - stage for stage in range(stages)]
    expected, _ = run_reference(task, groups, delays=[0] * stages, drift_warmups=warmups, **shared)
    outcome = run_pipeline(task, stages, groups, schedule="paci", **shared)
    assert largest_difference(outcome.weights, expected) <= TOLERANCE


def biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in weights.items() if name.endswith("router.bias")}


# (stages, microbatches, lam, layers per stage or None, sync start, depth)
EXPERT_CASES = [
    (1, 2, 1.0, None, 0, "minimum"),
    (2, 2, 1.0, [1, 4], 0, "minimum"),
    (4, 5, 1.0, None, 3, "minimum"),
    (3, 5, 0.5, None, 0, "double"),
    (5, 5, 0.0, None, 0, "minimum"),
]


@pytest.mark.parametrize(("stages", "m", "lam", "sizes", "sync_start", "depth"), EXPERT_CASES)
def test_experts_follow_the_oracle(stages, m, lam, sizes, sync_start, depth):
    """Muon on stacks of experts, clipping, and routers whose biases every stage moves for itself."""
    task = language_model(tied=True, **EXPERTS)
    groups = [balance_experts(0.01), *groups_of("muon", lam)]
    outcome, losses = follow_two_bw(task, groups, stages, m, sizes, sync_start, depth)
    assert [report.loss for report in outcome.reports[-1]] == pytest.approx(losses, rel=1e-12)
    start = biases(dict(task.model.named_parameters()))
    assert len(start) == 2
    for name, bias in biases(outcome.weights).items():
        assert (bias - start[name]).abs().max() > 0.01, name


@forks
def test_experts_in_processes_follow_the_oracle():
    task = language_model(tied=False, **EXPERTS)
    groups = [balance_experts(0.01), *groups_of("muon", 1.0)]
    shared = {"num_microbatches": 4, "num_steps": NUM_STEPS}
    expected, _ = run_reference(task, groups, delays=[1], **shared)
    outcome = run_pipeline(task, 3, groups, threads=False, **shared)
    assert largest_difference(outcome.weights, expected) <= TOLERANCE


def test_experts_follow_the_oracle_of_pipedream_and_paci():
    task = language_model(tied=False, **EXPERTS)
    groups = [balance_experts(0.01), *groups_of("muon", 0.0, clip_norm=None)]
    delays = [2, 1, 0]
    shared = {"num_microbatches": 2, "num_steps": NUM_STEPS, "layers_per_stage": even_cut(task, 3)}
    expected, _ = run_reference(task, groups, delays=delays, **shared)
    outcome = run_pipeline(task, 3, groups, schedule="pipedream", **shared)
    assert largest_difference(outcome.weights, expected) <= TOLERANCE
    expected, _ = run_reference(task, groups, delays=[0] * 3, drift_warmups=delays, **shared)
    outcome = run_pipeline(task, 3, groups, schedule="paci", **shared)
    assert largest_difference(outcome.weights, expected) <= TOLERANCE


def test_an_evaluation_sees_the_masters_after_its_step():
    """The loss that passes through in the middle of a run is the oracle's loss after exactly so many updates."""
    task = language_model(tied=True)
    groups = groups_of("muon", 1.0)
    held_out = [task.data(10**6, microbatch) for microbatch in range(3)]
    outcome = run_pipeline(
        task,
        4,
        groups,
        num_microbatches=4,
        num_steps=6,
        sync_start_steps=2,
        evaluation=Evaluation(lambda microbatch: held_out[microbatch], 3, 1),
    )
    assert len(outcome.evaluations) == 6
    for step, loss in enumerate(outcome.evaluations):
        weights, _ = run_reference(task, groups, delays=[1], num_microbatches=4, num_steps=step + 1, sync_start_steps=2)
        model = copy.deepcopy(task.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
            expected = sum(float(task.loss(model(x), y)) for x, y in held_out) / 3
        assert loss == pytest.approx(expected, rel=1e-12)


def test_the_logged_cosine_is_that_of_consecutive_updates():
    task = network()
    lam = 0.7
    groups = [Group("all", partial(AdamW, lr=0.01, predictor="last"), error_feedback=lam, weight_decay=0.3)]
    shared = {"num_microbatches": 2, "learning_rate": falling_rate}
    outcome = run_pipeline(task, 2, groups, num_steps=8, **shared)
    z = [{name: p.detach() for name, p in task.model.named_parameters()}]
    z += [run_reference(task, groups, delays=[1], num_steps=n, **shared)[0] for n in range(1, 9)]
    updates = []
    for step in range(8):
        decay = 1 - 0.01 * falling_rate(step) * 0.3
        updates.append(torch.cat([(decay * z[step][n] - z[step + 1][n]).flatten() for n in z[0]]))
    for report in outcome.reports[0]:
        alignment = report.alignments["all"]
        if report.step < 2:  # two updates have to be over
            assert math.isnan(alignment.cosine)
            continue
        new, old = updates[report.step - 1], updates[report.step - 2]
        assert alignment.cosine == pytest.approx(float(new @ old / new.norm() / old.norm()), rel=1e-9)
        assert alignment.best_coefficient == pytest.approx(float(new @ old / (old @ old)), rel=1e-9)


@pytest.mark.parametrize("track_alignment", [True, False])
def test_adamw_may_have_several_param_groups(track_alignment):
    """In an order of their own, and each with its own averages, for the step and for what is expected next."""

    def make(parameters):
        return AdamW([{"params": parameters[::2], "beta1": 0.5}, {"params": parameters[1::2], "beta2": 0.8}], lr=0.01)

    task = network()
    groups = [Group("all", make, error_feedback=1.0)]
    shared = {"num_microbatches": 2, "num_steps": NUM_STEPS}
    outcome = run_pipeline(task, 2, groups, track_alignment=track_alignment, **shared)
    expected, _ = run_reference(task, groups, delays=[1], **shared)
    assert largest_difference(outcome.weights, expected) < 1e-12


def test_a_pipeline_that_ignores_the_delay_would_be_caught():
    """The tolerance means something: the synchronous trajectory lies far outside of it."""
    task = language_model(tied=True)
    groups = groups_of("muon", 1.0)
    shared = {"num_microbatches": 2, "num_steps": NUM_STEPS}
    outcome = run_pipeline(task, 2, groups, **shared)
    for wrong in ({"delays": [0]}, {"delays": [1], "sync_start_steps": 1}):
        other, _ = run_reference(task, groups, **wrong, **shared)
        assert largest_difference(outcome.weights, other) > 1e-4


def batch_norm_network() -> Task:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)]
    return Task(nn.Sequential(*layers).double(), network().data, nn.functional.mse_loss)


def test_buffers_are_shared_by_all_versions_of_a_stage():
    task = batch_norm_network()
    groups = groups_of("sgd", 1.0)
    shared = {"num_microbatches": 3, "num_steps": NUM_STEPS}
    expected, _ = run_reference(task, groups, delays=[1], **shared)
    weights = run_pipeline(task, 3, groups, **shared).weights
    assert largest_difference({name: weights[name] for name in expected}, expected) <= TOLERANCE
