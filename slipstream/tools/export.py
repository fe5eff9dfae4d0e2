"""Writes a checkpoint of a run as a folder that transformers, vLLM and others load.

    export(find_source(Path("runs/NAME"), None, print), Path("exported"), "float32")

The weights are the masters of a committed checkpoint. They are read and written one at a time. The folder appears only
when it is complete: it is written under another name first.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint
from ..checkpoint.hugging_face import write_weights
from ..checkpoint.tensors import Description
from ..errors import UsageError
from ..model.hugging_face import config_json, source_of
from ..model.registry import Decoder
from ..model.spec import ModelSpec
from .loading import MASTER, Source


def export(
    source: Source,
    folder: Path,
    dtype: str,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Exports a checkpoint. progress: called with the bytes written so far, and with all bytes."""
    if source.checkpoint is None:
        raise UsageError(f"{source.where} is a folder of Hugging Face already: give a run")
    texts = _tokenizer_files(source)
    if isinstance(source.model, Decoder):
        try:
            texts["config.json"] = config_json(source.model, dtype, source.end_of_text_id)
        except ValueError as error:
            raise UsageError(str(error)) from error
        texts["config.json"]["slipstream"] = {"optimizer": source.optimizer, "step": source.checkpoint.step}
        texts["generation_config.json"] = _generation_config(source)
    check_target(folder, overwrite)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_weights(source.model, source.checkpoint, partial, getattr(torch, dtype), progress)
        for name, content in texts.items():
            text = content if isinstance(content, bytes) else (json.dumps(content, indent=2) + "\n").encode()
            (partial / name).write_bytes(text)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        raise UsageError(f"folder = {str(folder)!r} cannot be written ({error.strerror}): choose another") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(
    model: ModelSpec,
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> None:
    if isinstance(model, Decoder):
        entries, read = _tensors(checkpoint, model, dtype)
        total = sum(entry.nbytes for entry in entries.values())
        write_weights(folder, entries, read, progress=lambda done: progress(done, total))
        return
    from ..hf import HuggingFaceModel  # the library is large

    assert isinstance(model, HuggingFaceModel), "find_source returns no other models"
    model.save(lambda name: checkpoint.read([MASTER + name])[MASTER + name], folder, dtype)


def check_target(folder: Path, overwrite: bool) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"folder = {str(folder)!r} is no folder: choose another")
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            raise UsageError(f"folder = {str(folder)!r} is not empty: choose another, or give --overwrite")
        if not (folder / "config.json").is_file():
            raise UsageError(f"folder = {str(folder)!r} has no config.json and is no model: choose another")


def _tensors(
    checkpoint: Checkpoint, model: Decoder, dtype: torch.dtype
) -> tuple[dict[str, Description], Callable[[str], Tensor]]:
    """Returns the tensors of the folder, and a function that reads one. A stack of experts is read once for all of its
    experts, which follow each other."""
    entries: dict[str, Description] = {}
    places: dict[str, tuple[str, int | None]] = {}
    for full_name, (_, shape) in checkpoint.names().items():
        if not full_name.startswith(MASTER):
            continue
        source = source_of(full_name.removeprefix(MASTER), model)
        its_dtype = torch.float32 if full_name.endswith("router.bias") else dtype
        for index, their_name in enumerate(source.names):
            entries[their_name] = Description(its_dtype, shape[1:] if source.is_stacked else shape)
            places[their_name] = full_name, index if source.is_stacked else None
    latest: dict[str, Tensor] = {}

    def read(their_name: str) -> Tensor:
        name, index = places[their_name]
        if name not in latest:
            latest.clear()
            latest.update(checkpoint.read([name]))
        return latest[name] if index is None else latest[name][index]

    return entries, read


def _generation_config(source: Source) -> dict[str, Any]:
    ends = (
        {} if source.end_of_text_id is None else dict.fromkeys(("bos_token_id", "eos_token_id"), source.end_of_text_id)
    )
    return {**ends, "do_sample": True, "temperature": 1.0}


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
