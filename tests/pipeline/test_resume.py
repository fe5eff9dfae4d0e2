"""A run that is taken up again ends where it would have: to the bit, or in another shape up to the order of sums."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from harness import TIMEOUT_SECONDS, Task, even_cut, language_model, largest_difference, network
from pytorch_optimizer import Lion
from torch import Tensor

from slipstream import Group, Pipeline, StepReport, launch
from slipstream.optim import muon_and_adamw
from slipstream.pipeline import Requests
from slipstream.pipeline.comm import Transport
from slipstream.pipeline.state import StageState, StateError, check_names

NUM_STEPS = 11
EVALUATIONS: dict[str, Any] = {"num_evaluations": 2, "evaluate_every": 3}


def groups(lam: float = 1.0) -> list[Group]:
    return muon_and_adamw(
        muon_lr=0.02, adamw_lr=0.01, muon_ns_dtype=torch.float64, weight_decay=0.1, error_feedback=lam, clip_norm=0.05
    )


def falling_rate(step: int) -> float:
    return 1 - step / (2 * NUM_STEPS)


Run = tuple[dict[str, Tensor], list[Any], dict[int, StageState]]
"""Weights, reports, and the state after every update."""


def run(
    task: Task, num_stages: int, optimizer: Any, num_replicas: int = 1, start: StageState | None = None, **options: Any
) -> list[Run]:
    """By rank."""

    def worker(transport: Transport) -> Run:
        states = {}
        pipeline = Pipeline(
            transport,
            copy.deepcopy(task.model),
            data=task.data,
            loss=task.loss,
            optimizer=optimizer,
            num_steps=NUM_STEPS,
            learning_rate=falling_rate,
            evaluation=lambda microbatch: task.data(10**6, microbatch),
            start=start,
            **EVALUATIONS,
            **options,
        )
        reports = []
        for report in pipeline.run():
            reports.append(report)
            if isinstance(report, StepReport):
                states[report.step + 1] = pipeline.snapshot()()
        return {name: weight.clone() for name, weight in pipeline.weights().items()}, reports, states

    return launch(worker, num_stages, num_replicas=num_replicas, threads=True, timeout_seconds=TIMEOUT_SECONDS)


def all_weights(ranks: list[Run]) -> dict[str, Tensor]:
    return {name: weight for weights, *_ in ranks for name, weight in weights.items()}


def merged(ranks: list[Run], step: int) -> StageState:
    """What all stages kept together: everyone finds in it what it needs."""
    states = [states[step] for *_, states in ranks]
    names = [name for state in states for name in state.tensors]
    assert len(names) == len(set(names))
    facts: dict[str, Any] = {}
    for kind in ("optimizer", "coefficients", "groups"):
        facts[kind] = {key: value for state in states for key, value in state.facts[kind].items()}
    return StageState(step, {k: v for state in states for k, v in state.tensors.items()}, facts)


def losses_after(ranks: list[Run], step: int) -> list[tuple[int, float | None, bool]]:
    _, reports, _ = ranks[-1]
    return [
        (report.step, report.loss, isinstance(report, StepReport))
        for report in reports
        if report.step >= step - (not isinstance(report, StepReport))
    ]


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("options", [
    {"schedule": "two_bw", "num_microbatches": 3},
    {"schedule": "two_bw", "num_microbatches": 5, "depth": "double"},
    {"schedule": "two_bw", "num_microbatches": 3, "sync_start_steps": 4},
    {"schedule": "two_bw", "num_microbatches": 3, "track_alignment": False},
    {"schedule": "one_f_one_b", "num_microbatches": 2},
    {"schedule": "gpipe", "num_microbatches": 2},
    {"schedule": "pipedream", "num_microbatches": 2},
    {"schedule": "two_bw", "num_microbatches": 3, "dtype": torch.float32, "gradient_dtype": torch.float64},
], ids=lambda options: " ".join(map(str, options.values())))  # fmt: skip
def test_a_run_that_is_taken_up_again_ends_in_the_same_bits(options, step):
    base = language_model(tied=True) if options["schedule"] != "pipedream" else language_model(tied=False)
    task = Task(base.model, base.data, lambda outputs, targets: base.loss(outputs.double(), targets))
    whole = run(task, 3, groups(), **options)
    again = run(task, 3, groups(), start=merged(whole, step), **options)
    for name, weight in all_weights(whole).items():
        assert torch.equal(all_weights(again)[name], weight), name
    if options["schedule"] != "pipedream":  # there an evaluation sees what every stage happens to have
        assert losses_after(again, step) == losses_after(whole, step)
    for ours, theirs in zip(again[0][1], [r for r in whole[0][1] if r.step >= step - 1], strict=False):
        if isinstance(ours, StepReport) and isinstance(theirs, StepReport) and ours.step == theirs.step:
            assert ours.learning_rates == theirs.learning_rates and ours.gradient_norms == theirs.gradient_norms


@pytest.mark.parametrize("optimizer", [
    partial(torch.optim.AdamW, lr=0.01),
    partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    partial(Lion, lr=0.01),
], ids=["adamw", "sgd", "lion"])  # fmt: skip
def test_optimizers_of_others_are_taken_up_too(optimizer):
    task = network()
    options = {"num_microbatches": 2, "error_feedback": 1.0, "clip_norm": 0.5}
    whole = run(task, 2, optimizer, **options)
    again = run(task, 2, optimizer, start=merged(whole, 5), **options)
    for name, weight in all_weights(whole).items():
        assert torch.equal(all_weights(again)[name], weight), name


@pytest.mark.parametrize(("stages", "replicas", "changes"), [
    (1, 1, {}),
    (4, 1, {"layers_per_stage": [1, 1, 1, 2]}),
    (2, 2, {}),
    (2, 2, {"shard_optimizer": True}),
    (3, 1, {"depth": "double"}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_a_run_is_taken_up_in_another_shape(stages, replicas, changes, tied):
    """And back, with everything that belongs to it."""
    task = language_model(tied=tied)
    own: dict[str, Any] = {"num_microbatches": 8, "layers_per_stage": even_cut(task, 3)}
    other = {"num_microbatches": 8 // replicas, "layers_per_stage": even_cut(task, stages), **changes}
    whole = run(task, 3, groups(), **own)
    there = run(task, stages, groups(), replicas, start=merged(whole, 4), **other)
    assert largest_difference(all_weights(there), _by_first_name(task, all_weights(whole))) <= 1e-12
    back = run(task, 3, groups(), start=merged(there, 8), **own)
    assert largest_difference(all_weights(back), _by_first_name(task, all_weights(whole))) <= 1e-12


def _by_first_name(task: Task, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the copies of tied weights, as one process knows them."""
    return {name: weights[name] for name, _ in task.model.named_parameters()}


