"""A run from a configuration: what it learns, what it leaves behind, and that it does so again."""

import json
import math
import tomllib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import changed
from torch import nn

import slipstream.pipeline.pipeline
from slipstream.config.defaults import settled
from slipstream.config.models import with_model
from slipstream.config.optimizers import parameter_groups
from slipstream.config.schema import Config, ModelSection
from slipstream.config.toml import load_toml
from slipstream.errors import ConfigError
from slipstream.model.decoder import decoder
from slipstream.observe.plots import draw_losses
from slipstream.tools.plan.live import LiveBytes
from slipstream.train.build import build_components
from slipstream.train.process import make_pipeline
from slipstream.train.trainer import train
from slipstream.transport.base import Transport
from slipstream.transport.launch import launch


def summary_of(config: Config) -> dict[str, Any]:
    train(config)
    return json.loads(Path(config.run.folder, config.run.name, "summary.json").read_text())


def checksum(config: Config, name: str, **fields: Any) -> str:
    return summary_of(changed(config, run__name=name, **fields))["parameter_checksum"]


@pytest.fixture
def finished(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Path]:
    """Two stages as processes, twelve steps, and a picture."""
    monkeypatch.setattr("slipstream.observe.summary.draw_losses", draw_losses)
    config = changed(tiny, pipeline__transport="process", train__steps=12, evaluation__every_steps=5)
    train(config)
    return config, Path(config.run.folder, config.run.name)


# ---- what it leaves behind


def test_a_rate_that_nobody_uses_is_said_so(tiny, capsys):
    train(changed(tiny, optimizer__name="adamw", optimizer__adamw_learning_rate=0.003))
    assert "optimizer.adamw_learning_rate = 0.003 is not used: adamw takes all parameters" in capsys.readouterr().out


def test_a_run_leaves_everything_behind(finished):
    config, folder = finished
    assert {path.name for path in folder.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "trace.json",
        "timeline.svg",
        "loss.png",
        "checkpoints",
    }
    written = load_toml(folder / "config.toml")
    assert written == with_model(settled(config), build_components(config).model)
    open_fields = {name for name, value in asdict(written.model).items() if value is None}
    assert written.model.vocab_size == 256 and open_fields == {"head_dim", "rope_scaling"}  # None is a value of these
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("metrics.jsonl", "summary.json", "trace.json"):
        text = (folder / name).read_text()
        assert "NaN" not in text and "Infinity" not in text

    summary = json.loads((folder / "summary.json").read_text())
    model = build_components(config).model
    assert summary["schedule"] == "two_bw"
    assert (summary["stages"], summary["microbatches"], summary["steps"]) == (2, 4, 12)
    assert summary["tokens"] == 12 * 4 * 2 * 16
    assert summary["parameters"] == model.num_parameters()
    assert 0 < summary["val_loss"] < math.log(256) + 0.1
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"])
    assert len(summary["utilisation"]["per_stage"]) == 2
    for split, utilisation in zip(summary["time_split"], summary["utilisation"]["per_stage"], strict=True):
        assert sum(split.values()) == pytest.approx(1.0)
        computing = split["forward"] + split["backward"] + split["update"] + split["evaluation"]
        assert computing == pytest.approx(utilisation)
    assert 0 < summary["expected_utilisation"]["mean"] <= 1
    assert all(overhead > 0 for overhead in summary["executor_microseconds_per_action"])
    assert all(0 < share <= 1 for share in summary["utilisation"]["per_stage"])
    assert summary["utilisation"]["mean"] == pytest.approx(sum(summary["utilisation"]["per_stage"]) / 2)
    assert summary["delay"] == {"min": 1, "max": 1}
    assert summary["live_weight_versions"] == 2
    assert summary["microbatches_in_flight"] == [2, 1]
    assert all(2**20 < size < 2**36 for size in summary["peak_memory_bytes"])
    assert len(bytes.fromhex(summary["parameter_checksum"])) == 32

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in updates] == list(range(1, 13))
    assert [row["step"] for row in evaluations] == [5, 10, 12]
    assert evaluations[-1]["val_loss"] == summary["val_loss"]
    assert updates[0]["loss"] == summary["first_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert {row["delay"] for row in updates[1:]} == {1}
    for row in updates:
        assert set(row["learning_rates"]) == set(row["gradient_norms"]) == {"matrices", "rest"}
        assert len(row["utilisations"]) == len(row["stage_seconds"]) == 2
    assert sum(updates[-1]["stage_seconds"][0].values()) > 0
    assert updates[0]["update_cosines"] == {"matrices": None, "rest": None}
    assert all(-1 <= cosine <= 1 for cosine in updates[-1]["update_cosines"].values())
    assert updates[-1]["tokens"] == summary["tokens"]

    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    played = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in played) >= 0 and min(event["dur"] for event in played) >= 0
    for row in {(event["pid"], event["tid"]) for event in played}:
        own = [event for event in played if (event["pid"], event["tid"]) == row]
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in own)
        assert all(end <= start + 1 for (_, end), (start, _) in pairwise(spans)), "spans overlap"


