"""Cuts a causal language model of transformers into layers, so that a pipeline can train it.

    slipstream train --model.hf FOLDER_OR_CONFIG.json ...

    spec = read_model("config.json", sequence_length=1024)       # in a program of your own
    layers, loss = spec.layers_and_loss()

The cut follows the plan that transformers itself has for pipelines (`config.base_model_pp_plan`): the embedding, the
decoder layers, the norm. The head is the output projection. Rotary positions have no parameters, so every block keeps
its own copy of that module. Masks of sliding windows are built in the block.

A plan does not say everything that a model's forward does. So before anything is trained, a small model of the same
configuration is built both ways and their logits are compared. A model whose forward does more, such as one that caps
its logits, is refused.

The library transformers is needed (the extra `hf`). Auxiliary losses of routers are not computed.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from .model.decoder import Hidden, next_token_loss, tie
from .model.documents import attention_mask, document_starts
from .model.presets import layer_names, saved_name
from .model.spec import Loss, ModelSpec, generator

PROBE_VOCABULARY, PROBE_LENGTH, PROBE_LAYERS = 32, 24, 4
TOLERANCE = 1e-4
"""Largest difference of logits, as a share of the largest logit, up to which a cut counts as the same model."""
LOADING = threading.RLock()
"""Held while transformers builds or loads a model, because it patches global state meanwhile: stages may be threads."""
PLAN = ("embed_tokens", "layers", "norm")
"""Names in the plan of a model that can be cut."""


@dataclass(frozen=True)
class HuggingFaceModel(ModelSpec):
    """A causal language model of transformers."""

    vocab_size: int
    sequence_length: int
    dim: int
    num_layers: int
    config_json: str
    """The model's configuration, as transformers writes it."""
    tied_embeddings: bool = False
    folder: str = ""
    """Folder with the weights to start from. Empty means random weights."""
    document_separator: int | None = None
    """Token id with which a document begins, if documents are kept apart (model/documents.py)."""

    def layers_and_loss(self, loss_chunk_tokens: int = 0) -> tuple[nn.Sequential, Loss]:
        if loss_chunk_tokens:
            raise ValueError("train.loss_chunk_tokens is for the decoder, and model.hf is another: leave it out")
        return cut(_build(self.config()), self.document_separator), next_token_loss

    def separating(self, separator: int) -> Self:
        return replace(self, document_separator=separator)

    def config(self) -> Any:
        """Returns the configuration as an object of transformers."""
        return _config_of(json.loads(self.config_json))

    def resized(self, num_layers: int, num_dense_layers: int = 0) -> Self:
        tree = json.loads(self.config_json)
        if isinstance(kinds := tree.get("layer_types"), list):
            tree["layer_types"] = [kinds[i % len(kinds)] for i in range(num_layers)]
        return replace(self, num_layers=num_layers, config_json=json.dumps(tree | {"num_hidden_layers": num_layers}))

    @torch.no_grad()
    def initialise(self, layers: nn.Module, seed: int | None) -> None:
        """Sets buffers and vectors as transformers does. Matrices are drawn from N(0, initializer_range^2), by name."""
        tie(layers, self)
        probe = dict(_probe(self.config_json).named_children())
        num_blocks = len(probe) - 2
        config = self.config()
        for layer_name, layer in layers.named_children():
            index = layer_name.removeprefix("block")
            alike = probe[f"block{int(index) % num_blocks}" if index.isdigit() else layer_name]
            for name, buffer in layer.named_buffers():
                buffer.copy_(alike.get_buffer(name))
            for name, parameter in layer.named_parameters():
                if seed is None:
                    continue
                full_name = saved_name(f"{layer_name}.{name}", self.tied_embeddings)
                if parameter.ndim < 2:
                    parameter.copy_(alike.get_parameter(name))
                else:
                    draw = torch.randn(parameter.shape, generator=generator(seed, full_name), device="cpu")
                    parameter.copy_(draw.mul_(getattr(config, "initializer_range", 0.02)))
        if self.folder and seed is not None:
            self._read_weights(layers)

    def _read_weights(self, layers: nn.Module) -> None:
        """Reads the weights with transformers, which knows how each of its models is stored."""
        import transformers

        with LOADING:
            whole = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        weights = dict(cut(whole).named_parameters())
        for name, parameter in layers.named_parameters():
            source = "embedding.weight" if name == "head.output.weight" and name not in weights else name
            parameter.copy_(weights[source])

    def save(self, weight: Callable[[str], Tensor], folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes a folder that transformers loads. weight: returns a parameter by its name in the layers, as
        `Pipeline.weights` and checkpoints have it."""
        whole: Any = _build(self.config(), torch.device("cpu"))
        with torch.no_grad():
            for name, parameter in cut(whole).named_parameters():
                parameter.copy_(weight(name))
        whole.to(dtype).save_pretrained(folder)

    @property
    def weight_folder(self) -> Path | None:
        return Path(self.folder) if self.folder else None

    def module_names(self, ours: Collection[str]) -> dict[str, str]:
        """Returns the names that modules of the layers have in the model of transformers."""
        whole: Any = _build(self.config(), torch.device("meta"))
        theirs = {id(module): name for name, module in whole.named_modules()}
        return {name: theirs[id(module)] for name, module in cut(whole).named_modules() if name in ours}

    def count_experts(self) -> int:
        """Returns the number of experts of a block. 0 means that blocks are dense."""
        config = self.config()
        return next((n for name in EXPERTS if (n := getattr(config, name, None))), 0)

    def layer_flops(self) -> list[float]:
        """Returns two FLOPs for every weight that a token meets. Of the experts of a block, it meets some."""
        config, num_experts = self.config(), self.count_experts()
        share = getattr(config, "num_experts_per_tok", 1) / num_experts if num_experts else 1.0
        costs = []
        for name, layer in self.meta_layers().named_children():
            matrices = [(key, p.numel()) for key, p in layer.named_parameters() if p.ndim > 1]
            sizes = [size * (share if "experts." in key else 1.0) for key, size in matrices]
            costs.append(0.0 if name == "embedding" else 2.0 * sum(sizes))
        return costs


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names under which configurations have the number of experts of a block."""


def read_model(source: str | Path, sequence_length: int | None = None) -> HuggingFaceModel:
    """Reads the configuration of a model, and checks that its cut computes the same. Raises ValueError with one
    sentence if it cannot be trained.

    source: a config.json, or a folder that has one. If the folder has weights, the model starts from them.
    sequence_length: None means that of the configuration.
    """
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{str(file)!r} cannot be read ({error.strerror}): give a config.json or its folder"
        ) from error
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON ({error}): give a config.json of transformers") from error
    config = _config_of(tree)
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    rates = {name: value for name, value in tree.items() if "drop" in name and isinstance(value, (int, float))}
    if dropouts := [f"{name} = {value}" for name, value in rates.items() if value]:
        raise ValueError(f"{str(file)!r} has {', '.join(dropouts)}: set it to 0, because a pipeline repeats no draws")
    _check_cut(json.dumps(tree), str(file))
    _probe(json.dumps(tree))  # here and not in a stage: it changes torch's default dtype, which all threads share
    return HuggingFaceModel(
        vocab_size=config.vocab_size,
        sequence_length=sequence_length or config.max_position_embeddings,
        dim=config.hidden_size,
        num_layers=config.num_hidden_layers,
        config_json=json.dumps(tree),
        tied_embeddings=bool(config.tie_word_embeddings),
        folder=str(path) if has_weights else "",
    )


