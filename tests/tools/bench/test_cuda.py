"""`slipstream bench --device cuda`, as far as it can be seen without a GPU."""

from __future__ import annotations

import datetime
import json
import pickle
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from harness import forks

from slipstream import launch
from slipstream.cli import bench as command
from slipstream.cli.bench import main as bench
from slipstream.errors import UsageError
from slipstream.pipeline.clock import Activity, Span
from slipstream.schedule import Action, Op
from slipstream.tools.bench import matrix, turns, workloads
from slipstream.tools.bench.contenders import TORCH_SHAPES, Round, World, _ends_on_device
from slipstream.tools.bench.figure import draw
from slipstream.tools.bench.matrix import AS_TRAINED, gpu_worlds
from slipstream.tools.bench.results import Spread, Table, document, markdown, notes_of, rows_of
from slipstream.tools.bench.slices import Gpu
from slipstream.tools.bench.turns import Outcome
from slipstream.tools.bench.workloads import GpuSetting, Placement, on_gpu

TINY = ["--dim", "128", "--blocks", "2", "--sequence-length", "4", "--batch", "1", "--vocabulary", "32"]
SETTING = GpuSetting(dim=128, blocks=4, sequence_length=16, batch=2, vocabulary=32)


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "emulated"], "only = 'emulated' is for device = 'cpu': leave it out"),
        (["--stages", "2", "4"], "stages = 2 4 is more than one number"),
        (["--stages", "1"], "stages = 1 cannot be compared: use 2 to 32"),
        (["--no-slices"], "stages = 4 need a GPU each without slices, and there are 1: leave out --no-slices"),
        (["--no-slices", "--share", "30"], "share = 30 is of a GPU that stages share"),
        (["--share", "101"], "share = 101 is no part of a GPU: use 1 to 100"),
        (["--blocks", "3"], "blocks = 3 cannot be cut into two equal chunks: use an even number"),
        (["--dim", "200"], "dim = 200 is not made of heads of 128: use a multiple"),
        (["--microbatches", "4", "0"], "microbatches = 4 0 has less than 1: use 1 or more"),
        (["--batch", "0"], "batch = 0 measures nothing: use 1 or more"),
        (["--clock", "0"], "clock = 0 measures nothing: use 1 or more"),
        (["--device", "tpu"], "device = 'tpu' is invalid"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_work(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=words):
        bench(["--device", "cuda", *arguments, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="device = 'cuda' finds no CUDA device here: use device = 'cpu'"):
        bench(["--device", "cuda"])


@pytest.mark.parametrize(
    "option", [("--share", "25"), ("--microbatches", "4"), ("--no-slices",), ("--tied",), ("--dtype", "float32")]
)
def test_what_is_for_gpus_is_refused_on_a_cpu(option):
    with pytest.raises(UsageError, match="is for GPUs: leave it out, or use device = 'cuda'"):
        bench(list(option))


# ---- the workload


@pytest.mark.parametrize(
    ("shape", "sizes"), [("single", [5, 4, 5]), ("loop", [3, 2, 2, 2, 2, 3]), ("v", [3, 2, 2, 2, 2, 3])]
)
def test_every_process_has_its_blocks_however_they_are_placed(shape, sizes):
    placement = Placement(3, shape)
    workload = on_gpu(SETTING, placement, torch.device("cpu"))
    assert workload.sizes == sizes and sum(sizes) == len(workload.model) == 14
    for process in range(3):
        names = [name for c in placement.chunks(process) for name, _ in workload.chunk(c).named_children()]
        assert sum(name.startswith("block") for name in names) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_process_makes_its_own_layers_and_they_train(dtype):
    setting = replace(SETTING, dtype=str(dtype).removeprefix("torch."))
    workload = on_gpu(setting, Placement(2), torch.device("cpu"))
    assert {parameter.device.type for parameter in workload.model.parameters()} == {"meta"}
    first, last = workload.chunk(0), workload.chunk(1)
    inputs, targets = workload.data(0, 0)
    hidden = first(inputs)
    expected = setting.activations(torch.device("cpu"))
    assert hidden.shape == expected.shape and hidden.dtype is expected.dtype is dtype
    loss = workload.loss(last(hidden), targets) / targets.numel()
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(32.0).log().item(), rel=0.2)
    assert {p.dtype for p in [*first.parameters(), *last.parameters()]} == {dtype}
    assert setting.message_bytes == hidden.nbytes


def test_as_trained_has_masters_in_float32_and_two_groups():
    workload = on_gpu(SETTING, Placement(2), torch.device("cpu"), tied=True, as_trained=True)
    assert workload.model.embedding.weight is workload.model.head.output.weight
    assert {p.dtype for p in workload.chunk(0).parameters()} == {torch.float32}
    assert [(group.name, group.error_feedback) for group in workload.optimizer] == [("matrices", 1.0), ("rest", 1.0)]
    assert workload.precision.compute is torch.bfloat16


# ---- the matrix


def test_more_microbatches_have_fewer_steps_and_every_world_the_same_contenders():
    worlds = gpu_worlds(SETTING, 4, [4, 8, 16, 2], 3)
    assert [each.num_steps for each in worlds] == [13, 10, 10, 13]
    assert {len(each.contenders) for each in worlds} == {13}
    assert [contender.name for contender in worlds[0].contenders if contender.as_trained] == [AS_TRAINED]


def test_a_step_ends_with_its_last_backward():
    spans = [Span(Action(0, op, m, 0), activity, m, m + 0.5 + (op is Op.BACKWARD))
             for m in range(4)
             for op, activity in ((Op.FORWARD, Activity.FORWARD), (Op.BACKWARD, Activity.BACKWARD))]  # fmt: skip
    assert _ends_on_device(spans, 2) == [2.5, 4.5]


# ---- results


def outcomes(of_world: World) -> list[Outcome]:
    made = []
    for contender in of_world.contenders:
        seconds = {"torch 1F1B": 0.2, "slipstream two_bw": 0.1}.get(contender.name, 0.4)
        rounds = [
            Round(
                s,
                message_seconds=0.004 if contender.engine == "slipstream" else 0.0,
                facts={"mean_stage_seconds": 0.09},
                memory_bytes=3 * 2**30,
            )
            for s in (seconds, 1.1 * seconds)
        ]
        made.append(Outcome(contender, tuple(rounds)))
    made[6] = Outcome(of_world.contenders[6], (), "torch DualPipeV did not end within 120 s on stage 1")
    return made


def test_the_table_compares_with_torch_and_says_what_the_link_and_the_clock_were(tmp_path):
    setting = GpuSetting(share=25, tied=True)
    worlds = gpu_worlds(setting, 4, [4, 8], 2)
    readings = {"sm_clock_mhz": Spread(1100, 1095, 1105), "power_watts": Spread(450, 300, 600)}
    tables = []
    for each in worlds:
        made = outcomes(each)
        tables.append(Table(each, made, rows_of(each, made, [None] * 13), notes_of(each, made, readings)))
    text = markdown(tables)
    assert "### cuda compute, P = 4, m = 4, 25 % of one GPU each" in text
    assert "| slipstream two_bw | 156,038 | 105.0 | 100.0 - 110.0 | 2.00 | 0.859 | 0.818 - 0.900 | 1.000 |" in text
    assert "| 3.0 |" in text and "overhead" not in text
    assert "- torch DualPipeV: torch DualPipeV did not end within 120 s on stage 1" in text
    assert "- Link: a message of 16.8 MB takes 4.00 ms to the next process, 4.2 GB/s." in text
    assert "- Clock, MHz: 1,095 - 1,105, median 1,100." in text
    assert "share a weight in slipstream's one_f_one_b and two_bw" in text
    assert draw(tables, tmp_path / "figure.png").stat().st_size > 0
    started = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    read = json.loads(json.dumps(document(tables, started, {"gpus": ["NVIDIA H200"]})))
    assert read["gpu"]["gpus"] == ["NVIDIA H200"] and read["worlds"][0]["gpu"]["share"] == 25
    assert read["worlds"][0]["contenders"][1]["rounds"][0]["memory_bytes"] == 3 * 2**30


# ---- from end to end, with CPUs in place of GPUs


@pytest.mark.filterwarnings("ignore")  # torch's own
@forks
def test_all_contenders_run_in_processes_that_would_be_spawned(monkeypatch, tmp_path, capfd):
    given = []

    def launch_on_cpus(worker, num_stages, **options):
        given.append(options)
        worker = pickle.loads(pickle.dumps(worker))  # as it comes to a process that is spawned
        return launch(worker, num_stages, **{**options, "device": "cpu", "share_gpu": False, "start_method": "fork"})

    @contextmanager
    def no_gpu(*arguments):
        yield Gpu(None, [])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(turns, "launch", launch_on_cpus)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for module in (matrix, workloads):
        monkeypatch.setattr(module, "NUM_GPU_WARM_UP_STEPS", 1)
    monkeypatch.setattr(matrix, "GPU_NUM_STEPS", 5)
    monkeypatch.setattr(matrix, "GPU_MIN_NUM_STEPS", 5)
    monkeypatch.setattr(command, "sliced", no_gpu)
    bench(["--device", "cuda", "--quick", "--stages", "2", "--microbatches", "4", *TINY, "--tied",
           "--output", str(tmp_path / "out")])  # fmt: skip
    assert [(each["device"], each["share_gpu"], each["start_method"]) for each in given] == [("cuda", True, "spawn")]
    [only] = json.loads((tmp_path / "out" / "results.json").read_text())["worlds"]
    failures = {
        contender["row"]["name"]: contender["row"]["failure"]
        for contender in only["contenders"]
        if contender["row"]["failure"]
    }
    assert failures == {}
    for contender in only["contenders"]:
        assert contender["row"]["step_seconds"]["median"] > 0, contender["row"]["name"]
        [only_round] = contender["rounds"]
        has_order = contender["contender"]["schedule"] in TORCH_SHAPES and "0SEND_F0" in "".join(only_round["order"])
        assert has_order == (TORCH_SHAPES.get(contender["contender"]["schedule"], "single") != "single")
    assert "- Link: a message of 0.0 MB" in capfd.readouterr().out