def test_learning_rates_are_those_of_the_update(tiny):
    config = changed(tiny, optimizer__schedule="linear", optimizer__warmup_steps=2, optimizer__final_fraction=0.0)
    train(config)
    rows = map(json.loads, Path(config.run.folder, "tiny", "metrics.jsonl").read_text().splitlines())
    rates = [row["learning_rates"] for row in rows if "loss" in row]
    assert [rate["matrices"] / 0.02 for rate in rates] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert [rate["rest"] / 0.003 for rate in rates] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_one_step_without_a_steady_state_or_an_evaluation_is_a_run_too(tiny):
    summary = summary_of(changed(tiny, train__steps=1, evaluation__batches=0))
    assert summary["val_loss"] is None
    assert summary["delay"] == {"min": 0, "max": 0}
    assert summary["first_loss"] == summary["last_loss"]


def test_updates_that_are_skipped_are_rows_of_null(tiny):
    config = changed(tiny, train__non_finite="skip", optimizer__learning_rate=1e30, optimizer__adamw_learning_rate=1e30)
    summary = summary_of(config)
    assert summary["last_loss"] is None and summary["val_loss"] is None
    rows = map(json.loads, Path(config.run.folder, "tiny", "metrics.jsonl").read_text().splitlines())
    assert [row["skipped"] for row in rows if "loss" in row][-1] is True


def test_a_run_is_not_overwritten_unless_it_is_asked_for(tiny):
    train(tiny)
    folder = Path(tiny.run.folder, tiny.run.name)
    (folder / "of_before").touch()
    with pytest.raises(
        ConfigError, match=r"run\.name = 'tiny' has been used, .* exists: choose another, set checkpoint.resume "
    ):
        train(tiny)
    assert (folder / "of_before").exists()
    train(changed(tiny, run__overwrite=True))
    assert not (folder / "of_before").exists()
    assert tomllib.loads((folder / "config.toml").read_text())["run"]["overwrite"] is True


