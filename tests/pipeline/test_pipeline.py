"""The library's interface: a model of one's own, anything between the layers, any torch optimizer."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from harness import Task, even_cut, forks, largest_difference, load_example, network, run_pipeline, run_reference
from torch import Tensor, nn

from slipstream import Evaluation, Group, Pipeline, launch
from slipstream.errors import StageFailure
from slipstream.schedule import ScheduleError
from slipstream.transport.base import gather_objects
from slipstream.transport.thread import ThreadMesh

ADAMW = [Group("all", partial(torch.optim.AdamW, lr=0.01), error_feedback=1.0, clip_norm=0.5)]


class Split(nn.Module):
    """Returns a tensor, a mask that is not differentiable and a float that nothing depends on."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, x > 0, torch.ones(x.shape[0], 1, dtype=x.dtype)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, ones = parts
        return self.linear(x) * mask, mask, ones


class Join(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, mask, ones = parts
        return (x * mask + ones)[:, :3]


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_layers_may_pass_tuples_of_tensors_of_any_type(threads):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Split(), Mixer(), Mixer(), Join()).double()
    task = Task(model, network().data, nn.functional.mse_loss)
    shared = {"num_microbatches": 4, "num_steps": 8}
    expected, _ = run_reference(task, ADAMW, delays=[1], **shared)
    outcome = run_pipeline(task, 4, ADAMW, threads=threads, layers_per_stage=[2, 1, 1, 1], **shared)
    assert largest_difference(outcome.weights, expected) <= 1e-12


def test_the_convolutional_network_of_the_readme_follows_the_oracle():
    example = load_example("convnet")
    torch.manual_seed(0)
    model = nn.Sequential(*example.layers()).double()

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        images, labels = example.data(step, microbatch)
        return images.double(), labels

    task = Task(model, data, nn.functional.cross_entropy)
    groups = [Group("all", partial(torch.optim.SGD, lr=0.05, momentum=0.9), error_feedback=1.0, clip_norm=1.0)]
    shared = {"num_microbatches": 4, "num_steps": 20}
    expected, _ = run_reference(task, groups, delays=[1, 1], layers_per_stage=even_cut(task, 2), **shared)
    assert largest_difference(run_pipeline(task, 2, groups, **shared).weights, expected) <= 1e-12


def test_an_optimizer_may_be_given_as_a_bare_factory():
    task = network()
    base = copy.deepcopy(task.model)

    def worker(transport) -> dict[str, Tensor]:
        pipeline = Pipeline(
            transport,
            copy.deepcopy(base),
            data=task.data,
            loss=task.loss,
            optimizer=partial(torch.optim.AdamW, lr=0.01),
            error_feedback=1.0,
            clip_norm=0.5,
            num_microbatches=2,
            num_steps=6,
        )
        list(pipeline.run())
        return pipeline.weights()

    stages = launch(worker, 2, threads=True)
    expected = run_pipeline(task, 2, ADAMW, num_microbatches=2, num_steps=6).weights
    for weights in stages:
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name])


def test_a_loss_of_one_element_may_have_dimensions():
    task, outcomes = network(), []
    for loss in (task.loss, lambda outputs, targets: task.loss(outputs, targets).reshape(1, 1)):
        evaluation = Evaluation(lambda batch: task.data(10**6, batch), 1)
        own = Task(task.model, task.data, loss)
        outcomes.append(run_pipeline(own, 2, ADAMW, num_microbatches=2, num_steps=2, evaluation=evaluation))
    assert outcomes[0].evaluations == outcomes[1].evaluations


def test_a_loss_of_several_elements_is_refused_with_its_shape():
    task = network()
    own = Task(task.model, task.data, partial(nn.functional.mse_loss, reduction="none"))
    message = r"stage 1 failed at 1F0@v0 with ValueError: the loss function returns a tensor of shape \(\d+, \d+\): "
    with pytest.raises(StageFailure, match=message + "return one number, such as the mean"):
        run_pipeline(own, 2, ADAMW, num_microbatches=2, num_steps=2)


@forks
def test_two_runs_may_follow_one_another_with_other_shapes():
    task = network()

    def worker(transport) -> int:
        for rows in (2, 3):
            pipeline = Pipeline(
                transport,
                copy.deepcopy(task.model),
                data=lambda step, microbatch, rows=rows: tuple(part[:rows] for part in task.data(step, microbatch)),
                loss=task.loss,
                optimizer=partial(torch.optim.SGD, lr=0.01),
                num_microbatches=2,
                num_steps=3,
            )
            reports = list(pipeline.run())
        return len(reports)

    assert launch(worker, 2, timeout_seconds=60, start_method="fork") == [3, 3]


def test_paci_refuses_error_feedback():
    with pytest.raises(ScheduleError, match="error_feedback = 1 of group 'all' needs a weight version"):
        Pipeline(
            ThreadMesh(2).transport(0),
            copy.deepcopy(network().model),
            data=network().data,
            loss=network().loss,
            optimizer=ADAMW,
            schedule="paci",
            num_microbatches=2,
            num_steps=2,
        )


def test_tied_weights_refuse_schedules_whose_stages_step_apart():
    layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    layers[2].weight = layers[0].weight
    with pytest.raises(ScheduleError, match="tied weights cannot be split over the stages of pipedream"):
        Pipeline(
            ThreadMesh(3).transport(0),
            layers,
            data=network().data,
            loss=network().loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            schedule="pipedream",
            num_microbatches=2,
            num_steps=2,
        )


@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=forks)])
def test_objects_of_any_length_are_gathered_on_every_stage(threads):
    def worker(transport) -> list[bytes]:
        return gather_objects(transport, b"x" * (7 * transport.stage), lambda: "a test")

    results = launch(worker, 3, threads=threads, timeout_seconds=60, start_method="fork")
    assert results == [[b"", b"x" * 7, b"x" * 14]] * 3


def test_a_worker_of_a_module_starts_from_a_clean_process():
    from harness import report_stage

    assert launch(report_stage, 2, timeout_seconds=60) == ["0 of 2", "1 of 2"]


def test_copies_of_a_tied_weight_start_alike_and_stay_alike_whatever_the_groups_match():
    def worker(transport) -> dict[str, Tensor]:
        layers = [nn.Linear(3, 3, bias=False) for _ in range(3)]  # drawn in a race of threads: unequal on purpose
        layers[2].weight = layers[0].weight
        groups = [
            Group("first", partial(torch.optim.SGD, lr=0.5), lambda name, parameter: name.startswith("0")),
            Group("rest", partial(torch.optim.SGD, lr=0.1)),
        ]
        pipeline = Pipeline(
            transport,
            layers,
            data=lambda step, microbatch: (torch.ones(2, 3), torch.zeros(2, 3)),
            loss=nn.functional.mse_loss,
            optimizer=groups,
            num_microbatches=3,
            num_steps=5,
        )
        list(pipeline.run())
        return pipeline.weights()

    first, _, last = launch(worker, 3, threads=True)
    assert torch.equal(first["0.weight"], last["2.weight"])
