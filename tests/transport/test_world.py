"""A world that changes its shape: the state goes from memory to memory, and training stays on the oracle's way."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from harness import Task, even_cut, forks, language_model, largest_difference, run_reference
from torch import Tensor

from slipstream import Group, Pipeline, StepReport
from slipstream.checkpoint.stage_state import StageState
from slipstream.errors import StageFailure
from slipstream.optim import muon_and_adamw
from slipstream.pipeline import Requests
from slipstream.pipeline.partition import cut, tied_parameters
from slipstream.train.reshape import destinations
from slipstream.transport.launch import launch_world
from slipstream.transport.mesh import Mesh
from slipstream.transport.world import TensorLocation, World, choose_members

NUM_STEPS, NUM_MICROBATCHES = 9, 4
Shapes = list[tuple[int, int, int]]
"""Steps to be made by then, stages, replicas."""


def groups() -> list[Group]:
    return muon_and_adamw(
        muon_lr=0.02,
        adamw_lr=0.01,
        adamw_predictor="nesterov",
        muon_ns_dtype=torch.float64,
        weight_decay=0.1,
        error_feedback=1.0,
        clip_norm=0.05,
    )


def oracle(task: Task, delay: int = 1, sync_start_steps: int = 0) -> dict[str, Tensor]:
    weights, _ = run_reference(
        task,
        groups(),
        num_microbatches=NUM_MICROBATCHES,
        num_steps=NUM_STEPS,
        delays=[delay],
        sync_start_steps=sync_start_steps,
    )
    return weights


def holders(task: Task, sizes: list[int]) -> list[set[str]]:
    tied = tied_parameters(task.model, sizes)
    names = [[name for name, _ in cut(task.model, sizes, s).named_parameters()] for s in range(len(sizes))]
    return [{tied[name].name if name in tied else name for name in stage} for stage in names]


def train_in_shapes(world: World, task: Task, shapes: Shapes, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The last shape's weights here, and the bytes that came from others."""
    start: StageState | None = None
    state: StageState | None = None
    order: list[int] | None = None
    num_bytes, weights = 0, dict[str, Tensor]()
    for index, (until, num_stages, num_replicas) in enumerate(shapes):
        mesh = Mesh(num_stages, num_replicas)
        sizes = even_cut(task, num_stages)
        if index > 0:
            world.leave()
            moved = world.exchange(state, partial(destinations, holders(task, sizes), mesh))
            start, order, num_bytes = moved.state, moved.order, num_bytes + moved.num_bytes
        transport, state = world.take_places(mesh, order), None
        pipeline = transport and Pipeline(
            transport,
            copy.deepcopy(task.model),
            data=task.data,
            loss=task.loss,
            optimizer=groups(),
            num_microbatches=NUM_MICROBATCHES // num_replicas,
            num_steps=NUM_STEPS,
            layers_per_stage=sizes,
            start=start,
            until=until,
            **options,
        )
        if index > 0:
            world.settle()
        if pipeline is not None:
            steps = [report.step for report in pipeline.run() if isinstance(report, StepReport)]
            assert steps == list(range(0 if start is None else start.step, until))
            state = pipeline.state()
            weights = {name: weight.clone() for name, weight in pipeline.weights().items()}
        else:
            weights = {}
    return weights, num_bytes


def run_in_shapes(
    task: Task, shapes: Shapes, threads: bool = True, timeout_seconds: float = 30.0, **options: Any
) -> tuple[dict[str, Tensor], list[int]]:
    """Weights of all, and the bytes that every process was sent."""
    members = launch_world(
        partial(train_in_shapes, task=task, shapes=shapes, options=options),
        max(num_stages * num_replicas for _, num_stages, num_replicas in shapes),
        threads=threads,
        timeout_seconds=timeout_seconds,
        start_method="fork",
    )
    together = {name: weight for weights, _ in members for name, weight in weights.items()}
    return together, [num_bytes for _, num_bytes in members]