def test_what_is_no_run_is_never_overwritten(tiny, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.toml").touch()
    Path(tiny.run.folder).mkdir()
    Path(tiny.run.folder, "tiny").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is no run"):
        train(changed(tiny, run__overwrite=True))
    assert (tmp_path / "elsewhere" / "config.toml").exists()


# ---- that it does so again


def test_the_same_configuration_gives_the_same_weights_as_threads_and_as_processes(tiny, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # as many threads to a product as beside other stages
    first = checksum(tiny, "first")
    assert checksum(tiny, "again") == first
    assert checksum(tiny, "processes", pipeline__transport="process") == first
    assert checksum(tiny, "seed", train__seed=1) != first


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_checksum_does_not_depend_on_the_cut(tied, tiny):
    """AdamW without clipping is the same arithmetic on every parameter, wherever it lies. One stage adds up the two
    gradients of a tied weight in an order of its own, so there the weights are compared before they change."""
    config = changed(tiny, model__tied_embeddings=tied, optimizer__name="adamw", optimizer__clip_norm=0.0)
    if tied:
        config = changed(config, train__steps=1, optimizer__learning_rate=0.0)
    sums = {
        checksum(config, f"cut{sizes}", pipeline__stages=len(sizes), pipeline__layers_per_stage=sizes)
        for sizes in [(4,), (1, 3), (3, 1), (1, 2, 1)]
    }
    assert len(sums) == 1


def test_recomputed_blocks_change_no_bit_and_a_loss_in_chunks_only_rounding(tiny):
    first = summary_of(tiny)
    again = summary_of(changed(tiny, run__name="again", train__recompute_every=1))
    assert again["parameter_checksum"] == first["parameter_checksum"]
    chunks = summary_of(changed(tiny, run__name="chunks", train__loss_chunk_tokens=6))
    assert chunks["last_loss"] == pytest.approx(first["last_loss"], rel=1e-4)
    assert chunks["val_loss"] == pytest.approx(first["val_loss"], rel=1e-4)


def test_recomputed_blocks_weigh_more_in_the_cut(tiny):
    config = changed(tiny, model__num_layers=8, model__vocab_size=515)  # a head of 3.2 blocks
    assert build_components(config).layers_per_stage == [7, 3]
    assert build_components(changed(config, train__recompute_every=1)).layers_per_stage == [6, 4]


# ---- what it holds


class RealBytes(LiveBytes):
    """A model on the meta device has sizes, and takes no memory."""

    def add(self, tensor: torch.Tensor, counts: bool = True) -> None:
        if tensor.device.type != "meta":
            super().add(tensor, counts)


@pytest.mark.parametrize(("schedule", "copies"), [("one_f_one_b", 1), ("two_bw", 3)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_no_stage_ever_holds_more_than_its_own_layers(tied, schedule, copies, tiny):
    """While it is made: its copies of the weights, and beside them at most the tensors it is filling one from."""
    section = ModelSection(
        dim=32, num_layers=14, num_heads=2, num_kv_heads=1, hidden_dim=64, sequence_length=8, tied_embeddings=tied
    )
    config = changed(
        tiny,
        pipeline__stages=8,
        pipeline__microbatches=8,
        pipeline__layers_per_stage=(2,) * 8,
        pipeline__schedule=schedule,
    )
    config = replace(config, model=section)
    components = build_components(config)

    def worker(transport: Transport) -> tuple[int, int]:
        live = RealBytes()
        with live.watch():
            pipeline = make_pipeline(transport, config, components)
            kept = live.now
        del pipeline
        return kept, live.peak

    with torch.device("meta"):
        whole = decoder(components.model)
    num_bytes = 4 * components.model.num_parameters()
    for stage, (kept, peak) in enumerate(launch(worker, 8, threads=True, timeout_seconds=60.0)):
        own = [4 * p.numel() for p in whole[2 * stage : 2 * stage + 2].parameters()]
        tables = 4 * sum(buffer.numel() for buffer in whole[2 * stage : 2 * stage + 2].buffers())
        # Beside its weights what the update is accounted in, and its copy of a tied one until the other stage takes it.
        assert 0 <= kept - copies * sum(own) - tables <= 512 + tied * max(own)
        assert peak <= kept + 3 * max(own)
        assert peak < num_bytes / 2


class Asked(nn.Sequential):
    """In the place of the compiled stage, for which torch would start threads, and the next test forks."""

    def __init__(self, layers: OrderedDict[str, nn.Module], recomputed: Collection[str], backend: str) -> None:
        super().__init__(layers)
        self.asked = (sorted(recomputed), backend)


def test_the_configuration_decides_whether_stages_are_compiled(tiny, monkeypatch):
    monkeypatch.setattr(slipstream.pipeline.pipeline, "Compiled", Asked)

    def ask(**fields: Any) -> list[Any]:
        config = changed(tiny, **fields)
        components = build_components(config)

        def worker(transport: Transport) -> list[Any]:
            versions = make_pipeline(transport, config, components).versions
            return [getattr(module, "asked", None) for module in (versions.module(0), versions.master_module())]

        return [answer for stage in launch(worker, 2, threads=True, timeout_seconds=60.0) for answer in stage]

    assert ask() == [None] * 4
    assert ask(train__compile=True) == [([], "inductor")] * 4
    assert ask(train__compile=True, train__recompute_every=1) == [(["block0", "block1"], "inductor")] * 4


# ---- what it learns


def test_the_loss_falls(tiny):
    config = changed(tiny, train__steps=60, train__microbatch_size=4, evaluation__every_steps=0)
    summary = summary_of(config)
    assert summary["last_loss"] < summary["first_loss"] - 2
    assert summary["val_loss"] < summary["first_loss"] - 2


@pytest.mark.parametrize(
    ("fields", "delay"),
    [
        ({"pipeline__schedule": "gpipe"}, (0, 0)),
        ({"pipeline__schedule": "one_f_one_b"}, (0, 0)),
        ({"pipeline__schedule": "two_bw", "pipeline__depth": "double", "pipeline__microbatches": 5}, (1, 1)),
        ({"pipeline__schedule": "two_bw", "pipeline__sync_start_steps": 3, "train__steps": 9}, (1, 1)),
        ({"pipeline__schedule": "two_bw", "model__tied_embeddings": True}, (1, 1)),
        ({"pipeline__schedule": "pipedream", "train__steps": 9}, (0, 2)),
        ({"pipeline__schedule": "pipedream", "train__steps": 9, "optimizer__clip_norm": 0.0}, (0, 2)),
        ({"pipeline__schedule": "paci", "optimizer__error_feedback": 0.0, "train__steps": 9}, (0, 1)),
    ],
    ids=lambda value: "-".join(str(v) for v in value.values()) if isinstance(value, dict) else None,
)
def test_every_schedule_trains_with_its_delay(fields, delay, tiny):
    summary = summary_of(changed(tiny, pipeline__stages=3, **fields))
    assert summary["last_loss"] < summary["first_loss"]
    assert math.isfinite(summary["val_loss"])
    assert (summary["delay"]["min"], summary["delay"]["max"]) == delay


# ---- optimizers


@pytest.mark.parametrize("name", ["torch.optim.AdamW", "torch.optim.SGD", "pytorch_optimizer.Lion"])
def test_any_optimizer_trains_and_leaves_weight_decay_to_the_group(name, tiny):
    config = changed(tiny, optimizer__name=name, optimizer__learning_rate=0.001)
    (group,) = parameter_groups(config)
    made = group.optimizer([torch.nn.Parameter(torch.ones(2, 2))])
    assert made.param_groups[0]["weight_decay"] == 0
    assert group.weight_decay == 0.1
    summary = summary_of(config)
    assert summary["last_loss"] < summary["first_loss"]


@pytest.mark.parametrize(
    ("warmup", "decay", "first", "last"), [(None, None, 1.0, 0.5), (10, None, 0.1, 1.0), (None, 10, 1.0, 0.1)]
)
def test_what_wsd_is_not_told_fits_into_what_it_is(warmup, decay, first, last, tiny):
    config = changed(
        tiny,
        train__steps=10,
        optimizer__schedule="wsd",
        optimizer__warmup_steps=warmup,
        optimizer__decay_steps=decay,
        optimizer__final_fraction=0.0,
    )
    learning_rate = build_components(config).learning_rate
    assert [learning_rate(0), learning_rate(9)] == pytest.approx([first, last])


def test_every_field_that_a_run_writes_is_documented(tiny):
    train(tiny)
    folder = Path(tiny.run.folder, tiny.run.name)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "reference" / "files.md").read_text()
    metrics_page, summary_page = page.partition("## summary.json")[::2]
    written = {name for row in rows for name in row} | set(rows[0]["stage_seconds"][0])
    assert [name for name in sorted(written) if f"`{name}`" not in metrics_page] == []
    assert [name for name in sorted(summary) if f"`{name}`" not in summary_page] == []
