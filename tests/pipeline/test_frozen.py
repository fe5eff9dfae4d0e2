"""Frozen parameters anywhere in a pipeline: the oracle's trajectory, one copy, and no state or messages for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from harness import (
    EXPERTS,
    Task,
    all_weights,
    even_cut,
    forks,
    language_model,
    largest_difference,
    network,
    run_pipeline,
    run_ranks,
    run_reference,
)
from torch import Tensor, nn

from slipstream import AdamW, Evaluation, Group, Pipeline, Precision, launch, muon_and_adamw
from slipstream.checkpoint.stage_state import StageState
from slipstream.optim import balance_experts
from slipstream.pipeline.partition import first_trained_stage, tied_parameters
from slipstream.pipeline.weight_versions import WeightVersions, is_mixed, weight_layout
from slipstream.transport.base import Transport
from slipstream.transport.thread import QueueLink

TOLERANCE = 1e-12
NUM_STEPS = 7
TABLES = "embedding|head.output"


def frozen(task: Task, pattern: str) -> Task:
    """The same task, in which the parameters whose names begin like that are frozen."""
    model = copy.deepcopy(task.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.match(pattern, name))
    return Task(model, task.data, task.loss)


def groups_of(optimizer: str, lam: float = 1.0, clip_norm: float | None = 0.05) -> list[Group]:
    shared: dict[str, Any] = {"error_feedback": lam, "clip_norm": clip_norm, "weight_decay": 0.1}
    if optimizer == "muon":
        return muon_and_adamw(muon_lr=0.02, adamw_lr=0.01, muon_ns_dtype=torch.float64, **shared)
    make = {"adamw": partial(AdamW, lr=0.01), "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}[optimizer]
    return [Group("all", make, **shared)]


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# (stages, optimizer, tied, what is frozen, layers per stage or None)
CASES = [
    (2, "muon", True, TABLES, None),
    (3, "muon", True, TABLES, [1, 3, 1]),  # the first stage and most of the last have nothing to train
    (3, "adamw", False, TABLES, None),
    (2, "adamw", False, "embedding|block0|block1", None),  # the first stage trains nothing
    (3, "muon", False, "embedding|block0|block1", [1, 2, 2]),  # nor does the second
    (3, "adamw", True, "block1", [2, 1, 2]),  # a stage between two that train
    (2, "sgd", False, "block2|head", [3, 2]),  # the last stage only passes gradients
    (3, "muon", False, ".*norm", None),
    (1, "muon", True, "block.*(query|down)", None),
]


@pytest.mark.parametrize(("stages", "optimizer", "tied", "pattern", "sizes"), CASES)
def test_two_bw_follows_the_oracle(stages, optimizer, tied, pattern, sizes):
    task = frozen(language_model(tied), pattern)
    shared = {"num_microbatches": 4, "num_steps": NUM_STEPS, "layers_per_stage": sizes or even_cut(task, stages)}
    expected, losses = run_reference(task, groups_of(optimizer), delays=[1] * stages, **shared)
    evaluation = Evaluation(lambda microbatch: task.data(10**6, microbatch), 2, 4)
    outcome = run_pipeline(task, stages, groups_of(optimizer), evaluation=evaluation, **shared)
    assert largest_difference(outcome.weights, expected) <= TOLERANCE
    assert set(expected) == trained(task.model)
    for reports in outcome.reports:
        assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "delays", "pattern", "options"),
    [
        ("one_f_one_b", [0, 0, 0], "embedding|block0", {}),
        ("gpipe", [0, 0, 0], "block1", {}),
        ("pipedream", [2, 1, 0], f"{TABLES}|block0", {}),  # with tied weights, which no stage steps
        ("two_bw", [1, 1, 1], "embedding|block0|head", {"recompute": ["block0", "block1", "block2"]}),
        ("two_bw", [1, 1, 1], "block1", {"dtype": torch.float32, "gradient_dtype": torch.float64}),
        ("two_bw", [1, 1, 1], "embedding|block0", {"sync_start_steps": 4, "depth": "double"}),
    ],
)
def test_other_schedules_and_precisions_follow_it_too(schedule, delays, pattern, options):
    task, groups = frozen(language_model(tied=schedule == "pipedream"), pattern), groups_of("adamw", clip_norm=None)
    shared = {"num_microbatches": 6, "num_steps": NUM_STEPS, "layers_per_stage": [2, 1, 2]}
    shared |= {key: value for key, value in options.items() if key in ("dtype", "gradient_dtype", "sync_start_steps")}
    expected, _ = run_reference(task, groups, delays=delays, **shared)
    outcome = run_pipeline(task, 3, groups, schedule=schedule, **shared | options)
    assert largest_difference(outcome.weights, expected) <= (1e-6 if "dtype" in options else TOLERANCE)


@forks
def test_processes_agree_with_threads_bitwise():
    task, options = frozen(language_model(True), f"{TABLES}|block0"), {"num_microbatches": 3, "num_steps": 6}
    threads, processes = (run_pipeline(task, 3, groups_of("muon"), threads=t, **options) for t in (True, False))
    assert all(torch.equal(weight, processes.weights[name]) for name, weight in threads.weights.items())


@pytest.mark.parametrize("pattern", ["embedding|block0", "block1|block2|head"])
@pytest.mark.parametrize(
    ("shard_optimizer", "threads"), [(False, True), (True, True), pytest.param(True, False, marks=forks)]
)
def test_replicas_follow_the_oracle_where_a_stage_trains_nothing(shard_optimizer, threads, pattern):
    task, shared = frozen(language_model(False), pattern), {"num_steps": NUM_STEPS, "layers_per_stage": [2, 3]}
    expected, _ = run_reference(task, groups_of("muon"), delays=[1, 1], num_microbatches=6, **shared)
    ranks = run_ranks(
        task, 2, groups_of("muon"), 2, threads=threads, shard_optimizer=shard_optimizer, num_microbatches=3, **shared
    )
    for replica in (0, 1):
        mine = [rank for rank in ranks if rank.replica == replica]
        assert largest_difference(all_weights(mine), expected) <= TOLERANCE


def test_experts_may_be_frozen_with_their_router():
    task, groups = frozen(language_model(False, **EXPERTS), ".*(router|experts)"), groups_of("muon")
    groups = [balance_experts(0.01), *groups]
    shared = {"num_microbatches": 3, "num_steps": 6}
    expected, _ = run_reference(task, groups, delays=[1], **shared)
    assert largest_difference(run_pipeline(task, 2, groups, **shared).weights, expected) <= TOLERANCE


# ---- memory, state and messages


def storages(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(("dtype", "itemsize"), [(None, 8), (torch.bfloat16, 2)])
@pytest.mark.parametrize("num_versions", [1, 2, 3])
def test_frozen_weights_exist_once_whatever_the_versions(num_versions, dtype, itemsize):
    module = frozen(language_model(False), "embedding|block|head.norm").model
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    num_trained = sum(sizes[name] for name in trained(module))
    num_frozen = sum(sizes.values()) - num_trained
    mixed = is_mixed(module, dtype)
    versions = WeightVersions(
        module, weight_layout(num_versions, 1, corrects=True, is_mixed=mixed), dtype=dtype, gradient_dtype=torch.float64
    )
    modules = [versions.module(version) for version in range(1 - num_versions, 1)]
    held = storages([*versions.masters.values(), *(p for module in modules for p in module.parameters())])
    masters = 8 * num_trained if versions.separate_masters else 0
    assert held == num_frozen * itemsize + num_versions * num_trained * itemsize + masters


def test_the_state_of_a_stage_has_nothing_of_frozen_weights_and_resumes_in_another_cut():
    task, options = frozen(language_model(True), f"{TABLES}|block1"), {"num_microbatches": 3, "num_steps": 8}
    whole = run_ranks(task, 3, groups_of("muon"), look=lambda p: p.snapshot()(), **options)
    states = [rank.seen[5] for rank in whole]
    names = trained(task.model)
    for state in states:
        assert all(
            name.startswith("products/") or name.split("/")[-1] in names or name.split("/")[1] in names
            for name in state.tensors
        )
    facts: dict[str, Any] = {}
    for kind in ("optimizer", "coefficients", "groups"):
        facts[kind] = {key: value for state in states for key, value in state.facts[kind].items()}
    merged = StageState(5, {k: v for state in states for k, v in state.tensors.items()}, facts)
    again = run_ranks(task, 2, groups_of("muon"), start=merged, **options)
    assert largest_difference(all_weights(again), all_weights(whole)) <= TOLERANCE


def test_no_gradients_are_sent_to_stages_without_anything_to_train_before_them(monkeypatch):
    sent: list[tuple[str, Any]] = []
    send = QueueLink.send
    monkeypatch.setattr(QueueLink, "send", lambda link, *given: (sent.append(given[0]), send(link, *given))[1])
    options = {"num_microbatches": 3, "num_steps": 4, "layers_per_stage": [1, 2, 2]}
    run_pipeline(frozen(language_model(False), "embedding|block0|block1"), 3, groups_of("adamw"), **options)
    assert len(sent) == 2 * 3 * 4  # activations over two boundaries, and no gradients
    sent.clear()
    run_pipeline(frozen(language_model(False), "embedding"), 3, groups_of("adamw"), **options)
    assert len(sent) == 3 * 3 * 4  # and gradients over one


def test_a_frozen_tied_weight_is_made_equal_at_the_start_and_never_sent_again():
    task = frozen(language_model(True), TABLES)
    added = []

    def worker(transport: Transport) -> Tensor:
        model = copy.deepcopy(task.model)
        if transport.stage == 1:  # as where every stage draws its own
            with torch.no_grad():
                model.head.output.weight.add_(1)
        transport.add_stages = lambda *given: added.append(given)  # type: ignore[method-assign]
        pipeline = Pipeline(
            transport,
            model,
            data=task.data,
            loss=task.loss,
            optimizer=groups_of("muon"),
            num_microbatches=2,
            num_steps=3,
        )
        for _ in pipeline.run():
            pass
        module = pipeline.versions.module(3)
        return (module.head.output if transport.stage else module.embedding).weight.detach()

    embedding, head = launch(worker, 2, threads=True)
    assert torch.equal(embedding, head) and torch.equal(embedding, task.model.embedding.weight) and not added


def test_what_is_tied_and_where_training_begins():
    model = frozen(language_model(True), TABLES).model
    assert all(weight.is_frozen for weight in tied_parameters(model, [2, 3]).values())
    assert first_trained_stage(model, [1, 4]) == 1 and first_trained_stage(model, [2, 3]) == 0
    with pytest.raises(ValueError, match="all parameters are frozen"):
        first_trained_stage(model.requires_grad_(False), [2, 3])


def test_prepare_must_not_freeze():
    def worker(transport: Transport) -> None:
        task = network()
        Pipeline(
            transport,
            task.model,
            data=task.data,
            loss=task.loss,
            optimizer=groups_of("sgd"),
            num_microbatches=1,
            num_steps=1,
            precision=Precision.of(torch.float64),
            prepare=lambda layers: layers.requires_grad_(False) and None,
        )

    with pytest.raises(Exception, match="prepare changes requires_grad"):
        launch(worker, 1, threads=True)
