"""Translates between the decoder and the formats of Hugging Face: config.json, and the names of the tensors.

    config = config_json(model, "float32", None)         # what transformers and vLLM read
    model = Decoder(**fields_of(config))                 # the same decoder again
    source_of("block0.attention.query.weight", model)    # its name there is "model.layers.0.self_attn.q_proj.weight"

A dense decoder is a `LlamaForCausalLM`; with qkv_bias it is a Qwen2 model and with qk_norm a Qwen3 model. With experts
it is a `Glm4MoeForCausalLM`, which computes the same router. All of them pair the rotary dimensions as we do, so no
tensor is permuted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.hugging_face import WeightFolder
from .presets import ModelConfig, saved_name

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
"""Architectures that the decoder can read, by model_type."""
DEFAULT_ROPE_BASE = 10000.0
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

OURS = (
    (r"embedding\.weight", "model.embed_tokens.weight"),
    (r"block(\d+)\.attention_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"block(\d+)\.attention\.query\.(\w+)", r"model.layers.\1.self_attn.q_proj.\2"),
    (r"block(\d+)\.attention\.key\.(\w+)", r"model.layers.\1.self_attn.k_proj.\2"),
    (r"block(\d+)\.attention\.value\.(\w+)", r"model.layers.\1.self_attn.v_proj.\2"),
    (r"block(\d+)\.attention\.output\.weight", r"model.layers.\1.self_attn.o_proj.weight"),
    (r"block(\d+)\.attention\.query_norm\.weight", r"model.layers.\1.self_attn.q_norm.weight"),
    (r"block(\d+)\.attention\.key_norm\.weight", r"model.layers.\1.self_attn.k_norm.weight"),
    (r"block(\d+)\.mlp_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"block(\d+)\.mlp\.(gate|up|down)\.weight", r"model.layers.\1.mlp.\2_proj.weight"),
    (r"block(\d+)\.mlp\.router\.weight", r"model.layers.\1.mlp.gate.weight"),
    (r"block(\d+)\.mlp\.router\.bias", r"model.layers.\1.mlp.gate.e_score_correction_bias"),
    (r"block(\d+)\.mlp\.experts\.(gate|up|down)", r"model.layers.\1.mlp.experts.{expert}.\2_proj.weight"),
    (r"block(\d+)\.mlp\.shared\.(gate|up|down)\.weight", r"model.layers.\1.mlp.shared_experts.\2_proj.weight"),
    (r"head\.norm\.weight", "model.norm.weight"),
    (r"head\.output\.weight", "lm_head.weight"),
)
"""Patterns of our names, and theirs. A stack of experts is one tensor for each expert there."""


@dataclass(frozen=True)
class Source:
    """Where a parameter is in a folder of Hugging Face."""

    names: tuple[str, ...]
    """Name of the tensor, or of one tensor for each expert, which are stacked."""
    is_stacked: bool = False


def source_of(name: str, config: ModelConfig) -> Source:
    """Returns where a parameter of the decoder is."""
    name = saved_name(name, config.tied_embeddings)
    for pattern, their_name in OURS:
        if match := re.fullmatch(pattern, name):
            found = match.expand(their_name)
            if "{expert}" in found:
                return Source(tuple(found.format(expert=i) for i in range(config.num_experts)), is_stacked=True)
            return Source((found,))
    raise ValueError(f"{name} has no name in the formats of Hugging Face")


def config_json(config: ModelConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """Returns the content of config.json, for transformers 4 and 5. Raises ValueError for a decoder that no
    architecture there computes."""
    kind = "glm4_moe" if config.num_experts else "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    if config.qk_norm and config.qkv_bias:
        raise ValueError("model.qk_norm and model.qkv_bias together are in no architecture of transformers: export one")
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {"rope_type": "llama3"} | dict(zip(ROPE_SCALING, config.rope_scaling, strict=True))
        rope[ROPE_SCALING[-1]] = int(rope[ROPE_SCALING[-1]])
    found: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.sequence_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_parameters": rope | {"rope_theta": config.rope_base},
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.qkv_bias and kind != "qwen2",
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.rope_scaling is not None:
        found["rope_scaling"] = rope
    if kind == "llama":
        found["mlp_bias"] = False
    if kind == "glm4_moe":
        found |= {
            "moe_intermediate_size": config.expert_dim,
            "n_routed_experts": config.num_experts,
            "n_shared_experts": config.num_shared_experts,
            "num_experts_per_tok": config.experts_per_token,
            "first_k_dense_replace": config.num_dense_layers,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
            "use_qk_norm": config.qk_norm,
        }
        found["rope_parameters"]["partial_rotary_factor"] = 1.0
    return found


def pretrained_with(found: Mapping[str, Any]) -> str | None:
    """Returns the optimizer that made the weights, if config.json says so. Those that slipstream writes do."""
    optimizer = (found.get("slipstream") or {}).get("optimizer") if isinstance(found, Mapping) else None
    return None if optimizer is None else str(optimizer)


def fields_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the decoder that a config.json describes. Raises ValueError with what the decoder cannot
    compute."""
    if not isinstance(found, Mapping):
        raise KeyError("model_type")
    kind = found.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"its model_type is {kind!r}, and only {', '.join(ARCHITECTURES)} can be read")
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    refused = list(_not_computed(found, kind, rope))
    if refused:
        raise ValueError(f"it has {', '.join(refused)}, which the decoder cannot compute")
    heads, dim = found["num_attention_heads"], found["hidden_size"]
    fields: dict[str, Any] = {
        "vocab_size": found["vocab_size"],
        "sequence_length": found["max_position_embeddings"],
        "dim": dim,
        "num_layers": found["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": found.get("num_key_value_heads") or heads,
        "hidden_dim": found["intermediate_size"],
        "rope_base": float(rope.get("rope_theta") or found.get("rope_theta") or DEFAULT_ROPE_BASE),
        "norm_eps": float(found.get("rms_norm_eps", 1e-6)),
        "tied_embeddings": bool(found.get("tie_word_embeddings", False)),
        "qk_norm": kind == "qwen3" or bool(found.get("use_qk_norm", False)),
        "qkv_bias": kind == "qwen2",
    }
    head_dim = found.get("head_dim") or dim // heads
    fields["head_dim"] = None if head_dim * heads == dim else head_dim
    if _rope_type(rope) == "llama3":
        fields["rope_scaling"] = tuple(float(rope[name]) for name in ROPE_SCALING)
    if kind == "glm4_moe":
        fields |= {
            "num_experts": found["n_routed_experts"],
            "experts_per_token": found["num_experts_per_tok"],
            "expert_dim": found["moe_intermediate_size"],
            "num_shared_experts": found.get("n_shared_experts") or 0,
            "num_dense_layers": found.get("first_k_dense_replace", 0),
        }
    return fields


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _not_computed(found: Mapping[str, Any], kind: str, rope: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings that change the arithmetic of a model in a way that the decoder does not have."""
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "attention_bias": (False,) if kind != "qwen2" else (False, True),
        "pretraining_tp": (1,),
    }
    if kind == "glm4_moe":
        wanted |= {
            "n_group": (1,),
            "topk_group": (1,),
            "norm_topk_prob": (True,),
            "routed_scaling_factor": (1,),
            "num_nextn_predict_layers": (0,),
        }
        if (share := found.get("partial_rotary_factor", rope.get("partial_rotary_factor", 0.5))) != 1:
            yield f"partial_rotary_factor = {share}"
    for name, values in wanted.items():
        if found.get(name) not in (None, *values):
            yield f"{name} = {found[name]!r}"
    if (rope_type := _rope_type(rope)) not in ("default", "llama3"):
        yield f"rope_type = {rope_type!r}"
    window = found.get("sliding_window") if found.get("use_sliding_window", kind == "mistral") else None
    if window is not None and window < found.get("max_position_embeddings", 0):
        yield f"sliding_window = {window}"
    if any(layer != "full_attention" for layer in found.get("layer_types") or ()):
        yield "layers with a sliding window"


# ---- weights


def misfits(shapes: Mapping[str, tuple[int, ...]], model: nn.Module, config: ModelConfig) -> list[str]:
    """Returns what is wrong with the tensors of a folder, one text for each. shapes: those of the folder."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        source = source_of(name, config)
        shape = tuple(parameter.shape[1:] if source.is_stacked else parameter.shape)
        expected |= dict.fromkeys(source.names, shape)
    faults = [f"{name} is missing" for name in expected if name not in shapes]
    faults += [f"{name} is superfluous" for name in shapes if name not in expected and not _may_be_left(name, config)]
    faults += [
        f"{name} is {list(shapes[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    return faults


def _may_be_left(name: str, config: ModelConfig) -> bool:
    """Returns whether a tensor says nothing new: the tied head, and rotary tables, which older versions saved."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


@torch.no_grad()
def read_weights(model: nn.Module, config: ModelConfig, folder: WeightFolder) -> None:
    """Reads the parameters of the decoder, or of any slice of it, one tensor at a time."""
    for name, parameter in model.named_parameters():
        source = source_of(name, config)
        targets = parameter.unbind() if source.is_stacked else [parameter]
        for target, their_name in zip(targets, source.names, strict=True):
            target.copy_(folder.read(their_name))
