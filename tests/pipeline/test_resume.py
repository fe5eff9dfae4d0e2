"""A run that is taken up again ends where it would have: to the bit, or in another shape up to the order of sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from typing import Any

import pytest
import torch
from harness import Rank, Task, all_weights, even_cut, forks, language_model, largest_difference, network, run_ranks
from pytorch_optimizer import Lion
from torch import Tensor, nn

from slipstream import Evaluation, Group, Pipeline, StepReport, launch
from slipstream.checkpoint.stage_state import StageState, StateError, check_names
from slipstream.optim import muon_and_adamw
from slipstream.pipeline import Requests
from slipstream.transport.base import Transport

NUM_STEPS = 11


def groups(lam: float = 1.0) -> list[Group]:
    return muon_and_adamw(
        muon_lr=0.02, adamw_lr=0.01, muon_ns_dtype=torch.float64, weight_decay=0.1, error_feedback=lam, clip_norm=0.05
    )


def falling_rate(step: int) -> float:
    return 1 - step / (2 * NUM_STEPS)


def state(pipeline: Pipeline) -> StageState:
    return pipeline.snapshot()()


def run(task: Task, num_stages: int, optimizer: Any, num_replicas: int = 1, **options: Any) -> list[Rank]:
    """By rank, with the state after every update."""
    usual: dict[str, Any] = {
        "num_steps": NUM_STEPS,
        "learning_rate": falling_rate,
        "evaluation": Evaluation(lambda microbatch: task.data(10**6, microbatch), 2, 3),
    }
    return run_ranks(task, num_stages, optimizer, num_replicas, look=state, **usual | options)


def merged(ranks: list[Rank], step: int) -> StageState:
    """What all stages kept together: everyone finds in it what it needs."""
    states = [rank.seen[step] for rank in ranks]
    names = [name for state in states for name in state.tensors]
    assert len(names) == len(set(names))
    facts: dict[str, Any] = {}
    for kind in ("optimizer", "coefficients", "groups"):
        facts[kind] = {key: value for state in states for key, value in state.facts[kind].items()}
    return StageState(step, {k: v for state in states for k, v in state.tensors.items()}, facts)


def losses_after(ranks: list[Rank], step: int) -> list[tuple[int, float | None, bool]]:
    return [
        (report.step, report.loss, isinstance(report, StepReport))
        for report in ranks[-1].reports
        if report.step >= step - (not isinstance(report, StepReport))
    ]


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
def test_a_run_that_is_taken_up_again_ends_in_the_same_bits(options):
    base = language_model(tied=True) if options["schedule"] != "pipedream" else language_model(tied=False)
    task = Task(base.model, base.data, lambda outputs, targets: base.loss(outputs.double(), targets))
    whole = run(task, 3, groups(), **options)
    for step in (1, 4):
        again = run(task, 3, groups(), start=merged(whole, step), **options)
        for name, weight in all_weights(whole).items():
            assert torch.equal(all_weights(again)[name], weight), name
        if options["schedule"] != "pipedream":  # there an evaluation sees what every stage happens to have
            assert losses_after(again, step) == losses_after(whole, step)
        for ours, theirs in zip(again[0].steps, whole[0].steps[step:], strict=True):
            assert ours.step == theirs.step
            assert ours.gradient_norms == theirs.gradient_norms


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


@cache
def three_stages(tied: bool) -> tuple[Task, dict[str, Any], list[Rank]]:
    """A run, with what was special about it."""
    task = language_model(tied=tied)
    options: dict[str, Any] = {"num_microbatches": 6, "layers_per_stage": even_cut(task, 3)}
    return task, options, run(task, 3, groups(), **options)


@pytest.mark.parametrize(("tied", "stages", "replicas", "changes"), [
    (True, 1, 1, {}),
    (False, 1, 1, {}),
    (True, 4, 1, {"layers_per_stage": [1, 1, 1, 2]}),
    (True, 2, 2, {}),
    (True, 2, 2, {"shard_optimizer": True}),
    (False, 2, 2, {"shard_optimizer": True}),
    (True, 3, 1, {"depth": "double"}),
], ids=str)  # fmt: skip
def test_a_run_is_taken_up_in_another_shape(tied, stages, replicas, changes):
    """And back, with everything that belongs to it."""
    task, own, whole = three_stages(tied)
    other = {"num_microbatches": 6 // replicas, "layers_per_stage": even_cut(task, stages), **changes}
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
    task = network()
    num_steps = 18

    def stop(transport: Transport) -> Callable[[], Requests]:
        is_last = (transport.replica, transport.stage) == (replicas - 1, stages - 1)
        numbers = count(1)
        return lambda: Requests(stop=next(numbers) == 6 and is_last)

    def go(requests: Any = lambda transport: Requests, **start: Any) -> list[Rank]:
        more = {"num_steps": num_steps, "learning_rate": lambda step: 1.0, **options, **start}
        return run(task, stages, groups(), replicas, requests=requests, **more)

    whole, stopped = go(), go(requests=stop)
    steps = [report.step for report in stopped[0].steps]
    assert 6 <= len(steps) < 15 and all([report.step for report in rank.steps] == steps for rank in stopped)
    again = go(start=merged(stopped, len(steps)))
    for rank, expected in zip(again, whole, strict=True):
        assert all(torch.equal(rank.weights[name], weight) for name, weight in expected.weights.items())


def test_a_snapshot_overwrites_the_copies_it_is_given_where_they_fit():
    kept_by_stage: dict[int, dict[str, Tensor]] = {0: {}, 1: {}}

    def look(pipeline: Pipeline) -> None:
        kept = kept_by_stage[pipeline.transport.stage]
        fresh, again = pipeline.snapshot()().tensors, pipeline.snapshot(kept)().tensors
        assert fresh.keys() == again.keys()
        assert all(torch.equal(fresh[name], tensor) for name, tensor in again.items())
        assert all(again[name] is tensor for name, tensor in kept.items() if name != "another")
        name = min(again)
        unfit = {**again, "another": torch.zeros(1), name: torch.zeros(2, 3, 5)}
        odd = pipeline.snapshot(unfit)().tensors
        assert odd[name].shape == fresh[name].shape and "another" not in odd
        kept_by_stage[pipeline.transport.stage] = dict(odd)

    run_ranks(network(), 2, partial(torch.optim.AdamW, lr=0.01), look=look, num_microbatches=2, num_steps=4)
    assert all(kept_by_stage.values())


def test_a_save_that_one_process_asks_for_is_reported_to_all_after_the_same_update():
    """And so is it that some are still busy with the one before."""

    def requests(transport: Transport) -> Callable[[], Requests]:
        numbers = count(1)
        asks = (transport.replica, transport.stage) == (1, 0)

        def ask() -> Requests:
            number = next(numbers)
            return Requests(save=asks and number in (3, 4), busy=transport.stage == 1 and number == 6)

        return ask

    ranks = run_ranks(network(), 2, groups(), num_replicas=2, requests=requests, num_steps=8, num_microbatches=2)
    for rank in ranks:
        assert [report.step for report in rank.steps if report.save] == [2, 3]
        assert [report.step for report in rank.steps if report.busy] == [5]


@pytest.mark.parametrize("options", [
    {"schedule": "two_bw", "num_microbatches": 3},
    {"schedule": "two_bw", "num_microbatches": 5, "depth": "double"},
    {"schedule": "one_f_one_b", "num_microbatches": 2},
], ids=lambda options: " ".join(map(str, options.values())))  # fmt: skip
def test_buffers_go_on_where_they_were_though_later_batches_had_begun(options):
    """Running means are in state and weights, and no microbatch counts twice in them."""
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)]
    model = nn.Sequential(*layers).double()
    base = network()

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        return torch.randn(5, 6, generator=generator).double(), torch.randn(5, 4, generator=generator).double()

    task = Task(model, data, base.loss)
    optimizer = partial(torch.optim.SGD, lr=0.05)
    whole = run(task, 3, optimizer, **options)
    weights = all_weights(whole)
    assert weights["1.num_batches_tracked"] == NUM_STEPS * options["num_microbatches"]
    assert set(weights) == set(model.state_dict())
    for step in (1, 4, 8):
        again = all_weights(run(task, 3, optimizer, start=merged(whole, step), **options))
        for name, weight in weights.items():
            assert torch.equal(again[name], weight), name
    kept = merged(whole, 4)
    less = {name: tensor for name, tensor in kept.tensors.items() if name != "buffer/1.running_mean"}
    with pytest.raises(Exception, match=r"the buffers 1\.running_mean are missing, which the model keeps"):
        run(task, 3, optimizer, start=StageState(4, less, kept.facts), **options)


def goes_on(transport: Transport, task: Task, then: dict[str, Any], **options: Any) -> tuple[Pipeline, Pipeline]:
    """Returns a pipeline that has made four of eight steps, and one on the same transport that continues from there."""
    given = {"data": task.data, "loss": task.loss, "optimizer": partial(torch.optim.SGD, lr=0.05)}
    given |= {"num_microbatches": 2, "num_steps": 8, **options}
    first = Pipeline(transport, copy.deepcopy(task.model), until=4, **given)
    for _ in first.run():
        pass
    kept = first.state()
    kept = StageState(kept.step, {name: tensor.detach().clone() for name, tensor in kept.tensors.items()}, kept.facts)
    return first, Pipeline(transport, copy.deepcopy(task.model), start=kept, **(given | then))


@forks
@pytest.mark.parametrize("shared_memory", [True, False])
def test_no_message_of_an_evaluation_that_was_not_made_reaches_the_next_pipeline(shared_memory):
    task = network()
    evaluation = Evaluation(lambda index: task.data(1000, index), 9, every_steps=2)

    def worker(transport: Transport) -> list[float | None]:
        _, second = goes_on(transport, task, {}, evaluation=evaluation)
        return [report.loss for report in second.run()]

    losses = launch(worker, 2, shared_memory=shared_memory, timeout_seconds=20.0, start_method="fork")[1]
    whole = run_ranks(task, 2, [Group("all", partial(torch.optim.SGD, lr=0.05))], num_microbatches=2, num_steps=8,
                      error_feedback=0.0, evaluation=evaluation)[1]  # fmt: skip
    assert losses == [report.loss for report in whole.reports][-7:]


@pytest.mark.parametrize("track_alignment", [True, False])
def test_without_error_feedback_a_run_goes_on_from_the_masters(track_alignment):
    task = network()

    def worker(transport: Transport) -> bool:
        then = {"error_feedback": 0.0, "track_alignment": track_alignment}
        first, second = goes_on(transport, task, then, error_feedback=1.0)
        before, after, read = first.weights(), second.weights(), second.versions.parameters(4)
        return all(torch.equal(before[name], after[name]) and torch.equal(read[name], after[name]) for name in after)

    assert launch(worker, 2, threads=True) == [True, True]


def test_a_state_in_another_dtype_is_refused():
    task = network()

    def worker(transport: Transport) -> None:
        single = Task(copy.deepcopy(task.model).float(), lambda s, m: task.data(s, m), task.loss)
        first = Pipeline(transport, copy.deepcopy(task.model), data=task.data, loss=task.loss, num_microbatches=1,
                         optimizer=partial(torch.optim.SGD, lr=0.05), num_steps=2)  # fmt: skip
        with pytest.raises(StateError, match=r"0\.weight is in torch\.float64, and the model in torch\.float32"):
            Pipeline(transport, single.model, data=single.data, loss=task.loss, num_microbatches=1,
                     optimizer=partial(torch.optim.SGD, lr=0.05), num_steps=2, start=first.state())  # fmt: skip

    launch(worker, 1, threads=True)
