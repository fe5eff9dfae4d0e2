"""Weight versions and memory, counted from live storages."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from harness import TIMEOUT_SECONDS, forks
from torch import nn

from slipstream import Pipeline, StepReport, launch
from slipstream.transport.base import Transport

WIDTH = 37  # a shape nothing else has


def storages(*kinds: type[torch.Tensor], shape: tuple[int, ...] | None = None) -> dict[int, int]:
    """Address to bytes of every storage that a tensor of these kinds holds alive; those that a compiler has left behind
    are of others, and have no storage."""
    tensors = [
        value for value in gc.get_objects() if type(value) in kinds and (shape is None or tuple(value.shape) == shape)
    ]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def measure(
    transport: Transport, num_steps: int, error_feedback: float, track_alignment: bool
) -> tuple[int, list[int]]:
    """The most copies of one weight at any sampled moment, and the bytes of all tensors over time."""
    torch.set_num_threads(1)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(transport.num_stages)]
    pipeline = Pipeline(
        transport,
        layers,
        data=lambda step, microbatch: (torch.ones(2, WIDTH), torch.zeros(2, WIDTH)),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        num_microbatches=transport.num_stages,
        num_steps=num_steps,
        error_feedback=error_feedback,
        track_alignment=track_alignment,
        clip_norm=1.0,
    )
    del layers
    copies, sizes = 0, []
    for report in pipeline.run():
        if isinstance(report, StepReport) and report.step % 100 == 50:
            gc.collect()
            copies = max(copies, len(storages(nn.Parameter, shape=(WIDTH, WIDTH))))
            sizes.append(sum(storages(torch.Tensor, nn.Parameter).values()))
    return copies, sizes


@forks
@pytest.mark.parametrize(("error_feedback", "track_alignment", "most"), [(0.0, False, 2), (1.0, True, 3)])
def test_two_versions_and_at_most_a_master_are_alive(error_feedback, track_alignment, most):
    def worker(transport: Transport) -> tuple[int, list[int]]:
        return measure(transport, 400, error_feedback, track_alignment)

    for copies, _ in launch(worker, 2, timeout_seconds=TIMEOUT_SECONDS, start_method="fork"):
        assert copies == most


@forks
def test_memory_is_flat_over_two_thousand_updates():
    def worker(transport: Transport) -> tuple[int, list[int]]:
        return measure(transport, 2000, 1.0, True)

    for copies, sizes in launch(worker, 2, timeout_seconds=TIMEOUT_SECONDS, start_method="fork"):
        assert copies == 3
        assert len(sizes) == 20
        one_message = 2 * WIDTH * 4  # how many are under way at the moment of counting varies
        assert max(sizes) - min(sizes) <= 16 * one_message + 2 * WIDTH * WIDTH * 4
        assert sizes[-1] <= max(sizes[:5]) + 4 * one_message
