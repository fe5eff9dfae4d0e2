"""A model that is built once and given to all stages, as the guides say: no stage updates the weights of another."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from slipstream import Group, Pipeline, launch, reference_run

NUM_MICROBATCHES, NUM_STEPS = 4, 8


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def tied_model() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, Mean(), nn.Linear(8, 8), nn.Tanh(), last).double()


def data(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    x = torch.randint(16, (8, 4), generator=generator)
    return x, x[:, 0]


def groups() -> list[Group]:
    return [Group("all", partial(torch.optim.SGD, lr=0.5))]


def work(transport, model, schedule):
    pipeline = Pipeline(
        transport,
        model,
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=groups(),
        num_microbatches=NUM_MICROBATCHES // transport.num_replicas,
        num_steps=NUM_STEPS,
        schedule=schedule,
    )
    for _ in pipeline.run():
        pass
    return {name: weight.clone() for name, weight in pipeline.weights().items()}


@pytest.mark.parametrize(
    ("way", "schedule", "num_replicas"),
    [
        *itertools.product(["threads", "fork", "shared"], ["one_f_one_b", "two_bw"], [1, 2]),
        ("forkserver", "two_bw", 1),  # every process of which loads torch's compiler, for its optimizer
    ],
)
def test_stages_and_replicas_that_are_given_one_model_end_where_the_reference_does(way, schedule, num_replicas):
    delay = int(schedule == "two_bw")
    expected, _ = reference_run(
        tied_model(),
        data=data,
        loss=nn.functional.cross_entropy,
        groups=groups(),
        num_microbatches=NUM_MICROBATCHES,
        num_steps=NUM_STEPS,
        delays=[delay],
    )
    model = tied_model()
    if way == "shared":
        model.share_memory()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    worker = partial(work, model=model, schedule=schedule)
    options = {"threads": True} if way == "threads" else {"start_method": "fork" if way == "shared" else way}
    for weights in launch(worker, 2, num_replicas=num_replicas, **options):
        for name, weight in weights.items():
            its = expected["0.weight" if name == "4.weight" else name]  # they are tied
            torch.testing.assert_close(weight, its, rtol=0, atol=1e-12)
    if way in ("threads", "shared"):
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