def test_a_synchronous_run_goes_on_asynchronously_as_after_a_synchronous_start():
    task = language_model(tied=False)
    started = run(task, 2, groups(), num_microbatches=2, schedule="one_f_one_b")
    there = run(task, 2, groups(), start=merged(started, 4), num_microbatches=2, sync_start_steps=4)
    expected = run(task, 2, groups(), num_microbatches=2, sync_start_steps=4)
    assert largest_difference(all_weights(there), all_weights(expected)) <= 1e-12


def test_an_asynchronous_run_goes_on_synchronously_from_its_masters():
    """One schedule cannot do both, so the rest is compared with a run that starts from these masters."""
    task = language_model(tied=False)
    started = run(task, 2, groups(), num_microbatches=2)
    state = merged(started, 4)
    there = run(task, 2, groups(), start=state, num_microbatches=2, schedule="one_f_one_b")
    fresh = StageState(4, {k: v for k, v in state.tensors.items() if not k.startswith("working")}, state.facts)
    expected = run(task, 1, groups(), start=fresh, num_microbatches=2, schedule="gpipe")
    assert largest_difference(all_weights(there), all_weights(expected)) <= 1e-12


def test_a_version_that_is_missing_is_refused():
    task = language_model(tied=False)
    started = run(task, 2, groups(), num_microbatches=2, schedule="one_f_one_b")
    with pytest.raises(RuntimeError, match=r"version 3 of .* is missing, which the next batch runs on"):
        run(task, 2, groups(), start=merged(started, 4), num_microbatches=2)


def test_names_that_do_not_fit_are_listed():
    expected = {"a": torch.Size([2]), "b": torch.Size([3, 1]), "c": torch.Size([])}
    found = {"a": torch.Size([2]), "b": torch.Size([1, 3]), "d": torch.Size([4])}
    with pytest.raises(StateError, match=r"^c is missing; d is not in the model; b is \(1, 3\), not \(3, 1\)$"):
        check_names(found, expected)
    check_names(expected, expected)


# ---- what one process asks for, all do


