"""`slipstream plan` and `slipstream profile`, as they are typed."""

from __future__ import annotations

import json
import multiprocessing
import re
from contextlib import nullcontext

import pytest
import torch
from harness import forks
from rich.console import Console
from settings import changed

from slipstream.cli import plan as command
from slipstream.cli.config_arguments import model_of_run
from slipstream.cli.dispatch import run
from slipstream.cli.parse import parse
from slipstream.config.defaults import settled
from slipstream.config.models import model_of
from slipstream.config.rules import validate
from slipstream.config.schema import Config, OptimizerSection
from slipstream.data import prepare
from slipstream.errors import RunFailure
from slipstream.model.decoder import layer_costs
from slipstream.model.registry import preset
from slipstream.tools.plan import profile as profiling
from slipstream.tools.plan import search
from slipstream.tools.plan.causes import idle_causes
from slipstream.tools.plan.costs import estimate, find_device
from slipstream.tools.plan.memory import MemoryModel
from slipstream.tools.plan.predict import SCHEDULES
from slipstream.tools.plan.price import token_price
from slipstream.tools.plan.search import Cluster, Search

SHAPE = "--model.dim {} --model.num-layers {} --model.num-heads 4 --model.num-kv-heads 2 --model.hidden-dim {}"
SHAPE += " --optimizer.name adamw"
SMALL = [*SHAPE.format(32, 4, 64).split(), "--model.sequence-length", "32"]
IN_FLOAT32 = ["--train.compute-dtype", "float32"]
DEEP = [*SHAPE.format(64, 10, 256).split(), "--model.sequence-length", "8"]
"""Mostly weights: 0.0059 GiB on one device, 0.0021 of each with two_bw on four."""


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """Three sizes of microbatches and two schedules, because each is played."""
    monkeypatch.setattr(search, "MAX_SIZES", 3)
    monkeypatch.setattr(command, "SCHEDULES", ("one_f_one_b", "two_bw"))


@pytest.fixture
def all_schedules(monkeypatch, few_cases):
    monkeypatch.setattr(command, "SCHEDULES", SCHEDULES)


def plan(capsys, *words: str) -> str:
    # The samples of updates that are compared take half of the time of a plan, and hardly any memory.
    assert run(["plan", *words, "--train.no-track-alignment"]) == 0
    return capsys.readouterr().out


