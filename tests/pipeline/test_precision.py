"""Working copies in a coarser dtype than the masters: against the oracle, and byte by byte."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from torch import Tensor

from slipstream import Evaluation, Group, Pipeline
from slipstream.optim import balance_experts, muon_and_adamw
from slipstream.pipeline import update

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


def coarse(task: Task, dtype: torch.dtype) -> Task:
    """With inputs that the working copies can be multiplied with."""

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        inputs, targets = task.data(step, microbatch)
        return (inputs.to(dtype) if inputs.is_floating_point() else inputs), targets

    return Task(task.model, data, lambda outputs, targets: task.loss(outputs.float(), targets))


def steady_task(
    make: Callable[[int], Task], oracle: Callable[[Task], dict[str, Tensor]]
) -> tuple[Task, dict[str, Tensor]]:
    """The first model that the oracle finds steady, and what the oracle makes of it.

    Rounding is a step: where a master lies between two working copies, noise in its last digit, as sums in another
    order make it, moves the copy by a whole one. One model of a hundred or so has such a master. Whether it has is
    asked of the oracle alone: it must end in the same weights when its first ones are moved by such noise."""
    for seed in range(5):
        task, moved = make(seed), make(seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.model.parameters():
                parameter.mul_(1 + 1e-14 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        expected = oracle(task)
        if largest_difference(oracle(moved), expected) < 1e-10:
            return task, expected
    raise AssertionError("five models in a row have a master between two working copies")


@pytest.mark.parametrize(("stages", "schedule", "lam", "dtype", "gradient_dtype"), [
    (1, "two_bw", 1.0, torch.float32, torch.float64),
    (2, "two_bw", 0.0, torch.float32, None),
    (3, "two_bw", 0.5, torch.float32, torch.float64),
    (2, "one_f_one_b", 1.0, torch.float32, torch.float64),
    (3, "pipedream", 1.0, torch.float32, None),
    (3, "two_bw", 1.0, torch.bfloat16, torch.float64),
    (2, "two_bw", 0.5, torch.bfloat16, None),
])  # fmt: skip
def test_coarse_working_copies_follow_the_oracle(dtype, stages, schedule, lam, gradient_dtype):
    """float64 masters, so that what is left is the order of sums."""
    delays = {"two_bw": [1] * stages, "one_f_one_b": [0] * stages, "pipedream": list(range(stages))[::-1]}[schedule]

    shared: dict[str, Any] = {
        "num_microbatches": 3,
        "num_steps": NUM_STEPS,
        "layers_per_stage": even_cut(language_model(tied=False), stages),
        "dtype": dtype,
        "gradient_dtype": gradient_dtype,
    }
    task, expected = steady_task(
        lambda seed: coarse(language_model(tied=False, seed=seed), dtype),
        lambda task: run_reference(task, groups(lam), delays=delays, **shared)[0],
    )
    outcome = run_pipeline(task, stages, groups(lam), schedule=schedule, **shared)
    assert all(weight.dtype == torch.float64 for weight in outcome.weights.values())
    assert largest_difference(outcome.weights, expected) <= 1e-9


def test_parts_of_a_group_are_stepped_as_the_whole_is(monkeypatch):
    """Where an optimizer of others cannot predict by itself."""
    task = coarse(network(), torch.float32)
    options: dict[str, Any] = {"num_microbatches": 2, "num_steps": NUM_STEPS, "dtype": torch.float32}
    others = [Group("all", partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0), error_feedback=1.0)]
    whole = run_pipeline(task, 2, others, **options)
    monkeypatch.setattr(update, "PART_ELEMENTS", 150)  # of matrices with 144
    parts = run_pipeline(task, 2, others, **options)
    assert all(torch.equal(parts.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize(("tied", "tolerance", "threads", "sharded"), [
    (False, 1e-9, True, False),
    pytest.param(False, 1e-9, False, True, marks=forks),
    (True, 1e-5, True, True),
    pytest.param(True, 1e-5, False, False, marks=forks),
])  # fmt: skip
def test_replicas_with_coarse_working_copies_agree(tied, tolerance, threads, sharded):
    """To the bit, and whoever owns the optimizer. Of a tied weight the oracle adds up embedding and head of every
    microbatch in float32, the stages only those of the batch, in float64."""

    options: dict[str, Any] = {
        "num_microbatches": 4,
        "num_steps": NUM_STEPS,
        "layers_per_stage": even_cut(language_model(tied=tied), 2),
        "dtype": torch.float32,
        "gradient_dtype": torch.float64,
    }
    task, expected = steady_task(
        lambda seed: coarse(language_model(tied=tied, seed=seed), torch.float32),
        lambda task: run_reference(task, groups(), delays=[1, 1], **options)[0],
    )
    first, second, *others = run_ranks(
        task,
        2,
        groups(),
        num_replicas=2,
        threads=threads,
        num_microbatches=2,
        num_steps=NUM_STEPS,
        dtype=torch.float32,
        gradient_dtype=torch.float64,
        reduction_dtype=torch.float64,
        shard_optimizer=sharded,
        evaluation=Evaluation(lambda microbatch: task.data(10**6, microbatch), 2, 5),
    )
    for ours, theirs in zip([first, second], others, strict=True):
        assert all(torch.equal(theirs.weights[name], weight) for name, weight in ours.weights.items())
        assert [report.loss for report in theirs.reports] == [report.loss for report in ours.reports]
    for replica in ([first, second], others):
        assert largest_difference(all_weights(replica), expected) <= tolerance


def test_an_evaluation_sees_the_masters_rounded():
    task = coarse(language_model(tied=False), torch.bfloat16)
    outcome = run_pipeline(
        task,
        2,
        groups(),
        num_microbatches=2,
        num_steps=4,
        dtype=torch.bfloat16,
        evaluation=Evaluation(lambda microbatch: task.data(10**6, microbatch), 1),
    )
    model = copy.deepcopy(task.model)
    model.load_state_dict(outcome.weights, strict=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    inputs, targets = task.data(10**6, 0)
    with torch.no_grad():
        expected = float(task.loss(model(inputs), targets))
    assert outcome.evaluations == [pytest.approx(expected, rel=1e-6)]


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_error_feedback_adds_no_byte_to_mixed_precision(lam):
    """Two working copies of two bytes and a master of four, whether they are predicted or not."""
    task = coarse(language_model(tied=False), torch.bfloat16)
    task.model.float()

    def sizes(pipeline: Pipeline) -> tuple[int, int, int]:
        versions = pipeline.versions
        kept = [*versions.parameters(0).values(), *versions.parameters(1).values(), *versions.masters.values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        states = [optimizer.state[master] for _, optimizer, master in pipeline.updater.optimizer_states()]
        state = sum(t.nbytes for s in states for t in s.values() if isinstance(t, Tensor))
        numel = sum(p.numel() for p in versions.parameters(0).values())
        return sum(storages.values()), state, numel

    ranks = run_ranks(
        task,
        2,
        muon_and_adamw(muon_lr=0.02, adamw_lr=0.01, error_feedback=lam),
        look=sizes,
        num_microbatches=2,
        num_steps=4,
        dtype=torch.bfloat16,
        gradient_dtype=torch.float32,
        track_alignment=False,
    )
    for rank in ranks:
        kept, state, numel = rank.last_seen
        assert kept == (2 + 2 + 4) * numel
        assert state <= 2 * 4 * numel


def test_the_cosine_of_updates_is_known_from_a_sample(monkeypatch):
    """As it is where the copies tell it, and nearly so from a few numbers of each parameter."""
    task = network(width=48)
    options: dict[str, Any] = {"num_microbatches": 2, "num_steps": NUM_STEPS}
    exact = run_pipeline(task, 2, groups(), **options)
    mixed = coarse(task, torch.float32)
    sampled = run_pipeline(mixed, 2, groups(), dtype=torch.float32, gradient_dtype=torch.float64, **options)
    monkeypatch.setattr(update, "SAMPLE_ELEMENTS", 256)
    few = run_pipeline(mixed, 2, groups(), dtype=torch.float32, gradient_dtype=torch.float64, **options)
    for name in ("matrices", "rest"):
        cosines = [[report.alignments[name].cosine for report in run.reports[0][4:]] for run in (exact, sampled, few)]
        assert cosines[1] == pytest.approx(cosines[0], abs=1e-3)
        assert cosines[2] == pytest.approx(cosines[0], abs=0.2)
        assert name == "rest" or cosines[2] != cosines[1]  # the rest are biases, which are no more than a sample


def test_the_bias_of_a_router_stays_as_fine_as_it_is():
    """Its gradient counts tokens, and in bf16 257 is 256."""
    task = coarse(language_model(tied=False, **EXPERTS), torch.bfloat16)

    def dtypes(pipeline: Pipeline) -> dict[str, torch.dtype]:
        return {name: parameter.dtype for name, parameter in pipeline.versions.parameters(0).items()}

    ranks = run_ranks(
        task,
        2,
        [balance_experts(0.01), *groups()],
        look=dtypes,
        num_microbatches=2,
        num_steps=3,
        dtype=torch.bfloat16,
        gradient_dtype=torch.float64,
    )
    for rank in ranks:
        for name, dtype in rank.last_seen.items():
            assert dtype == (torch.float64 if name.endswith("router.bias") else torch.bfloat16), name
