"""A loop of one's own saves, resumes, evaluates and logs: examples/own_loop.py, and what it does not show."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import runpy
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TIMEOUT_SECONDS, Task, forks, load_example, network
from torch import Tensor, nn

from slipstream import Checkpoints, Evaluation, EvaluationReport, Metrics, Pipeline, StepReport, launch, load_weights
from slipstream.checkpoint import CheckpointError, Store
from slipstream.errors import StageFailure
from slipstream.transport.base import Transport
from tests.faults.runs import world_by_hand

NUM_STEPS = 120
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    load_example("own_loop").main(folder, num_steps=NUM_STEPS, threads=True)
    return folder


def interrupt(folder: Path) -> list[dict[str, Any]]:
    """Leaves a run of the example behind that ended in the middle, after its checkpoint of step 100. Returns its rows
    before that: whoever resumes it leaves them as they are, with their times."""
    example = load_example("own_loop")
    data = example.data

    def until_110(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        if step == 110:
            raise RuntimeError("the plug was pulled")
        return data(step, microbatch)

    example.data = until_110
    with pytest.raises(StageFailure, match="the plug was pulled"):
        example.main(folder, num_steps=NUM_STEPS, threads=True)
    assert max(row["step"] for row in rows_of(folder)) >= 100
    return [row for row in rows_of(folder) if row["step"] < 100]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_example_resumes_in_the_same_bits_in_any_number_of_stages(whole, num_stages, tmp_path):
    before = interrupt(tmp_path)
    example = load_example("own_loop")
    example.main(tmp_path, num_stages, NUM_STEPS, threads=True)
    assert rows_of(tmp_path)[: len(before)] == before
    assert same_bits(load_weights(tmp_path), load_weights(whole))
    losses = [[row.get("loss", row.get("val_loss")) for row in rows_of(folder)] for folder in (tmp_path, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == NUM_STEPS + 3
    assert example.accuracy(tmp_path) > 0.9


@forks
def test_the_example_resumes_in_the_same_bits_where_a_launcher_starts_its_processes(whole, tmp_path, monkeypatch):
    """As torchrun and srun do, and without the time that three interpreters take to start."""
    before = interrupt(tmp_path)
    for name, value in world_by_hand(3).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["own_loop.py", f"--folder={tmp_path}", "--stages=3", f"--steps={NUM_STEPS}"])

    def start(rank: int) -> None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        with (tmp_path / f"said{rank}").open("w") as said, redirect_stdout(said):
            runpy.run_path(str(EXAMPLE), run_name="__main__")

    ranks = [multiprocessing.get_context("fork").Process(target=start, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_SECONDS)
        rank.kill()  # if it has not ended by itself
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert rows_of(tmp_path)[: len(before)] == before
    assert sum("accuracy" in (tmp_path / f"said{rank}").read_text() for rank in range(3)) == 1
    assert same_bits(load_weights(tmp_path), load_weights(whole))


def own_run(
    folder: Path,
    num_stages: int,
    task: Task,
    num_steps: int,
    num_replicas: int = 1,
    **options: Any,
) -> list[list[StepReport | EvaluationReport]]:
    """The reports of every stage."""

    def worker(transport: Transport) -> list[StepReport | EvaluationReport]:
        with Checkpoints(transport, folder, keep_last=9) as checkpoints:
            pipeline = Pipeline(
                transport,
                copy.deepcopy(task.model),
                data=task.data,
                loss=task.loss,
                optimizer=partial(torch.optim.AdamW, lr=0.01),
                error_feedback=1.0,
                num_microbatches=4 // num_replicas,
                num_steps=num_steps,
                start=checkpoints.load(),
                **options,
            )
            reports = []
            for report in pipeline.run():
                reports.append(report)
                if isinstance(report, StepReport) and report.step % 2:
                    checkpoints.save(pipeline)
        assert not list(folder.glob("checkpoints/*.partial"))  # on no stage before all have written
        return reports

    return launch(worker, num_stages, num_replicas=num_replicas, threads=True, timeout_seconds=60)


def test_replicas_that_share_the_optimizer_save_together_and_another_layout_loads(tmp_path):
    task = network()
    own_run(tmp_path / "whole", 2, task, 8)
    own_run(tmp_path / "parts", 2, task, 6, num_replicas=2, shard_optimizer=True)
    assert len(list((tmp_path / "parts" / "checkpoints" / "step-00000006").glob("*.safetensors"))) == 4
    own_run(tmp_path / "parts", 1, task, 8)
    expected, found = load_weights(tmp_path / "whole"), load_weights(tmp_path / "parts")
    assert max(float((expected[name] - found[name]).abs().max()) for name in expected) <= 1e-12


def test_a_checkpoint_is_evaluated_without_training(tmp_path):
    task = network()
    evaluation = Evaluation(lambda batch: task.data(10**6, batch), 2)
    *_, last = own_run(tmp_path, 2, task, 4, evaluation=evaluation)[-1]
    (again,) = own_run(tmp_path, 3, task, 4, evaluation=evaluation)[-1]
    assert isinstance(again, EvaluationReport) and again == last
    model = task.model.requires_grad_(False)
    model.load_state_dict(load_weights(tmp_path))
    losses = [float(task.loss(model(inputs), targets)) for inputs, targets in (task.data(10**6, b) for b in range(2))]
    assert again.loss == pytest.approx(sum(losses) / 2, rel=1e-12)


def test_weights_of_an_earlier_step_are_read_and_a_folder_without_any_is_refused(tmp_path):
    task = network()
    own_run(tmp_path, 2, task, 4)
    assert not same_bits(load_weights(tmp_path, step=2), load_weights(tmp_path))
    assert load_weights(tmp_path).keys() == task.model.state_dict().keys()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        load_weights(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model: model.append(nn.Linear(3, 3).double()), r"8\.weight is missing; 8\.bias is missing"),
        (lambda model: model.pop(7), r"7\.weight is not in the model"),
        (lambda model: model.__setitem__(0, nn.Linear(6, 12, bias=False).double()), r"0\.bias is not in the model"),
        (lambda model: model.__setitem__(7, nn.Linear(12, 4).double()), r"7\.weight is \(3, 12\), not \(4, 12\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change, sentence, tmp_path):
    own_run(tmp_path, 2, network(), 2)
    task = network()
    change(task.model)
    with pytest.raises(StageFailure, match=sentence):
        own_run(tmp_path, 2, task, 4)


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_on_every_stage(tmp_path, monkeypatch, capsys):
    write = Store.write

    def fail(store: Store, step: int, part: Any, num_parts: int) -> bool:
        if step == 4 and part.name == "stage-1":
            raise CheckpointError("the disk is full")
        return write(store, step, part, num_parts)

    monkeypatch.setattr(Store, "write", fail)
    with pytest.raises(StageFailure, match="the last checkpoint is not complete"):
        own_run(tmp_path, 2, network(), 4)
    assert "step 4 has no checkpoint: the disk is full" in capsys.readouterr().out
    monkeypatch.undo()
    assert same_bits(load_weights(tmp_path), load_weights(tmp_path, step=2))
    own_run(tmp_path, 2, network(), 4)
    assert Store(tmp_path / "checkpoints").steps() == [2, 4]


def test_metrics_are_written_by_the_last_stage_with_values_of_ones_own(tmp_path):
    task = network()

    def worker(transport: Transport) -> None:
        pipeline = Pipeline(
            transport,
            copy.deepcopy(task.model),
            data=task.data,
            loss=task.loss,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            num_microbatches=2,
            num_steps=2,
        )
        with Metrics(pipeline, tmp_path / str(transport.stage), tokens_per_step=16) as metrics:
            for report in pipeline.run():
                metrics.log(report, seen={"images": 4 * (report.step + 1)})

    launch(worker, 2, threads=True)
    assert not (tmp_path / "0").exists()
    assert [row["seen"] for row in rows_of(tmp_path / "1")] == [{"images": 4}, {"images": 8}]
