"""Writes a checkpoint of a run as a folder that transformers, vLLM and others load.

    export(find_source(Path("runs/NAME"), None, print), Path("exported"), "float32")
    export_adapter(find_source(Path("runs/NAME"), None, print), Path("adapter"), "float32")     # that peft loads

The weights are the masters of a committed checkpoint. They are read and written one at a time; where weights are
frozen, one layer at a time, with adapters merged. The folder appears only when it is complete: it is written under
another name first.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.hugging_face import SINGLE, write_weights
from ..checkpoint.tensors import Description
from ..errors import UsageError
from ..hf import HuggingFaceModel
from ..model.adapters import NAME, PartlyTrained, block_projections, is_adapter, merge, peft_config
from ..model.hugging_face import config_json, source_of
from ..model.registry import Decoder
from ..model.spec import ModelSpec
from .loading import MASTER, Source, load


def export(
    source: Source,
    folder: Path,
    dtype: str,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Exports a checkpoint. Returns the number of parameters. progress: called with the bytes written so far, and with
    all bytes."""
    checkpoint = source.checkpoint
    if checkpoint is None:
        raise UsageError(f"{source.where} is a folder of Hugging Face already: give a run")

    def master(name: str) -> Tensor:
        return checkpoint[MASTER + name]

    model = source.model.base if isinstance(source.model, PartlyTrained) else source.model
    is_whole = model is source.model
    texts = _tokenizer_files(source)
    if isinstance(model, Decoder):
        texts |= _config_files(source, model, dtype, checkpoint.step)
    with _folder(folder, overwrite) as partial:
        if isinstance(model, Decoder):
            weight = master if is_whole else _merged_layers(source)
            write_weights(partial, *_tensors(model, weight, getattr(torch, dtype)), progress=progress)
        else:
            _hugging_face(model).save(master if is_whole else _merged(source), partial, getattr(torch, dtype))
        for name, content in texts.items():
            text = content if isinstance(content, bytes) else (json.dumps(content, indent=2) + "\n").encode()
            (partial / name).write_bytes(text)
    return model.num_parameters()


def export_adapter(source: Source, folder: Path, dtype: str, overwrite: bool = False) -> None:
    """Exports the adapters of a checkpoint alone, under the names that the modules have in transformers."""
    model, where = source.model, source.where
    if source.checkpoint is None or not isinstance(model, PartlyTrained) or model.lora is None:
        raise UsageError(f"{where} has no adapters: train with adapter.rank, or leave out --adapter")
    if model.weight_folder is None:
        raise UsageError(f"{where} has adapters of weights that were drawn, not read: leave out --adapter")
    names = _module_names(model.base)
    sources, entries, targets = dict[str, str](), dict[str, Description](), set[str]()
    for saved, (_, shape) in source.checkpoint.names().items():
        if saved.startswith(MASTER) and is_adapter(saved):
            module, _, matrix = saved.removeprefix(MASTER).removesuffix(f".{NAME}.weight").rpartition(".")
            their_name = f"base_model.model.{names[module]}.{matrix}.weight"
            sources[their_name], entries[their_name] = saved, Description(getattr(torch, dtype), shape)
            targets.add(names[module])
    tensors = source.checkpoint
    short = {name.split(".")[-1] for name in targets}
    base = model.base
    has_experts = bool(base.num_experts if isinstance(base, Decoder) else _hugging_face(base).count_experts())
    if has_experts and (taken := short & {"gate_proj", "up_proj", "down_proj"}):
        raise UsageError(
            f"peft takes adapters of {min(taken)} for those of experts, which have none: leave out --adapter, or train "
            "with adapter.targets in attention only"
        )
    if not has_experts and {name for name in names.values() if name.split(".")[-1] in short} == targets:
        targets = short  # the usual form, where it means the same
    about = peft_config(
        model.lora, sorted(targets), base_model_name_or_path=os.path.abspath(model.weight_folder), task_type="CAUSAL_LM"
    )
    about.inference_mode = about.init_lora_weights = True
    with _folder(folder, overwrite, "adapter_config.json") as partial:
        write_weights(partial, entries, lambda name: tensors[sources[name]], max_shard_bytes=sys.maxsize)
        (partial / SINGLE).rename(partial / "adapter_model.safetensors")
        about.save_pretrained(partial)


