"""LoRA in a pipeline follows the oracle, whatever the cut; its weights, memory and errors."""

from __future__ import annotations

import builtins
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Task, even_cut, largest_difference, run_pipeline, run_reference
from settings import changed
from torch import nn

from slipstream import AdamW, Evaluation, Group, muon_and_adamw
from slipstream.config.models import model_of
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.model.adapters import Lora, PartlyTrained, is_adapter, merge
from slipstream.model.decoder import next_token_loss
from slipstream.model.registry import Decoder
from slipstream.model.spec import ModelSpec
from slipstream.pipeline.weight_versions import WeightVersions, is_mixed, weight_layout

peft = pytest.importorskip("peft")
LENGTH = 12


def decoder(tied: bool = False, **fields: Any) -> Decoder:
    shape = {"vocab_size": 61, "sequence_length": LENGTH, "dim": 16, "num_layers": 3, "num_heads": 4}
    return Decoder(**shape, num_kv_heads=2, hidden_dim=24, tied_embeddings=tied, **fields)


def hugging_face(folder: Path, tied: bool = False) -> ModelSpec:
    transformers = pytest.importorskip("transformers")
    from slipstream.hf import read_model

    transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    ).save_pretrained(folder)
    return read_model(folder, LENGTH)


def data(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens = torch.randint(61, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def task_of(spec: ModelSpec) -> Task:
    layers = spec.layers().double()
    spec.initialise(layers, seed=0)
    return Task(layers, data, lambda logits, targets: next_token_loss(logits, targets) / targets.numel())


def groups_of(optimizer: str, clip_norm: float | None) -> list[Group]:
    shared: dict[str, Any] = {"error_feedback": 1.0, "clip_norm": clip_norm, "weight_decay": 0.1}
    if optimizer == "muon":
        return muon_and_adamw(muon_lr=0.02, adamw_lr=0.01, muon_ns_dtype=torch.float64, **shared)
    return [Group("all", partial(AdamW, lr=0.01), **shared)]


@pytest.mark.parametrize(
    ("kind", "stages", "optimizer", "tied"),  # every pair of properties occurs
    [
        ("decoder", 2, "muon", True),
        ("decoder", 3, "adamw", False),
        ("decoder", 3, "muon", True),
        ("hf", 2, "adamw", True),
        ("hf", 2, "muon", False),
        ("hf", 3, "muon", True),
    ],
)
def test_two_bw_with_lora_follows_the_oracle(kind, stages, optimizer, tied, tmp_path):
    base = decoder(tied) if kind == "decoder" else hugging_face(tmp_path, tied)
    task = task_of(PartlyTrained(base, Lora(rank=3, alpha=6.0)))
    # Models of transformers compute their norms in float32, where a last bit of the sum for clipping would show.
    groups = groups_of(optimizer, 0.05 if kind == "decoder" else None)
    shared = {"num_microbatches": 4, "num_steps": 6, "layers_per_stage": even_cut(task, stages)}
    expected, losses = run_reference(task, groups, delays=[1] * stages, **shared)
    evaluation = Evaluation(lambda microbatch: data(10**6, microbatch), 2, 5)
    outcome = run_pipeline(task, stages, groups, evaluation=evaluation, **shared)
    assert largest_difference(outcome.weights, expected) <= 1e-12
    assert all(map(is_adapter, expected)) and len(expected) == 2 * 7 * 3
    assert [report.loss for report in outcome.reports[0]] == pytest.approx(losses, rel=1e-12)
    prompt, _ = run_reference(task, groups, delays=[0] * stages, **shared)  # a wrong version would show
    assert largest_difference(prompt, expected) > 1e-3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_and_recomputed_adapters_follow_it_too():
    task, groups = task_of(PartlyTrained(decoder(), Lora(3, 6.0, ("query", "down")))), groups_of("muon", 0.05)
    shared = {"num_microbatches": 3, "num_steps": 4}
    expected, _ = run_reference(task, groups, delays=[1], **shared)
    for options in ({"compile": "aot_eager"}, {"recompute": ["block0", "block2"]}):
        assert largest_difference(run_pipeline(task, 2, groups, **shared, **options).weights, expected) <= 1e-12


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_two_versions_hold_the_base_once(dtype):
    """One copy of the base in the dtype of the computation; two versions and a master of the adapters."""
    module = task_of(PartlyTrained(decoder(), Lora(3, 6.0))).model
    count = lambda kind: sum(p.numel() for name, p in module.named_parameters() if is_adapter(name) == kind)  # noqa: E731
    base, adapters = count(False), count(True)
    layout = weight_layout(2, 1, corrects=True, is_mixed=is_mixed(module, dtype))
    versions = WeightVersions(module, layout, dtype=dtype)
    versions.newest = 1
    modules = [versions.module(0), versions.module(1)]
    tensors = [*versions.masters.values(), *(p for each in modules for p in each.parameters())]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    size = 8 if dtype is None else 2
    assert held == base * size + 2 * adapters * size + adapters * 8
    assert base > 3 * adapters


def test_every_cut_starts_with_the_same_weights_and_as_the_base():
    spec = PartlyTrained(decoder(), Lora(3, 6.0))
    whole, part, base = spec.layers(), spec.layers()[2:], spec.base.layers()
    for layers, model in ((whole, spec), (part, spec), (base, spec.base)):
        model.initialise(layers, seed=5)
    known = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, known[name]), name
    first = known["block0.attention.query.lora_A.default.weight"]
    assert 0.2 < first.abs().max() <= 16**-0.5 and not torch.equal(
        first, known["block1.attention.query.lora_A.default.weight"]
    )
    inputs, _ = data(0, 0)
    assert torch.equal(whole(inputs), base(inputs))


def test_merged_adapters_compute_the_same():
    layers = task_of(PartlyTrained(decoder(), Lora(3, 6.0))).model
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if is_adapter(name, "B"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    inputs, _ = data(0, 0)
    before = layers(inputs)
    merge(layers)
    assert {name for name, _ in layers.named_parameters()} == {
        name for name, _ in decoder().layers().named_parameters()
    }
    torch.testing.assert_close(layers(inputs), before, atol=1e-12, rtol=0)


def test_the_model_counts_what_it_is():
    base, spec = decoder(), PartlyTrained(decoder(), Lora(2, 4.0, ("query",)))
    added = 3 * 2 * (16 + 16)
    assert spec.num_parameters() == base.num_parameters() + added
    assert spec.num_frozen_parameters() == base.num_parameters() and base.num_frozen_parameters() == 0
    assert sum(spec.layer_flops()) == sum(base.layer_flops()) + 2 * added
    assert spec.flops_per_token() < base.flops_per_token()
    assert spec.resized(5).num_layers == 5 and spec.layer_names == base.layer_names
    some = PartlyTrained(base, freeze=("*norm.weight", "head.output.*"))
    with torch.device("meta"):
        layers = some.layers()
    frozen = {name for name, parameter in layers.named_parameters() if not parameter.requires_grad}
    assert "head.norm.weight" in frozen and "head.output.weight" in frozen and "embedding.weight" not in frozen


def test_a_tied_weight_is_frozen_by_any_of_its_names():
    spec = PartlyTrained(decoder(tied=True), freeze=("head.output.weight",))
    assert not spec.steps_tied_weights and spec.num_frozen_parameters() == 61 * 16
    assert PartlyTrained(decoder(tied=True), freeze=("head.norm.*",)).steps_tied_weights


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"adapter__rank": 2, "adapter__targets": ("q_proj",)}, r"adapter.targets = 'q_proj' is no linear projection"),
        ({"train__freeze": ("blok*",)}, r"train.freeze = 'blok\*' matches no parameter"),
        ({"train__freeze": ("*",)}, r"train.freeze = \['\*'\] leaves nothing to train: freeze less"),
        ({"adapter__rank": 2, "train__freeze": ("*lora_*",)}, "leaves nothing to train"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_sentence(fields, said, tiny: Config):
    with pytest.raises(ConfigError, match=said):
        model_of(changed(tiny, **fields), 0)


def test_a_missing_library_is_named(tiny: Config, monkeypatch):
    real = builtins.__import__

    def without_peft(name: str, *given: Any, **options: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return real(name, *given, **options)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(ConfigError, match=r"needs the library peft \(peft\): pip install 'slipstream\[adapters\]'"):
        model_of(changed(tiny, adapter__rank=2), 0)


def test_a_model_without_projections_has_no_place_for_adapters():
    class Flat(Decoder):
        def layers_and_loss(self, loss_chunk_tokens: int = 0) -> Any:
            layers, loss = super().layers_and_loss(loss_chunk_tokens)
            return nn.Sequential(layers[0], nn.Tanh(), layers[-1]), loss

    spec = PartlyTrained(Flat(**vars(decoder())), Lora(2, 4.0))
    with pytest.raises(ValueError, match="needs linear projections in blocks"):
        spec.layers()


def test_precision_of_the_base_is_that_of_the_computation():
    """The oracle rounds the base as the pipeline does."""
    task, groups = task_of(PartlyTrained(decoder(), Lora(3, 6.0))), groups_of("adamw", None)
    shared = {"num_microbatches": 2, "num_steps": 4, "dtype": torch.float32, "gradient_dtype": torch.float64}
    expected, _ = run_reference(task, groups, delays=[1], **shared)
    assert largest_difference(run_pipeline(task, 2, groups, **shared).weights, expected) <= 1e-5
