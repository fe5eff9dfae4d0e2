"""Synchronous schedules against torch.distributed.pipelining, gradients included."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import TIMEOUT_SECONDS, forks, language_model
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from slipstream import Pipeline, launch
from slipstream.pipeline.partition import cut
from slipstream.transport.process import ProcessTransport

NUM_MICROBATCHES, NUM_STEPS = 4, 3


class RecordingSGD(torch.optim.SGD):
    """Keeps a copy of every gradient it is given."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.seen: list[list[Tensor]] = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def worker(transport: ProcessTransport, schedule: str) -> float:
    with transport.process_group():
        return compare(transport, schedule)


def compare(transport: ProcessTransport, schedule: str) -> float:
    """The largest difference of any gradient or parameter of this stage."""
    torch.set_num_threads(1)
    task = language_model(tied=False)
    sizes = [2, 3]
    ours = Pipeline(
        transport,
        copy.deepcopy(task.model),
        data=task.data,
        loss=task.loss,
        optimizer=lambda parameters: RecordingSGD(parameters, lr=0.1),
        num_microbatches=NUM_MICROBATCHES,
        num_steps=NUM_STEPS,
        schedule=schedule,
        layers_per_stage=sizes,
    )
    list(ours.run())
    [recorder] = {optimizer for _, optimizer, _ in ours.updater.optimizer_states()}

    module = cut(copy.deepcopy(task.model), sizes, transport.stage)
    stage = PipelineStage(module, transport.stage, transport.num_stages, torch.device("cpu"))
    cls = {"one_f_one_b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    theirs = cls(stage, NUM_MICROBATCHES, loss_fn=task.loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    differences = []
    for step in range(NUM_STEPS):
        pairs = [task.data(step, microbatch) for microbatch in range(NUM_MICROBATCHES)]
        if transport.stage == 0:
            theirs.step(torch.cat([x for x, _ in pairs]), return_outputs=False)
        else:
            theirs.step(target=torch.cat([y for _, y in pairs]), losses=[], return_outputs=False)
        for parameter, gradient in zip(module.parameters(), recorder.seen[step], strict=True):
            differences.append(float((parameter.grad - gradient).abs().max() / gradient.abs().max()))
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in module.named_parameters():
        differences.append(float((parameter - ours.weights()[name]).abs().max() / parameter.abs().max()))
    return max(differences)


@forks
@pytest.mark.filterwarnings("ignore")  # torch's own, in the forked stages
@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_gradients_and_parameters_equal_those_of_torch(schedule):
    for difference in launch(
        lambda transport: worker(transport, schedule), 2, timeout_seconds=TIMEOUT_SECONDS, start_method="fork"
    ):
        assert difference <= 1e-12