@contextmanager
def _folder(folder: Path, overwrite: bool, mark: str = "config.json") -> Iterator[Path]:
    """Yields a folder to write into, which takes its place when it is complete. mark: a file by which a folder that may
    be replaced is recognised."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"folder = {str(folder)!r} is no folder: choose another")
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            raise UsageError(f"folder = {str(folder)!r} is not empty: choose another, or give --overwrite")
        if not (folder / mark).is_file():
            raise UsageError(f"folder = {str(folder)!r} has no {mark} and is no model: choose another")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        raise UsageError(f"folder = {str(folder)!r} cannot be written ({error.strerror}): choose another") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _merged(source: Source, layer: str | None = None) -> Callable[[str], Tensor]:
    """Returns a function that returns the weights of a layer, or of all, with adapters merged into them."""
    layers = load(source, torch.device("cpu"), torch.float32, layer)
    if isinstance(source.model, PartlyTrained) and source.model.lora is not None:
        merge(layers)
    return dict(layers.named_parameters()).__getitem__


def _merged_layers(source: Source) -> Callable[[str], Tensor]:
    """Returns the same for all layers, one of which is in memory at a time."""
    latest: dict[str, Callable[[str], Tensor]] = {}

    def weight(name: str) -> Tensor:
        layer = name.split(".")[0]
        if layer not in latest:
            latest.clear()
            latest[layer] = _merged(source, layer)
        return latest[layer](name)

    return weight


def _module_names(model: ModelSpec) -> dict[str, str]:
    """Returns the names that transformers has for the linear projections of the blocks."""
    ours = block_projections(model.meta_layers())
    if isinstance(model, Decoder):
        return {name: source_of(f"{name}.weight", model).names[0].removesuffix(".weight") for name in ours}
    return _hugging_face(model).module_names(ours)


def _hugging_face(model: ModelSpec) -> HuggingFaceModel:
    assert isinstance(model, HuggingFaceModel), "find_source returns no other models"
    return model


def _tensors(
    model: Decoder, weight: Callable[[str], Tensor], dtype: torch.dtype
) -> tuple[dict[str, Description], Callable[[str], Tensor]]:
    """Returns the tensors of the folder, and a function that reads one. A stack of experts is read once for all of its
    experts, which follow each other."""
    entries: dict[str, Description] = {}
    places: dict[str, tuple[str, int | None]] = {}
    for name, parameter in model.meta_layers().named_parameters():
        source, shape = source_of(name, model), tuple(parameter.shape)
        its_dtype = torch.float32 if name.endswith("router.bias") else dtype
        for index, their_name in enumerate(source.names):
            entries[their_name] = Description(its_dtype, shape[1:] if source.is_stacked else shape)
            places[their_name] = name, index if source.is_stacked else None
    latest: dict[str, Tensor] = {}

    def read(their_name: str) -> Tensor:
        name, index = places[their_name]
        if name not in latest:
            latest.clear()
            latest[name] = weight(name)
        return latest[name] if index is None else latest[name][index]

    return entries, read


def _config_files(source: Source, model: Decoder, dtype: str, step: int) -> dict[str, Any]:
    end = source.end_of_text_id
    try:
        config = config_json(model, dtype, end)
    except ValueError as error:
        raise UsageError(str(error)) from error
    config["slipstream"] = {"optimizer": source.optimizer, "step": step}
    ends = {} if end is None else {"bos_token_id": end, "eos_token_id": end}
    return {"config.json": config, "generation_config.json": {**ends, "do_sample": True, "temperature": 1.0}}


def _tokenizer_files(source: Source) -> dict[str, Any]:
    if source.tokenizer_json is None:
        return {}
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.model.sequence_length,
    }
    if source.end_of_text is not None:
        about |= {"bos_token": source.end_of_text, "eos_token": source.end_of_text}
    return {"tokenizer.json": source.tokenizer_json, "tokenizer_config.json": about}
