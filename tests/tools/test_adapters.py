"""Runs with adapters or frozen weights: resumed, reshaped, exported merged and alone, and loaded by other libraries."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import folder_of, summary_of
from settings import changed

from slipstream.checkpoint import Store
from slipstream.cli.dispatch import run
from slipstream.config.schema import Config, ModelSection
from slipstream.errors import ConfigError, UsageError
from slipstream.model.adapters import is_adapter
from slipstream.tools.export import export, export_adapter
from slipstream.tools.generate import Sampling, generate
from slipstream.tools.loading import find_source, load
from slipstream.train.trainer import train

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
LORA: dict[str, Any] = {"adapter__rank": 2, "optimizer__name": "adamw", "optimizer__learning_rate": 0.02}
KINDS = {
    "dense": {},
    "tied": {"model__tied_embeddings": True},
    "qwen2": {"model__qkv_bias": True},
    "experts": {
        "model__num_experts": 4,
        "model__experts_per_token": 2,
        "model__expert_dim": 16,
        "model__num_shared_experts": 1,
        "model__num_dense_layers": 1,
    },
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def base(tiny: Config, tmp_path: Path, bases: Path) -> Any:
    """Makes the folder of a model to start from."""

    def made(kind: str = "dense") -> Path:
        if not (bases / kind).exists():
            config = changed(tiny, train__steps=2, evaluation__batches=0, run__name="base", **KINDS[kind])
            train(config)
            export(find_source(folder_of(config), None, print), bases / kind, "float32")
        return shutil.copytree(bases / kind, tmp_path / "base")

    return made


def started(tiny: Config, field: str, folder: Path, **fields: Any) -> Config:
    section = ModelSection(**{field: str(folder)}, sequence_length=16)
    return changed(replace(tiny, model=section), train__steps=4, **fields)


def kept(config: Config) -> dict[str, torch.Tensor]:
    checkpoint = Store(folder_of(config) / "checkpoints").newest(print)
    return {name: checkpoint.read([name])[name] for name in checkpoint.names()}


def ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


# PeftModel still asks transformers by the old name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(("kind", "field"), [*((kind, "initial") for kind in KINDS), ("dense", "hf"), ("tied", "hf")])
def test_both_exports_compute_what_the_run_does(kind, field, tiny, base, tmp_path):
    peft = pytest.importorskip("peft")
    targets = ("query", "value") if kind == "experts" else ()
    config = started(tiny, field, base(kind), run__name="lora", adapter__targets=targets, **LORA)
    train(config)
    source = find_source(folder_of(config), None, print)
    export(source, tmp_path / "merged", "float32")
    export_adapter(source, tmp_path / "adapter", "float32")
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    layers = load(source, CPU, torch.float32)
    with torch.no_grad():
        plain = before(ids()).logits
        adapted = peft.PeftModel.from_pretrained(before, str(tmp_path / "adapter")).eval()(ids()).logits
        ours = layers(ids())
        torch.testing.assert_close(merged.eval()(ids()).logits, ours, atol=1e-5, rtol=0)
        torch.testing.assert_close(adapted, ours, atol=1e-5, rtol=0)
        assert (plain - ours).abs().max() > 1e-3  # it has learned something
    greedy = list(generate(layers, ids()[0, :4].tolist(), Sampling(8, temperature=0), length=16))
    expected = merged.generate(ids()[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert greedy == expected[0, 4:].tolist()
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(tmp_path / "base") and about["r"] == 2 and about["lora_alpha"] == 4
    if kind != "experts":
        assert set(about["target_modules"]) == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def test_a_checkpoint_has_only_adapters_and_resumes_with_other_stages(tiny, base, tmp_path):
    pytest.importorskip("peft")
    folder = base()
    config = started(tiny, "initial", folder, **LORA, train__dtype="float64", optimizer__horizon_steps=8)
    whole = changed(config, train__steps=8, run__name="whole", pipeline__microbatches=4)
    parted = changed(config, run__name="parted", pipeline__microbatches=4)
    train(whole)
    train(parted)
    train(changed(parted, train__steps=8, pipeline__stages=3, checkpoint__resume=True))
    ours, expected = kept(parted), kept(whole)
    assert ours.keys() - {"products/2.0"} == expected.keys()
    for name in (name for name in expected if name.startswith(("master/", "working/"))):
        assert is_adapter(name)
        torch.testing.assert_close(ours[name], expected[name], atol=1e-12, rtol=1e-12)
    assert 3 * sum(t.nbytes for t in ours.values() if t.ndim) < 8 * summary_of(whole)["parameters"] * 5


@pytest.mark.parametrize("field", ["initial", "hf"])
def test_a_run_from_a_relative_path_is_loaded_from_any_folder(field, tiny, base, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    base()
    config = started(tiny, field, Path("base"), run__name="lora", evaluation__batches=0, **LORA)
    monkeypatch.chdir(tmp_path)
    train(config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    source = find_source(folder_of(config), None, print)
    export(source, tmp_path / "merged", "float32")
    export_adapter(source, tmp_path / "adapter", "float32")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(tmp_path / "base")
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=rf"lora/config.toml: model.{field} = '{tmp_path / 'base'}' .*: give a"):
        find_source(folder_of(config), None, print)
    train(changed(config, **{f"model__{field}": "../moved"}, train__steps=6, checkpoint__resume=True))
    assert find_source(folder_of(config), None, print).model.weight_folder == moved


def test_adapters_beside_experts_are_exported_merged_only(tiny, base, tmp_path):
    """peft would load them as adapters of the experts, whose projections have the same names."""
    pytest.importorskip("peft")
    config = started(tiny, "initial", base("experts"), run__name="lora", **LORA)
    train(config)
    source = find_source(folder_of(config), None, print)
    with pytest.raises(UsageError, match="peft takes adapters of down_proj for those of experts"):
        export_adapter(source, tmp_path / "adapter", "float32")
    export(source, tmp_path / "merged", "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids()).logits, load(source, CPU, torch.float32)(ids()), atol=1e-5, rtol=0)


def test_the_layout_may_change_while_it_runs(tiny, base, tmp_path):
    pytest.importorskip("peft")
    config = started(tiny, "initial", base(), **LORA, train__dtype="float64", pipeline__microbatches=4)
    train(changed(config, run__name="fixed"))
    train(changed(config, run__name="moved", pipeline__reshape=("2=3",)))
    fixed, moved = kept(changed(config, run__name="fixed")), kept(changed(config, run__name="moved"))
    for name in (name for name in fixed if name.startswith("master/")):
        torch.testing.assert_close(moved[name], fixed[name], atol=1e-12, rtol=1e-12)


def spoil(weights: Path) -> None:
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def test_what_does_not_fit_a_checkpoint_is_refused(tiny, base, tmp_path):
    pytest.importorskip("peft")
    folder = base()
    config = started(tiny, "initial", folder, **LORA, run__name="lora")
    train(config)
    resumed = changed(config, checkpoint__resume=True, train__steps=6)
    for fields, said in (
        ({"adapter__rank": 3}, "adapter.rank = 2, and this configuration has 3: make it what it was"),
        ({"adapter__alpha": 1.0}, "adapter.alpha = None, and this configuration has 1.0"),
        ({"adapter__rank": None}, "adapter.rank = 2, and this configuration has None"),
        ({"train__freeze": ("block0.*",)}, "train.freeze = "),
    ):
        with pytest.raises(ConfigError, match=said):
            train(changed(resumed, **fields))
    other = shutil.copytree(folder, tmp_path / "other")
    spoil(other / "model.safetensors")
    said = rf"model.initial = '{folder}', and this configuration has '{other}': make it what it was, or export the run"
    with pytest.raises(ConfigError, match=said):
        train(changed(resumed, model__initial=str(other)))
    with pytest.raises(ConfigError, match="and this configuration has '': make it what it was"):
        train(replace(resumed, model=tiny.model))
    spoil(folder / "model.safetensors")
    with pytest.raises(ConfigError, match="has other files than then: restore it"):
        train(resumed)
    with pytest.raises(ConfigError, match="has other files than then: restore it"):
        find_source(folder_of(config), None, print)


def test_frozen_weights_without_adapters_are_trained_around_resumed_and_exported(tiny, tmp_path):
    fields = {"train__freeze": ("embedding.*", "block1.mlp.*"), "train__dtype": "float64", "pipeline__microbatches": 4}
    config = changed(tiny, **fields, optimizer__horizon_steps=6)
    whole, parted = changed(config, run__name="whole"), changed(config, run__name="parted", train__steps=3)
    train(whole)
    train(parted)
    train(changed(parted, train__steps=6, pipeline__stages=3, checkpoint__resume=True))
    for name, tensor in kept(whole).items():
        assert "embedding" not in name and "block1.mlp." not in name
        if name.startswith("master/"):
            torch.testing.assert_close(kept(parted)[name], tensor, atol=1e-12, rtol=1e-12)
    source = find_source(folder_of(whole), None, print)
    export(source, tmp_path / "out", "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    layers = load(source, CPU, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids()).logits, layers(ids()), atol=1e-5, rtol=0)
    fresh = source.model.layers()
    source.model.initialise(fresh, seed=whole.train.seed)
    assert torch.equal(layers.embedding.weight, fresh.embedding.weight)
    assert torch.equal(layers.block1.mlp.up.weight, fresh.block1.mlp.up.weight)
    assert not torch.equal(layers.block0.mlp.up.weight, fresh.block0.mlp.up.weight)
    with pytest.raises(UsageError, match="has no adapters"):
        export_adapter(source, tmp_path / "adapter", "float32")
    assert not (tmp_path / "adapter").exists()


def test_adapters_of_weights_that_were_drawn_are_exported_merged_only(tiny, tmp_path):
    pytest.importorskip("peft")
    config = changed(tiny, **LORA, model__tied_embeddings=True)
    train(config)
    source = find_source(folder_of(config), None, print)
    with pytest.raises(UsageError, match="weights that were drawn, not read: leave out --adapter"):
        export_adapter(source, tmp_path / "adapter", "float32")
    export(source, tmp_path / "out", "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids()).logits, load(source, CPU, torch.float32)(ids()), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--train.freeze", "block0.*", "--devices", "2"], "freezes blocks differently"),
        (["profile", "--train.freeze", "embedding.*"], "unknown to slipstream profile"),
        (["train", "--adapter.rank", "0"], "adapter.rank = 0 is too small: use 1 or more"),
        (["train", "--adapter.alpha", "4"], "adapter.alpha = 4.0 belongs to adapters, and there are none"),
        (["train", "--adapter.rank", "2", "--adapter.alpha", "0"], "adapter.alpha = 0 is too small"),
        (["train", "--train.freeze", "*"], "leaves nothing to train: freeze less"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "--adapter.rank" in arguments:
        pytest.importorskip("peft")
    assert run(arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