@pytest.mark.parametrize(("stages", "replicas", "options"), [
    (1, 1, {"num_microbatches": 1}),
    (3, 1, {"num_microbatches": 3}),
    (3, 1, {"num_microbatches": 5, "depth": "double"}),
    (3, 1, {"num_microbatches": 2, "schedule": "one_f_one_b"}),
    (3, 1, {"num_microbatches": 1, "schedule": "pipedream"}),
    (2, 2, {"num_microbatches": 2}),
    (2, 2, {"num_microbatches": 2, "shard_optimizer": True}),
], ids=str)  # fmt: skip
def test_a_stop_that_one_process_asks_for_ends_all_after_the_same_update(stages, replicas, options):
    """And the run that goes on from there ends where it would have."""
    task = language_model(tied=False)
    num_steps = 40

    def go(start: StageState | None, stops: bool) -> list[tuple[dict[str, Tensor], list[int], StageState]]:
        def worker(transport: Transport) -> tuple[dict[str, Tensor], list[int], StageState]:
            rank = transport.replica * stages + transport.stage
            num_asked = 0

            def requests() -> Requests:
                nonlocal num_asked
                num_asked += 1
                return Requests(stop=stops and rank == stages * replicas - 1 and num_asked == 6)

            pipeline = Pipeline(
                transport,
                copy.deepcopy(task.model),
                data=task.data,
                loss=task.loss,
                optimizer=groups(),
                num_steps=num_steps,
                evaluation=lambda microbatch: task.data(10**6, microbatch),
                requests=requests,
                start=start,
                **EVALUATIONS,
                **options,
            )
            steps = [report.step for report in pipeline.run() if isinstance(report, StepReport)]
            return pipeline.weights(), steps, pipeline.snapshot()()

        return launch(worker, stages, num_replicas=replicas, threads=True, timeout_seconds=TIMEOUT_SECONDS)

    whole, stopped = go(None, stops=False), go(None, stops=True)
    steps = stopped[0][1]
    assert 6 <= len(steps) < 20 and all(other == steps for _, other, _ in stopped)
    again = go(merged([(w, [], {len(steps): s}) for w, _, s in stopped], len(steps)), stops=False)
    for (weights, *_), (expected, *_) in zip(again, whole, strict=True):
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_a_snapshot_overwrites_the_copies_it_is_given_where_they_fit():
    task = network()

    def worker(transport: Transport) -> None:
        pipeline = Pipeline(
            transport,
            copy.deepcopy(task.model),
            data=task.data,
            loss=task.loss,
            optimizer=partial(torch.optim.AdamW, lr=0.01),
            num_microbatches=2,
            num_steps=4,
        )
        kept: dict[str, Tensor] = {}
        for _ in pipeline.run():
            fresh, again = pipeline.snapshot()().tensors, pipeline.snapshot(kept)().tensors
            assert fresh.keys() == again.keys()
            assert all(torch.equal(fresh[name], tensor) for name, tensor in again.items())
            assert all(again[name] is tensor for name, tensor in kept.items() if name != "another")
            name = min(again)
            kept = {**again, "another": torch.zeros(1)}
            kept[name] = torch.zeros(2, 3, 5)
            odd = pipeline.snapshot(kept)().tensors
            assert odd[name].shape == fresh[name].shape and "another" not in odd
            kept = dict(odd)
        assert kept

    launch(worker, 2, threads=True, timeout_seconds=TIMEOUT_SECONDS)


def test_a_save_that_one_process_asks_for_is_reported_to_all_after_the_same_update():
    """And so is it that some are still busy with the one before."""
    task = network()

    def worker(transport: Transport) -> tuple[list[int], list[int]]:
        num_asked = 0

        def requests() -> Requests:
            nonlocal num_asked
            num_asked += 1
            asks = (transport.replica, transport.stage) == (1, 0)
            return Requests(save=asks and num_asked in (3, 4), busy=transport.stage == 1 and num_asked == 6)

        pipeline = Pipeline(
            transport,
            copy.deepcopy(task.model),
            data=task.data,
            loss=task.loss,
            optimizer=groups(),
            num_steps=8,
            num_microbatches=2,
            requests=requests,
        )
        reports = [report for report in pipeline.run() if isinstance(report, StepReport)]
        return [r.step for r in reports if r.save], [r.step for r in reports if r.busy]

    assert launch(worker, 2, num_replicas=2, threads=True, timeout_seconds=TIMEOUT_SECONDS) == [([2, 3], [5])] * 4
