"""Models that transformers saves are read, and compute the same logits; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from settings import changed

from slipstream.config.models import model_of
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.model.hugging_face import config_json, fields_of
from slipstream.model.registry import Decoder, preset

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SMOL_ROPE = {"rope_type": "default", "rope_theta": 1e5}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
FAMILIES = {
    "Llama 2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "Llama 3.2": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "SmolLM2": ("LlamaConfig", {"rope_parameters": SMOL_ROPE, "tie_word_embeddings": True}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Qwen2.5": ("Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {"head_dim": 32, "rms_norm_eps": 1e-6}),
    "GLM": ("Glm4MoeConfig", EXPERTS),
}  # fmt: skip


def save(folder: Path, family: str) -> torch.nn.Module:
    """A model with random weights, biases and norms."""
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(SMALL | fields)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return model.eval()


def started_from(folder: Path, **fields) -> Decoder:
    model = model_of(changed(Config(), model__initial=str(folder), **fields), 0)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_computes_the_same(family, tmp_path):
    theirs = save(tmp_path, family)
    spec = started_from(tmp_path)
    ours = spec.layers()
    spec.initialise(ours, seed=0)
    ids = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_written_again(family, tmp_path):
    save(tmp_path, family)
    spec = started_from(tmp_path)
    kept = {name: value for name, value in config_json(spec, "float32", None).items() if value is not None}
    again = Decoder(**fields_of(kept), initial=spec.initial)
    assert again == spec


def test_published_models_are_cut_to_sequences_that_people_train_with(tmp_path):
    save(tmp_path, "Llama 2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    assert started_from(tmp_path).sequence_length == 4096
    assert started_from(tmp_path, model__sequence_length=8192).sequence_length == 8192


def spoil(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


SPOILT = {
    "missing": (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    "superfluous": (lambda t: t.update({"model.extra": torch.zeros(2)}), "model.extra is superfluous"),
    "misshapen": (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight is [3], not [64]"),
    "all three": (
        lambda t: (t.pop("lm_head.weight"), t.update({"a": torch.zeros(1), "model.norm.weight": torch.zeros(3)})),
        "lm_head.weight is missing; a is superfluous; model.norm.weight is [3], not [64]",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_tensors_that_do_not_fit_are_named(how, tmp_path):
    save(tmp_path, "Llama 2")
    change, sentence = SPOILT[how]
    spoil(tmp_path, change)
    with pytest.raises(ConfigError) as refused:
        started_from(tmp_path)
    assert sentence in str(refused.value) and "does not fit its config.json" in str(refused.value)


REFUSED = {
    "no folder": (None, {}, "has no config.json that can be read (No such file or directory)"),
    "another architecture": ("Llama 2", {"model_type": "gpt2"}, "its model_type is 'gpt2', and only llama"),
    "another activation": ("Llama 2", {"hidden_act": "gelu"}, "it has hidden_act = 'gelu', which the decoder"),
    "a window": ("Mistral", {"sliding_window": 64}, "it has sliding_window = 64, which the decoder"),
    "another rope": ("Llama 2", {"rope_parameters": {"rope_type": "yarn"}}, "it has rope_type = 'yarn'"),
    "half of it": ("GLM", {"partial_rotary_factor": 0.5}, "it has partial_rotary_factor = 0.5"),
    "no field": ("Llama 2", {"hidden_size": None}, "has a config.json without 'hidden_size'"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_folder_that_cannot_be_trained_is_refused(how, tmp_path):
    family, fields, sentence = REFUSED[how]
    folder = tmp_path / "model"
    if family is not None:
        save(folder, family)
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ConfigError) as refused:
        started_from(folder)
    assert sentence in str(refused.value)


def test_a_field_that_the_folder_decides_cannot_be_changed(tmp_path):
    save(tmp_path, "Llama 2")
    with pytest.raises(ConfigError, match=r"model\.dim = 32 is 64 in model\.initial"):
        started_from(tmp_path, model__dim=32)


def test_a_decoder_that_no_architecture_computes_is_not_written():
    with pytest.raises(ValueError, match=r"model\.qk_norm and model\.qkv_bias together"):
        config_json(preset("tiny", qk_norm=True, qkv_bias=True), "float32", None)