def _config_of(tree: Mapping[str, Any]) -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError("model.hf needs the library transformers: pip install 'slipstream[hf]'") from None
    values = dict(tree)
    try:
        return transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"model_type = {tree.get('model_type')!r} is unknown to transformers ({error})") from error


def _build(config: Any, device: torch.device | None = None) -> nn.Module:
    """Builds the model. device: None means the current one, such as meta."""
    import transformers

    # The grouped kernel knows neither float64 nor, on a CPU, much speed.
    experts = "grouped_mm" if torch.cuda.is_available() else "eager"
    try:
        with LOADING, device or torch.empty(0).device:
            return transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="sdpa", experts_implementation=experts
            )
    except ValueError as error:
        kind, reason = config.model_type, str(error).split(". ")[0]
        raise ValueError(f"model_type = {kind!r} cannot be built ({reason}): use another") from error


# ---- the cut


def cut(model: Any, document_separator: int | None = None) -> nn.Sequential:
    """Returns the layers of a causal language model: its embedding, its decoder layers, and norm and projection. They
    share the model's parameters."""
    base, config = model.base_model, model.config
    plan = list(getattr(config, "base_model_pp_plan", None) or [name for name in PLAN if hasattr(base, name)])
    if sorted(plan) != sorted(PLAN):
        name = type(model).__name__
        raise ValueError(f"a {name} consists of {', '.join(plan)}, and only {', '.join(PLAN)} can be cut")
    usual = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * len(base.layers)
    rotary = getattr(base, "rotary_emb", None)
    blocks = [Block(layer, deepcopy(rotary), kinds[i], config) for i, layer in enumerate(base.layers)]
    head = Head(base.norm, model.get_output_embeddings())
    if document_separator is not None:
        base.embed_tokens.register_forward_hook(
            lambda layer, inputs, output: (output, document_starts(inputs[0], document_separator))
        )
    return nn.Sequential(OrderedDict(zip(layer_names(len(blocks)), [base.embed_tokens, *blocks, head], strict=True)))


