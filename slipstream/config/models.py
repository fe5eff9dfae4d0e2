"""Builds the model that a configuration describes."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Mapping
from typing import Any

from ..checkpoint import CheckpointError
from ..checkpoint.hugging_face import WeightFolder
from ..errors import ConfigError, first_of
from ..model.adapters import Lora, PartlyTrained
from ..model.hugging_face import fields_of, misfits
from ..model.presets import PRESETS, ModelConfig
from ..model.registry import MODELS, Decoder, preset
from ..model.spec import ModelSpec
from .files import expand_home, read_plain_file
from .imports import find
from .rules import trains_all
from .schema import AdapterSection, Config, ModelSection

MAX_INITIAL_LENGTH = 4096
"""Longest sequences of a model that starts from a folder, unless model.sequence_length is given: published models allow
more positions than most people train with."""


def model_of(config: Config, corpus_vocab_size: int) -> ModelSpec:
    """Returns the model that the configuration describes.

    corpus_vocab_size: number of token ids in the corpus. The model needs at least as many.
    """
    cls = find("model.name", config.model.name, MODELS)
    if not (isinstance(cls, type) and issubclass(cls, ModelSpec)):
        raise ConfigError(f"model.name = {config.model.name!r} is no ModelSpec: give the import path of one")
    try:
        chosen = _decoder(config, corpus_vocab_size) if cls is Decoder else _own(config, corpus_vocab_size, cls)
        if not trains_all(config):
            chosen = PartlyTrained(chosen, _lora(config.adapter), config.train.freeze)
        chosen.validate()
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if chosen.vocab_size < corpus_vocab_size:
        raise ConfigError(
            f"model.vocab_size = {chosen.vocab_size} is too small for a corpus of {corpus_vocab_size} token ids: "
            f"use at least {corpus_vocab_size}, or leave it out"
        )
    return chosen


def _lora(section: AdapterSection) -> Lora | None:
    if section.rank is None:
        return None
    return Lora(section.rank, 2.0 * section.rank if section.alpha is None else section.alpha, section.targets)


def _decoder(config: Config, corpus_vocab_size: int) -> ModelSpec:
    """Builds the decoder from the preset and the fields that the section changes, or from a folder of Hugging Face."""
    if config.model.initial and config.model.hf:
        raise ConfigError("model.initial and model.hf are two models: leave out one of them")
    if config.model.initial:
        return _initial(config)
    if config.model.hf:
        return _hugging_face(config)
    changes = {
        member.name: value
        for member in dataclasses.fields(ModelConfig)
        if (value := getattr(config.model, member.name, None)) is not None
    }
    changes.setdefault("vocab_size", max(PRESETS[config.model.preset].vocab_size, corpus_vocab_size))
    return preset(config.model.preset, **changes)


def _initial(config: Config) -> ModelSpec:
    """Builds the decoder of a folder of Hugging Face, and checks that the folder has its weights."""
    path = expand_home(config.model.initial)
    where = f"model.initial = {config.model.initial!r}"
    try:
        about = json.loads(read_plain_file(path / "config.json"))
        fields = fields_of(about)
    except OSError as error:
        raise ConfigError(
            f"{where} has no config.json that can be read ({error.strerror}): give a folder with one"
        ) from error
    except KeyError as error:
        raise ConfigError(f"{where} has a config.json without {error}: give the folder of a whole model") from error
    except ValueError as error:
        raise ConfigError(f"{where} cannot be trained ({error}): give another folder") from error
    fields["sequence_length"] = config.model.sequence_length or min(fields["sequence_length"], MAX_INITIAL_LENGTH)
    _check_unchanged(config, fields, where)
    model = Decoder(**fields, initial=str(path))
    model.validate()
    try:
        faults = misfits(WeightFolder(path).shapes, model.meta_layers(), model)
    except CheckpointError as error:
        raise ConfigError(f"{where} has no weights that can be read ({error}): give another folder") from error
    if faults:
        raise ConfigError(
            f"{where} does not fit its config.json ({first_of(faults)}): give the folder of a whole model"
        )
    return model


def _hugging_face(config: Config) -> ModelSpec:
    """Builds a model of transformers. Only the length of its sequences may be chosen."""
    from ..hf import read_model  # the library is large

    where = f"model.hf = {config.model.hf!r}"
    try:
        model = read_model(expand_home(config.model.hf), config.model.sequence_length)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be trained: {error}") from error
    if config.model.sequence_length is None:
        model = dataclasses.replace(model, sequence_length=min(model.sequence_length, MAX_INITIAL_LENGTH))
    _check_unchanged(config, model.facts(), where)
    return model


def _check_unchanged(config: Config, fields: Mapping[str, Any], where: str) -> None:
    """Raises a ConfigError if the configuration changes a field that a folder decides."""
    for name, value in fields.items():
        given = getattr(config.model, name, None)
        if given is not None and given != value:
            raise ConfigError(f"model.{name} = {given} is {value} in {where}: leave it out")


def _own(config: Config, corpus_vocab_size: int, cls: type[ModelSpec]) -> ModelSpec:
    """Builds a user's own model from model.arguments and the other fields of the section that are set."""
    section, fields = config.model, {member.name: member for member in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given: dict[str, Any] = dict(section.arguments)
    for member in dataclasses.fields(ModelSection):
        value = getattr(section, member.name)
        if member.name in ("name", "arguments", "preset", "initial", "hf") or value is None:
            continue
        if member.name not in fields:
            raise ConfigError(f"model.{member.name} = {value} is no field of {section.name}: leave it out")
        given[member.name] = value
    if unknown := given.keys() - fields.keys():
        raise ConfigError(
            f"model.arguments.{min(unknown)} is no field of {section.name}: its fields are {', '.join(fields)}"
        )
    if corpus_vocab_size:
        given.setdefault("vocab_size", corpus_vocab_size)
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # of what is imported for type checkers only
        hints = {name: member.type for name, member in fields.items()}
    for name, value in given.items():
        if _is_whole(hints[name]) and not isinstance(value, str):
            if not float(value).is_integer():
                raise ConfigError(f"model.arguments.{name} = {value} is an int of {section.name}: write a whole number")
            given[name] = int(value)
    return cls(**given)


def _is_whole(hint: Any) -> bool:
    """Returns whether a field of this type takes whole numbers, and no fractions."""
    kinds = typing.get_args(hint) or (hint,)  # the members of a union
    return (int in kinds or "int" in kinds) and float not in kinds


def with_model(config: Config, model: ModelSpec) -> Config:
    """Returns the configuration with all fields of the model filled in, so that none depends on the preset, the corpus
    or the working directory."""
    values = model.facts()
    names = {member.name for member in dataclasses.fields(ModelSection)} & values.keys()
    section = dataclasses.replace(config.model, **{name: values[name] for name in names})
    initial, hf = (path and os.path.abspath(expand_home(path)) for path in (section.initial, section.hf))
    return dataclasses.replace(config, model=dataclasses.replace(section, initial=initial, hf=hf))


def recomputed_layers(config: Config, model: ModelSpec) -> tuple[str, ...]:
    """Returns the names of the layers to recompute: every n-th block from the first, regardless of its stage."""
    every, blocks = config.train.recompute_every, model.layer_names[1:-1]
    return tuple(blocks[::every]) if every else ()