def refusal(capsys, *words: str) -> str:
    assert run(list(words)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_model_that_fits_on_one_device_is_sent_to_data_parallelism(capsys):
    said = plan(capsys, "--devices", "2", "--batch-tokens", "4096", *SMALL, *IN_FLOAT32)
    assert "Pipeline parallelism is the wrong tool here" in said
    assert "Use a replica on every device (pipeline.stages = 1)" in said
    assert "estimated" in said
    assert recommended(said).startswith("data parallel ")


def recommended(said: str) -> str:
    (row,) = [line for line in said.splitlines() if "<- best" in line]
    return row


def test_replicas_share_an_update_that_would_take_each_of_them_long(capsys):
    said = plan(capsys, "--devices", "8", "--model.preset", "1b")
    assert "Pipeline parallelism is the wrong tool here: the model fits" in said
    assert "They share the update" in said
    assert recommended(said).startswith("data parallel ")
    assert "--pipeline.replicas 8" in said and "--optimizer.sharded --train" in said


def test_where_replicas_would_wait_for_slow_links_it_is_fsdp_or_a_pipeline(capsys, monkeypatch):
    monkeypatch.setattr(command, "SCHEDULES", ("one_f_one_b", "two_bw", "two_bw_double"))
    said = plan(capsys, "--devices", "64", "--model.preset", "1b", "--bandwidth-gbps", "100")
    assert "400 Gb/s between nodes of 8" in said
    assert recommended(said).startswith("two_bw")
    assert re.search(r"FSDP.* would be \d+% (faster|slower) \([\d,]+ tokens/s, the delay's price counted\)", said)


def test_fsdp_is_always_in_the_table_and_never_recommended(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SCHEDULES", ("two_bw",))
    path = tmp_path / "plan.json"
    for words in (SMALL, DEEP):
        said = plan(capsys, "--devices", "2", "--batch-tokens", "4096", "--json", str(path), *words)
        (row,) = [row for row in json.loads(path.read_text())["options"] if row["schedule"] == "fsdp"]
        assert row["fits"] and not row["runnable"] and not row["recommended"]
        assert "FSDP" in said and re.search(r"^fsdp +1 x 2 .*planned$", said, re.MULTILINE)


EIGHT = ["--model.preset", "8b", "--devices", "8", "--device-kind", "h100", "--train.compute-dtype", "bfloat16"]


def test_a_delay_that_costs_more_tokens_than_it_saves_is_not_recommended(capsys, monkeypatch):
    monkeypatch.setattr(command, "SCHEDULES", ("one_f_one_b", "paci"))
    said = plan(capsys, *EIGHT, "--optimizer.name", "adamw")
    assert recommended(said).startswith("one_f_one_b ")
    assert re.search(r"paci is \d+% faster, but its delay costs 218% more tokens to the same loss with adamw", said)


@pytest.mark.parametrize(("name", "lam", "schedule", "delay", "price"), [
    ("adamw", 1.0, "one_f_one_b", 0, 1.0),
    ("adamw", 1.0, "two_bw", 1, 1.47),
    ("adamw", 0.0, "two_bw", 1, 3.18),
    ("adamw", 1.0, "paci", 1, 3.18),
    ("muon", 1.0, "two_bw", 1, 1.11),
    ("muon", 1.0, "pipedream", 3, 1.33),
    ("torch.optim.SGD", 1.0, "two_bw", 1, 1.47),
])  # fmt: skip
def test_the_price_of_a_delay_is_the_measured_one(name, lam, schedule, delay, price):
    assert token_price(OptimizerSection(name=name, error_feedback=lam), schedule, delay) == pytest.approx(price)


def test_why_a_schedule_cannot_be_is_said_below_the_table(capsys, monkeypatch):
    monkeypatch.setattr(command, "SCHEDULES", ("two_bw", "paci"))
    said = plan(capsys, "--devices", "2", "--batch-tokens", "4096", "--model.tied-embeddings", "True", *SMALL)
    assert "paci cannot: its stages step at different times" in said


def test_no_schedule_sends_faster_than_a_link_can(capsys, tmp_path, all_schedules):
    """Where the link is all that counts, many messages in flight do not help."""
    path, tokens = tmp_path / "plan.json", 4096
    plan(
        capsys,
        "--devices",
        "2",
        "--batch-tokens",
        str(tokens),
        "--bandwidth-gbps",
        "1",
        "--json",
        str(path),
        *SMALL,
        *IN_FLOAT32,
    )
    for row in json.loads(path.read_text())["options"]:
        if row["schedule"] != "data parallel":
            bytes_sent = tokens * 32 * 4 * (2 if row["schedule"] in ("interleaved_1f1b", "zero_bubble_v") else 1)
            assert row["tokens_per_second"] <= tokens / (bytes_sent / (1e9 / 8)) * (1 + 1e-9)


def test_a_model_too_large_for_one_device_gets_a_pipeline_and_a_command_that_the_trainer_takes(
    capsys, tmp_path, monkeypatch, all_schedules
):
    """And the table is whole in 80 columns."""
    monkeypatch.setattr(command, "wide_console", lambda: Console(width=80))
    path, figure = tmp_path / "plan.json", tmp_path / "plan.svg"
    words = ["--memory", "0.0055", "--devices", "4", "--json", str(path), "--figure", str(figure), *DEEP]
    said = plan(capsys, *words, "--batch-tokens", "64", "--optimizer.error-feedback", "0.5")
    table = said.partition("schedule ")[2].partition("P x R:")[0].splitlines()
    assert len(table) == 1 + 11 + 1  # the head, eleven rows, a blank line
    assert max(map(len, table)) <= 80 and "…" not in said
    assert recommended(said) and any("too big" in row for row in table)
    tree = json.loads(path.read_text())
    rows = {row["schedule"]: row for row in tree["options"]}
    assert set(rows) == {"data parallel", "fsdp", *SCHEDULES}
    chosen = [row for row in rows.values() if row.get("recommended")]
    assert len(chosen) == 1
    assert not rows["data parallel"]["fits"]
    assert chosen[0]["fits"] and chosen[0]["runnable"]
    assert max(stage["most"] for stage in chosen[0]["memory"]) <= tree["memory_bytes"]
    assert chosen[0]["microbatches"] * chosen[0]["microbatch_size"] * chosen[0]["replicas"] == 8
    assert sum(chosen[0]["layers_per_stage"]) == 12
    assert tree["command"] in said
    assert figure.stat().st_size > 1000
    config = parse(Config, tree["command"].split()[2:], "slipstream train", "")
    validate(config)
    assert config.optimizer.error_feedback == 0.5
    assert config.pipeline.stages == chosen[0]["stages"]
    assert config.pipeline.layers_per_stage == tuple(chosen[0]["layers_per_stage"])


def test_what_no_number_of_devices_can_hold_is_said_so(capsys):
    said = plan(capsys, "--memory", "0.0004", "--devices", "2", "--batch-tokens", "64", *SMALL)
    assert "Nothing fits" in said
    assert "slipstream train" not in said


def test_recomputed_blocks_take_less_memory_and_more_time(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SCHEDULES", ("two_bw", "paci"))
    rows = []
    for every in ("0", "1"):
        path = tmp_path / f"{every}.json"
        words = ["--devices", "2", "--batch-tokens", "128", "--json", str(path), *SMALL]
        plan(capsys, *words, "--train.recompute-every", every)
        rows.append({row["schedule"]: row for row in json.loads(path.read_text())["options"]})
    kept, again = (row["two_bw"] for row in rows)
    assert kept["layers_per_stage"] == again["layers_per_stage"]
    assert again["memory"][0]["activations"] < 0.5 * kept["memory"][0]["activations"]
    assert again["step_seconds"] > kept["step_seconds"]
    assert "impossible" in rows[1]["paci"]


def test_more_devices_are_asked_for_where_they_help(capsys):
    said = plan(capsys, "--memory", "0.005", "--devices", "2", "--batch-tokens", "16", *DEEP)
    assert "It needs more devices" in said


def test_a_profile_is_measured_read_back_and_planned_with(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "REPEATS", 2)
    path = tmp_path / "profile.json"
    assert run(["profile", "--output", str(path), *SMALL]) == 0
    assert "embedding" in capsys.readouterr().out
    tree = json.loads(path.read_text())
    assert [row["kind"] for row in tree["rows"]] == ["embedding", "block", "head"]
    for row in tree["rows"]:
        assert row["forward"] > 0 and row["update"] > 0 and row["activations"] > 0
        assert row["backward_input"] + row["backward_weight"] > 0
    assert tree["rows"][0]["backward_input"] == 0
    deeper = [*SMALL, "--model.num-layers", "7"]
    assert "costs measured" in plan(capsys, "--devices", "2", "--batch-tokens", "64", "--profile", str(path), *deeper)
    wider = [*SMALL, "--model.dim", "64"]
    said = refusal(capsys, "plan", "--devices", "2", "--profile", str(path), *wider)
    assert "dim is 32 there and 64 here" in said
    chunked = [*SMALL, "--train.loss-chunk-tokens", "16"]
    said = refusal(capsys, "plan", "--devices", "2", "--profile", str(path), *chunked)
    assert "is of train.loss_chunk_tokens = 0, not of 16: run slipstream profile with these options" in said
    said = refusal(capsys, "plan", "--devices", "2", "--profile", str(path), *SMALL, "--train.compile")
    assert "is of train.compile = false, not of true: run slipstream profile with these options" in said


def test_what_fits_only_with_a_shared_optimizer_is_planned_with_one(capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--memory", "0.0079", "--devices", "4", "--batch-tokens", "64", "--train.compute-dtype", "bfloat16", *DEEP]
    said = plan(capsys, *words, "--json", str(path))
    tree = json.loads(path.read_text())
    assert "bfloat16 with masters in float32" in said
    assert not tree["sharded"] and tree["dtypes"]["compute"] == "bfloat16"
    whole = next(row for row in tree["options"] if row["schedule"] == "data parallel")
    assert whole["fits"] and whole["sharded"] and whole["replicas"] == 4
    config = parse(Config, tree["command"].split()[2:], "slipstream train", "")
    validate(config)
    (row,) = [row for row in tree["options"] if row.get("recommended")]
    assert config.optimizer.sharded == (row["sharded"] and row["replicas"] > 1)
    assert config.train.compute_dtype == "bfloat16" and not config.train.track_alignment


def test_the_causes_of_a_bubble_add_up_to_it():
    config = changed(settled(Config(), "cpu"), model__num_layers=5)
    model = model_of(config, 0)
    search = Search(
        config,
        model,
        estimate(config, model, find_device("h200")),
        Cluster(4, 1e12, 1e-6, 1e9),
        32,
        MemoryModel(config, model),
    )
    for schedule in ("two_bw", "one_f_one_b", "two_bw_double"):
        option = search.best(schedule)
        causes = idle_causes(search, option)
        assert sum(causes.values()) == pytest.approx(option.bubble)
        assert min(causes.values()) > -1e-9 and causes["links"] > 0 and causes["stages of unequal work"] > 0


def test_neighbours_within_a_node_have_its_links_and_replicas_share_those_between_nodes():
    inside, outside = 450.0, 50.0
    small, large = (Cluster(count, 1.0, 0.0, inside, 8, outside) for count in (8, 64))
    assert small.between_stages(7) == small.between_replicas(3) == inside
    assert [large.between_stages(count) for count in (2, 4, 8, 16, 3)] == [inside, inside, inside, outside, outside]
    assert [large.between_replicas(count) for count in (1, 2, 4, 8, 32)] == [400.0, 200.0, 100.0, 50.0, 50.0]


@forks
def test_a_slice_is_measured_while_its_neighbours_compute(monkeypatch):
    shares = []
    forked = multiprocessing.get_context("fork")  # a GPU wants clean processes; here they would only load torch
    monkeypatch.setattr(profiling.multiprocessing, "get_context", lambda method: forked)
    monkeypatch.setattr(profiling, "sliced", lambda share: shares.append(share) or nullcontext())
    config = changed(
        settled(Config()),
        model__dim=16,
        model__hidden_dim=16,
        model__sequence_length=8,
        pipeline__stages=2,
        model__num_heads=4,
    )
    found = profiling.measure_in_slices(config, model_of(config, 256), 12)
    assert shares == [12]
    assert found.device.endswith("12 % of it beside 1 busy neighbours")
    assert [row.kind for row in found.rows] == ["embedding", "block", "head"]
    broken = changed(config, optimizer__name="nobody's", pipeline__stages=1)
    with pytest.raises(RunFailure, match=r"the slice was not measured \(.*nobody's"):
        profiling.measure_in_slices(broken, model_of(config, 256), 12)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--share 12", "share = 12 is of a GPU: add --train.device cuda, or leave share out"),
        ("--share 12 --train.device cuda", "finds no CUDA device"),
    ],
)
def test_a_share_needs_a_gpu(capsys, monkeypatch, words, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sentence in refusal(capsys, "profile", *words.split(), *SMALL)


@pytest.mark.parametrize("share", [0, 51])
def test_slices_are_shares_of_one_gpu(capsys, monkeypatch, share):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = refusal(capsys, "profile", "--share", str(share), "--train.device", "cuda", "--pipeline.stages", "2", *SMALL)
    assert f"share = {share} is not possible for pipeline.stages = 2 slices of one GPU: use 1 to 50" in said


def test_a_profile_of_another_compute_dtype_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "REPEATS", 1)
    path, fine = tmp_path / "profile.json", ["--train.dtype", "float64"]
    mixed = [*fine, "--train.compute-dtype", "float32"]
    assert run(["profile", "--output", str(path), *SMALL, *mixed]) == 0
    assert "0.02 MiB a message" in capsys.readouterr().out  # 4 x 32 x 32 numbers of four bytes
    tree = json.loads(path.read_text())
    assert (tree["dtype"], tree["compute_dtype"]) == ("float64", "float32")
    words = ["plan", "--devices", "2", "--profile", str(path), *SMALL]
    assert "is of train.compute_dtype = 'float32', not of 'float64': run" in refusal(capsys, *words, *fine)
    assert "costs measured" in plan(capsys, *words[1:], *mixed, "--batch-tokens", "64")
    del tree["compute_dtype"]  # as profiles were before there was a choice
    path.write_text(json.dumps(tree))
    assert "is of train.compute_dtype = 'float64', not of 'float32': run" in refusal(capsys, *words, *mixed)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "devices is missing"),
        ("--devices -3", "devices = -3"),
        ("--devices 2 --memory 0", "memory = 0"),
        ("--devices 2 --latency-us -1", "latency_us = -1"),
        ("--devices 2 --efficiency 2", "efficiency = 2"),
        ("--devices 2 --device-kind b900", "device_kind = 'b900'"),
        ("--devices 2 --batch-tokens 100", "use 256"),
        ("--devices 2 --batch-tokens 1" + "0" * 40, "is more than anybody plans with: use at most 268435456"),
        ("--devices 2 --devices-per-node 0", "devices_per_node = 0"),
        ("--devices 2 --node-bandwidth-gbps 0", "node_bandwidth_gbps = 0"),
        ("--devices 2 --profile nowhere.json", "profile = 'nowhere.json'"),
        ("--devices 2 --json nowhere/plan.json", "json = 'nowhere/plan.json'"),
        ("--devices 2 --figure plan.bmp", "figure = 'plan.bmp'"),
        ("--devices 2 --model.preset 9t", "model.preset = '9t'"),
        ("--devices 2 --optimizer.name nosuch", "optimizer.name = 'nosuch'"),
        ("missing.toml --devices 2", "missing.toml"),
    ],
)
def test_mistakes_are_one_sentence_that_names_the_field(capsys, words, named):
    assert named in refusal(capsys, "plan", *words.split())


