"""Several stages on one GPU, as threads; skipped where there is none."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch
from harness import Task, even_cut, language_model, largest_difference, run_pipeline, run_reference

from slipstream import Evaluation, Pipeline, launch, muon_and_adamw
from slipstream.pipeline.clock import TimeSplit
from slipstream.pipeline.reduction import norm_dtype

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def groups(lam: float):
    return muon_and_adamw(
        muon_lr=0.02,
        adamw_lr=0.01,
        adamw_predictor="nesterov",
        muon_ns_dtype=torch.float64,
        error_feedback=lam,
        clip_norm=0.05,
        weight_decay=0.1,
    )


@pytest.mark.parametrize(("stages", "m", "schedule", "lam"), [
    (1, 2, "two_bw", 1.0),
    (2, 3, "two_bw", 0.5),
    (4, 4, "two_bw", 1.0),
    (4, 4, "two_bw", 0.0),
    (4, 4, "one_f_one_b", 1.0),
    (4, 4, "gpipe", 1.0),
])  # fmt: skip
def test_stages_on_one_gpu_follow_the_oracle(stages, m, schedule, lam):
    task = language_model(tied=True)
    shared = {"num_microbatches": m, "num_steps": 22, "layers_per_stage": even_cut(task, stages)}
    on_gpu = Task(
        copy.deepcopy(task.model).cuda(), lambda *index: tuple(part.cuda() for part in task.data(*index)), task.loss
    )
    expected, losses = run_reference(on_gpu, groups(lam), delays=[1 if schedule == "two_bw" else 0] * stages, **shared)
    outcome = run_pipeline(
        task,
        stages,
        groups(lam),
        schedule=schedule,
        device="cuda",
        evaluation=Evaluation(lambda microbatch: task.data(10**6, microbatch), 2, 5),
        **shared,
    )
    assert largest_difference(outcome.weights, expected) <= 1e-12
    assert [report.loss for report in outcome.reports[0]] == pytest.approx(losses, rel=1e-12)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_on_the_step_path_waits_for_the_device():
    """torch raises wherever a call would synchronise; the only wait is for the event of a batch's norms."""
    task = language_model(tied=False)
    data = [tuple(part.pin_memory() for part in task.data(0, microbatch)) for microbatch in range(4)]

    def run(mode: str) -> list[int]:
        together = threading.Barrier(2)

        def worker(transport) -> int:
            pipeline = Pipeline(
                transport,
                copy.deepcopy(task.model),
                data=lambda step, microbatch: data[microbatch],
                loss=task.loss,
                optimizer=groups(lam=1.0),
                num_microbatches=4,
                num_steps=10,
                device="cuda",
            )
            together.wait()  # making a pipeline may synchronise
            if transport.stage == 0:
                torch.cuda.set_sync_debug_mode(mode)
            together.wait()
            return len(list(pipeline.run()))

        try:
            return launch(worker, 2, threads=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run("default")  # everything lazy has happened
    assert run("error") == [10, 10]


def test_the_clock_measures_the_device():
    task = language_model(tied=False)
    base = copy.deepcopy(task.model)

    def worker(transport) -> tuple[TimeSplit, float]:
        pipeline = Pipeline(
            transport,
            copy.deepcopy(base),
            data=task.data,
            loss=task.loss,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            num_microbatches=4,
            num_steps=6,
            device="cuda",
        )
        list(pipeline.run())
        clock = pipeline.executor.clock
        return clock.split(), max(span.end for span in clock.spans)

    for split, last in launch(worker, 2, threads=True):
        assert 0 < split.utilisation <= 1
        assert min(split) >= 0 and split.forward > 0 and split.backward > 0
        assert split.total <= last


def test_a_norm_copies_no_gradient():
    gradient = torch.randn(2**20, device="cuda")
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        values = gradient.to(dtype)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        norm = torch.linalg.vector_norm(values, dtype=norm_dtype(values))
        assert torch.cuda.max_memory_allocated() - before < values.nbytes / 2
        assert norm.dtype == expected
        assert norm.item() == pytest.approx(values.double().norm().item(), rel=1e-6)
