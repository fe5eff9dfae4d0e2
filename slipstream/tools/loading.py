"""Loads a trained model into this process: from the checkpoint of a run, or from a folder of Hugging Face."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ..checkpoint import Checkpoint, CheckpointError
from ..checkpoint.reading import MASTER, open_checkpoint
from ..config.files import read_plain_file
from ..config.models import model_of
from ..config.rules import trains_all
from ..config.schema import Config, ModelSection
from ..config.toml import load_toml
from ..data.byte_tokenizer import BYTES, byte_tokenizer, byte_vocabulary
from ..data.text import ENDS_OF_TEXT, NO_END_OF_TEXT, end_of_folder, token_ids
from ..errors import ConfigError, UsageError
from ..model.hugging_face import fields_of
from ..model.presets import saved_name
from ..model.spec import ModelSpec
from ..train.resume import check_base


@dataclass(frozen=True)
class Source:
    """A model on disk."""

    path: Path
    model: ModelSpec
    optimizer: str | None
    """Optimizer that made the weights. None if unknown."""
    checkpoint: Checkpoint | None
    """Checkpoint with the weights. None means that they are in the folder that `model.initial` names."""
    tokenizer_json: bytes | None
    """Content of tokenizer.json. None if the model does not know its tokenizer."""
    end_of_text: str | None
    """Token that ends a document, as the tokenizer writes it."""
    end_of_text_id: int | None
    is_bytes: bool = False
    """Whether every byte is the token of its own number."""
    seed: int = 0
    """Seed of the weights at the start of the run. Those that are frozen still have these values."""

    @property
    def where(self) -> str:
        return str(self.path) if self.checkpoint is None else f"step {self.checkpoint.step}"


def find_source(path: Path, step: int | None, say: Callable[[str], None]) -> Source:
    """Finds a model. path: the folder of a run, or of Hugging Face. step: of which checkpoint of a run; None means the
    newest."""
    where = ""
    if (path / "config.toml").is_file():
        where = f"{path / 'config.toml'}: "
        config = load_toml(path / "config.toml")
        if trains_all(config):
            # It has all fields of the model, and the checkpoint has the weights: where the run started from may be
            # gone. Frozen weights are read from there.
            config = replace(config, model=replace(config.model, initial=""))
        try:
            checkpoint: Checkpoint | None = open_checkpoint(path, step, say)
        except CheckpointError as error:
            raise UsageError(str(error)) from error
    elif (path / "config.json").is_file():
        if step is not None:
            raise UsageError(f"{path} is a folder of Hugging Face and has no steps: leave out @{step}")
        config, checkpoint = Config(model=_section_of(path)), None
    else:
        raise UsageError(
            f"{str(path)!r} has neither a config.toml nor a config.json: give the folder of a run or model"
        )
    try:
        model = model_of(config, 0)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from error
    if checkpoint is not None:
        check_base(checkpoint, model)
    if config.model.name != "decoder":
        name = config.model.name
        raise UsageError(f"model.name = {name!r} is a model of your own: load its checkpoint in a program of your own")
    text, end, end_id = _tokenizer(path, config, model)
    is_bytes = text is not None and json.loads(text)["model"].get("vocab") == byte_vocabulary()
    optimizer = None if checkpoint is None else config.optimizer.name
    return Source(path, model, optimizer, checkpoint, text, end, end_id, is_bytes, config.train.seed)


def _section_of(folder: Path) -> ModelSection:
    """Returns the model of a folder of Hugging Face: the decoder where it computes the same, and otherwise the model of
    transformers."""
    try:
        fields_of(json.loads(read_plain_file(folder / "config.json")))
    except ValueError:
        if not any(folder.glob("*.safetensors")):
            raise UsageError(f"{str(folder)!r} has no weights in *.safetensors: give a folder with weights") from None
        return ModelSection(hf=str(folder))
    except (KeyError, OSError):
        pass  # whoever reads the folder says so
    return ModelSection(initial=str(folder))


def _tokenizer(path: Path, config: Config, model: ModelSpec) -> tuple[bytes | None, str | None, int | None]:
    """Returns the tokenizer.json, and the name and the id of the token that ends a document."""
    names = ENDS_OF_TEXT if config.data.end_of_text is None else (config.data.end_of_text,)
    if (path / "tokenizer.json").is_file():
        text = read_plain_file(path / "tokenizer.json")
        names = (name,) if (name := end_of_folder(path)) else names
    elif config.data.tokenizer == "bytes" and model.vocab_size == len(BYTES):
        text = (json.dumps(byte_tokenizer()) + "\n").encode()
        names = (BYTES[0],)
    else:
        return None, None, None
    try:
        ids = token_ids(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        place = path / "tokenizer.json"
        raise UsageError(f"{str(place)!r} is no tokenizer ({error!r}): repair it, or remove it") from error
    end = None if config.data.end_of_text == NO_END_OF_TEXT else next((name for name in names if name in ids), None)
    return text, end, None if end is None else ids[end]


def place(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Returns where and in which dtype to compute. device: "auto", "cpu" or "cuda". dtype: None means bfloat16 on a GPU
    and float32 on a CPU."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UsageError("device = 'cuda' finds no CUDA device here: use --device cpu")
    found = torch.device("cuda" if device != "cpu" and has_gpu else "cpu")
    return found, getattr(torch, dtype or ("bfloat16" if found.type == "cuda" else "float32"))


@torch.no_grad()
def load(source: Source, device: torch.device, dtype: torch.dtype, layer: str | None = None) -> nn.Sequential:
    """Returns the layers with their weights, read one tensor at a time. layer: the only one to return; None means
    all."""
    layers = source.model.meta_layers()
    if layer is not None:
        layers = nn.Sequential(OrderedDict([(layer, layers.get_submodule(layer))]))
    layers.to(dtype).to_empty(device=device)
    is_whole = source.checkpoint is not None and all(parameter.requires_grad for parameter in layers.parameters())
    source.model.initialise(layers, seed=None if is_whole else source.seed)
    if source.checkpoint is not None:
        for name, parameter in layers.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(source.checkpoint[MASTER + saved_name(name, source.model.tied_embeddings)])
    return layers.requires_grad_(False).eval()