@pytest.mark.parametrize(("shapes", "tied", "options"), [
    ([(3, 2, 1), (6, 4, 1), (9, 2, 1)], False, {}),
    ([(3, 2, 1), (6, 4, 1), (9, 2, 1)], True, {}),
    ([(1, 1, 1), (2, 3, 1), (9, 1, 1)], True, {}),
    ([(4, 2, 2), (6, 4, 1), (9, 2, 2)], True, {"shard_optimizer": True}),
    ([(4, 4, 1), (9, 2, 2)], False, {"sync_start_steps": 4}),
    ([(4, 4, 1), (9, 2, 2)], False, {"sync_start_steps": 6}),
    ([(4, 2, 1), (9, 3, 1)], False, {"schedule": "one_f_one_b"}),
], ids=str)  # fmt: skip
def test_a_run_that_changes_its_shape_stays_on_the_oracles_way(shapes, tied, options):
    task = language_model(tied=tied)
    is_sync = options.get("schedule") == "one_f_one_b"
    expected = oracle(task, delay=0 if is_sync else 1, sync_start_steps=options.get("sync_start_steps", 0))
    weights, _ = run_in_shapes(task, shapes, **options)
    assert largest_difference(weights, expected) <= 1e-12


@forks
@pytest.mark.parametrize("replicas", [1, 2])
def test_processes_hand_their_state_to_one_another(replicas):
    task = language_model(tied=True)
    expected = oracle(task)
    shapes = [(3, 2, replicas), (6, 4, 1), (9, 2, replicas)]
    weights, num_bytes = run_in_shapes(task, shapes, threads=False)
    assert largest_difference(weights, expected) <= 1e-12
    assert all(received > 0 for received in num_bytes[1:])  # the first keeps what it had, or gets it back


def test_a_place_goes_to_whoever_has_most_of_what_is_needed_there():
    """Two stages of two layers become four: each keeps one, and the others go to those that stood by."""
    places = {
        f"master/{name}": TensorLocation(rank, "float32", (8, 4))
        for name, rank in zip("abcd", [0, 0, 1, 1], strict=True)
    }
    holders = [{"a"}, {"b"}, {"c"}, {"d"}]
    assert choose_members(places, partial(destinations, holders, Mesh(4)), 4) == [0, 2, 1, 3]
    places = {
        f"master/{name}": TensorLocation(rank, "float32", (8, 4))
        for name, rank in zip("abcd", [0, 2, 1, 3], strict=True)
    }
    assert choose_members(places, partial(destinations, [{"a", "b"}, {"c", "d"}], Mesh(2)), 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_what_stays_where_it_is_does_not_travel(threads):
    """From two stages to the same two nothing moves but what is not where it is needed."""
    task = language_model(tied=False)
    _, num_bytes = run_in_shapes(task, [(3, 2, 1), (NUM_STEPS, 2, 1)], threads=threads)
    assert num_bytes[1] == 0 and num_bytes[0] < 1000  # the second stage's products of the latest updates


def test_a_pause_that_one_process_asks_for_is_no_stop():
    task = language_model(tied=False)

    def worker(world: World) -> tuple[int | None, bool]:
        transport = world.take_places(Mesh(2))
        assert transport is not None
        pipeline = Pipeline(
            transport,
            copy.deepcopy(task.model),
            data=task.data,
            loss=task.loss,
            optimizer=groups(),
            num_microbatches=2,
            num_steps=30,
            until=25,
            requests=lambda: Requests(pause=transport.stage == 1),
        )
        steps = [report.step for report in pipeline.run() if isinstance(report, StepReport)]
        assert pipeline.executor.end == len(steps) == pipeline.state().step
        return pipeline.executor.end, pipeline.executor.stop_was_asked

    (end, stopped), other = launch_world(worker, 2, threads=True, timeout_seconds=30)
    assert (end, stopped) == other and end is not None and end < 10 and not stopped


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_whoever_stands_by_hears_of_a_failure(threads):
    def worker(world: World) -> None:
        if world.take_places(Mesh(1)) is not None:
            raise ValueError("boom")
        world.hear("never said", lambda: "its turn", is_working=False)

    with pytest.raises(StageFailure, match="stage 0 failed with ValueError: boom"):
        launch_world(worker, 3, threads=threads, timeout_seconds=30, start_method="fork")


def test_silence_is_a_failure_for_those_that_work():
    def worker(world: World) -> None:
        if world.rank == 1:
            world.hear("never said", lambda: "its turn")

    with pytest.raises(StageFailure, match=r"silent for 0\.2 s: process 1 was waiting for its turn"):
        launch_world(worker, 2, threads=True, timeout_seconds=0.2)


def test_a_shape_that_needs_more_processes_is_refused():
    with pytest.raises(StageFailure, match="2 x 2 stages need more than 3 processes"):
        launch_world(lambda world: world.take_places(Mesh(2, 2)), 3, threads=True)


@forks
def test_all_processes_hear_what_the_first_one_says():
    def worker(world: World) -> str:
        return world.as_first("word", f"of {world.rank}")

    assert launch_world(worker, 3, timeout_seconds=30, start_method="fork") == ["of 0"] * 3