def join(layers: nn.Sequential) -> nn.Module:
    """Returns the model whose cut these layers are. It shares their parameters. Use it for what transformers does
    with a whole model, such as a cache of keys and values."""
    parts: list[Any] = list(layers)
    embedding, *blocks, head = parts
    first = blocks[0]
    model: Any = _build(first.config, torch.device("meta"))
    base = model.base_model
    base.embed_tokens, base.norm = embedding, head.norm
    base.layers = nn.ModuleList(block.layer for block in blocks)
    if first.rotary is not None:
        base.rotary_emb = first.rotary
    model.set_output_embeddings(head.output)
    return model.eval()


class Block(nn.Module):
    """A decoder layer, with the rotary positions that the model computes once for all layers."""

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, kind: str, config: Any) -> None:
        super().__init__()
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types has {kind!r}, and only full_attention and sliding_attention can be cut")
        self.layer, self.rotary, self.kind, self.config = layer, rotary, kind, config
        self.window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
        self._by_kind = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, starts = inputs if isinstance(inputs, tuple) else (inputs, None)
        length = hidden.shape[1]
        positions = torch.arange(length, device=hidden.device).unsqueeze(0)
        mask = self._mask(length, hidden.device)
        if starts is not None:
            positions = positions - starts
            mask = attention_mask(starts) if mask is None else attention_mask(starts) & mask
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
        if self.rotary is not None:
            kind = {"layer_type": self.kind} if self._by_kind else {}
            given["position_embeddings"] = self.rotary(hidden, positions, **kind)
        output = self.layer(hidden, **given)
        result = output[0] if isinstance(output, tuple) else output
        return result if starts is None else (result, starts)

    def _mask(self, length: int, device: torch.device) -> Tensor | None:
        """Returns the mask of a sliding window. Without a mask, attention is causal."""
        if self.window is None or self.window >= length:
            return None
        distance = torch.arange(length, device=device).unsqueeze(1) - torch.arange(length, device=device)
        return ((distance >= 0) & (distance < self.window))[None, None]


class Head(nn.Module):
    def __init__(self, norm: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.norm, self.output = norm, output

    def forward(self, inputs: Hidden) -> Tensor:
        return self.output(self.norm(inputs[0] if isinstance(inputs, tuple) else inputs))


# ---- the check


def _small(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same configuration with few layers and a small vocabulary."""
    num_layers = min(tree.get("num_hidden_layers", PROBE_LAYERS), PROBE_LAYERS)
    small = dict(tree) | {"num_hidden_layers": num_layers, "vocab_size": PROBE_VOCABULARY}
    if isinstance(tree.get("sliding_window"), int):
        small["sliding_window"] = min(tree["sliding_window"], PROBE_LENGTH // 3)
    if isinstance(kinds := tree.get("layer_types"), list):
        small["layer_types"] = kinds[:num_layers]
    return small | {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id") if name in tree}


@cache
def _probe(config_json: str) -> nn.Sequential:
    """Returns the layers of a small model of the same kind, initialised by transformers. It is in float64, so that
    constants are as exact as any dtype needs them."""
    state, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return cut(_build(_config_of(_small(json.loads(config_json))), torch.device("cpu")))
    finally:
        torch.set_default_dtype(dtype)
        torch.random.set_rng_state(state)


@torch.no_grad()
def _check_cut(config_json: str, where: str) -> None:
    """Raises ValueError unless the cut of a small model computes the logits of the model itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = _build(_config_of(_small(json.loads(config_json))), torch.device("cpu")).eval()
    ids = torch.arange(PROBE_LENGTH).unsqueeze(0) % PROBE_VOCABULARY
    try:
        ours, theirs = cut(model)(ids), model(ids, use_cache=False).logits
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(f"{where} is a model whose layers need more than hidden states ({error})") from error
    if (ours - theirs).abs().max() > TOLERANCE * theirs.abs().max():
        raise ValueError(f"{where} is a {type(model).__name__}, whose forward does more than its pipeline plan says")