def test_the_presets_to_plan_with_have_the_parameters_in_their_names():
    assert preset("10b").num_parameters() == pytest.approx(10e9, rel=0.03)
    assert preset("70b").num_parameters() == pytest.approx(70e9, rel=0.01)


EXPERTS = "--model.num-experts 4 --model.experts-per-token 2 --model.expert-dim 16 --model.num-shared-experts 1"
MIXED = [*SMALL, *EXPERTS.split(), "--model.num-dense-layers", "1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> str:
    """The text of a profile."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "REPEATS", 1)
        assert run(["profile", "--output", str(path), *SMALL]) == 0
    return path.read_text()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("forward", "x", "forward = 'x' has the wrong type: write a number"),
        ("forward", float("nan"), "forward of embedding is nan"),
        ("update", -1.0, "update of embedding is -1.0"),
        ("parameters", [], "parameters = [] has the wrong type: write a whole number"),
    ],
)
def test_a_profile_with_costs_that_are_none_is_refused(capsys, tmp_path, measured, key, value, sentence):
    path, tree = tmp_path / "profile.json", json.loads(measured)
    tree["rows"][0][key] = value
    path.write_text(json.dumps(tree))
    said = refusal(capsys, "plan", "--devices", "2", "--profile", str(path), *SMALL)
    assert "is no profile (" in said and sentence in said


def test_a_profile_of_a_model_with_experts_has_both_kinds_of_blocks(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "REPEATS", 2)
    path = tmp_path / "profile.json"
    assert run(["profile", "--output", str(path), *MIXED]) == 0
    capsys.readouterr()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["kind"], row["num_layers"]) for row in rows] == [
        ("embedding", 1),
        ("dense_block", 1),
        ("block", 3),
        ("head", 1),
    ]
    assert rows[1]["parameters"] != rows[2]["parameters"]
    assert "costs measured" in plan(capsys, "--devices", "2", "--batch-tokens", "64", "--profile", str(path), *MIXED)
    said = refusal(capsys, "plan", "--devices", "2", "--profile", str(path), *SMALL)
    assert "is 1 there and 0 here" in said or "is 4 there and 0 here" in said


def test_a_model_with_experts_is_planned_with_all_its_parameters_in_memory(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SCHEDULES", ("two_bw",))
    path = tmp_path / "plan.json"
    said = plan(capsys, "--devices", "2", "--batch-tokens", "64", "--json", str(path), *MIXED, *IN_FLOAT32)
    config = parse(Config, MIXED, "slipstream train", "")
    total = model_of(config, 0).num_parameters()
    assert f"{total:,} parameters" in said
    row = next(row for row in json.loads(path.read_text())["options"] if row["schedule"] == "two_bw")
    tables = 4 * 2 * 32 * 4 * 4  # of four blocks: cosine and sine, 32 positions, 4 pairs, 4 bytes
    assert sum(stage["weights"] for stage in row["memory"]) == 3 * 4 * total + tables


def test_the_work_of_active_experts_and_the_update_of_all_of_them_are_estimated():
    model, device = preset("moe-10b"), find_device("h200")
    config = changed(Config(), model__preset="moe-10b", train__microbatch_size=1)
    costs = estimate(config, model, device, efficiency=1.0).layers
    tokens = model.sequence_length
    per_token = layer_costs(model, tokens)
    for cost, flops in list(zip(costs, per_token, strict=True))[1:]:
        assert cost.compute == pytest.approx(3 * tokens * flops / device.flops)
    dense, sparse = costs[1], costs[2]
    assert [cost.update for cost in costs[2:-1]] == [sparse.update] * 23
    # 64 experts of 3 matrices, 1024 x 2048, in five steps of Newton-Schulz; attention and the shared one are little.
    products = 5 * 64 * 3 * 2 * (2 * 1024**2 * 2048 + 1024**3) / device.flops
    moves = 12 * 4 * 64 * 3 * 1024 * 2048 / device.memory_bandwidth
    assert products + moves < sparse.update < 1.2 * (products + moves)
    assert dense.update < sparse.update / 3


def test_a_plan_says_how_much_of_the_devices_is_used_and_how_long_a_budget_takes(capsys, tmp_path, monkeypatch):
    """The time includes the price of the delay."""
    monkeypatch.setattr(command, "SCHEDULES", ("one_f_one_b",))
    path = tmp_path / "plan.json"
    words = ["--devices", "2", "--batch-tokens", "4096", "--json", str(path), *SMALL, *IN_FLOAT32]
    said = plan(capsys, *words, "--tokens", "1e15")
    (line,) = re.findall(r"^data parallel: (\d+)% MFU; 1e\+15 tokens take (.*)\.$", said, re.MULTILINE)
    row = next(row for row in json.loads(path.read_text())["options"] if row["schedule"] == "data parallel")
    days = 1e15 / row["tokens_per_second"] / 86400
    assert line[1] == f"{days:,.1f} days"
    model = model_of(parse(Config, SMALL, "slipstream train", ""), 0)
    flops = 3 * sum(layer_costs(model, model.sequence_length)) * row["tokens_per_second"]
    assert int(line[0]) == round(100 * flops / (2 * find_device("h200").flops))
    assert f"{20 * model.num_parameters():.3g} tokens (20 to a parameter) take" in plan(capsys, *words)
    monkeypatch.setattr(search.Option, "token_price", 2.0)
    said = plan(capsys, *words, "--tokens", "1e15")
    assert f"(2e+15 with the delay's price) take {2 * days:,.1f} days.\n" in said


@pytest.mark.parametrize("tokens", ["0", "-1", "inf"])
def test_a_budget_that_is_none_is_refused(capsys, tokens):
    said = refusal(capsys, "plan", "--devices", "2", "--tokens", tokens, *SMALL)
    assert f"tokens = {float(tokens)} is invalid: use a number above 0" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data.weights", "0.5", "0.5"], "data.weights has 2 weights for the 1 entries of data.sources"),
        (["--data.weights", "-1"], "data.weights has the weight -1.0: give a number above 0"),
        (["--data.sources", "builtin", "a.txt"], "'builtin' stands alone"),
    ],
)
def test_a_plan_refuses_sources_that_its_run_would_refuse(capsys, words, sentence):
    """Files may be elsewhere, but these mistakes show without them."""
    assert sentence in refusal(capsys, "plan", "--devices", "2", *SMALL, *words)


def test_a_preset_is_planned_with_the_vocabulary_of_the_shards_if_they_are_here(
    tmp_path, text_file, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    prepare([str(text_file)], "bytes", "web")
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text().replace('"vocab_size": 256', '"vocab_size": 60000'))
    config = changed(Config(), model__preset="tiny", data__sources=("web.train.*.bin",))
    assert model_of_run(config).vocab_size == 60000
    assert model_of_run(changed(config, model__vocab_size=300)).vocab_size == 300 and not capsys.readouterr().out
    assert model_of_run(changed(config, data__sources=("elsewhere.bin",))).vocab_size == 256
    assert "names 'elsewhere.bin', which does not exist" in capsys.readouterr().out
