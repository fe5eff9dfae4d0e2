"""Composes the text that a run prints before it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from ..config.defaults import leaves_rest_to_adamw, num_gpus_wanted, precision_of, settled
from ..config.files import expand_home, read_plain_file
from ..config.rules import schedule_of
from ..config.schema import Config
from ..data.byte_tokenizer import byte_vocabulary
from ..model.hugging_face import pretrained_with
from ..observe.summary import lateness
from .build import Components

ORTHOGONALISING = ("muon", "normuon", "scion")
"""Optimizers whose updates are orthogonal matrices."""


def describe(config: Config, components: Components, folder: Path) -> str:
    """Returns three lines about the model, the method and the data."""
    replicas = f" in each of {config.pipeline.replicas} replicas" if config.pipeline.replicas > 1 else ""
    num_frozen = components.model.num_frozen_parameters()
    frozen = f" ({num_frozen:,} of them frozen)" if num_frozen else ""
    return (
        f"{components.model.num_parameters():,} parameters{frozen} on {config.pipeline.stages} stages of "
        f"{components.layers_per_stage} layers{replicas}: an embedding, {components.model.num_layers} blocks, a "
        f"head; writing {folder}\n{_method(config)}\n{_reading(config, components)}"
    )


def notes(config: Config) -> Iterator[str]:
    """Yields a line for every setting that has no effect, or that is probably not meant.

    Call this before `settled`, which fills in the fields that were left out.
    """
    rate, name = config.optimizer.adamw_learning_rate, config.optimizer.name
    if rate is not None and not leaves_rest_to_adamw(config.optimizer):
        yield f"optimizer.adamw_learning_rate = {rate:g} is not used: {name} takes all parameters by itself"
    if config.train.device == "auto" and settled(config).train.device == "cpu" and torch.cuda.is_available():
        yield (
            f"training on the CPU: {num_gpus_wanted(config)} stages want a GPU each, and there are "
            f"{torch.cuda.device_count()}; pipeline.transport = 'thread' puts them on one"
        )
    yield from _initial_model(config)


def _method(config: Config) -> str:
    """Describes the schedule, the optimizer and the precision."""
    schedule, optimizer, train = schedule_of(config), config.optimizer, config.train
    delays = [schedule.delay(stage) for stage in range(schedule.num_stages)]
    late = "on weights that change meanwhile" if schedule.traits.drifts else lateness(min(delays), max(delays))
    feedback = f", error feedback {optimizer.error_feedback:g}" if optimizer.error_feedback and max(delays) else ""
    rest = ", adamw for the rest" if leaves_rest_to_adamw(optimizer) else ""
    return (
        f"{schedule.name}, gradients {late}; {optimizer.name}{rest}{feedback}; {precision_of(config)} on {train.device}"
    )


def _reading(config: Config, components: Components) -> str:
    """Describes how much text the run reads, and how many times.

    A run that reads a small corpus many times memorises it.
    """
    batches, steps = components.batches, config.train.steps
    if batches.sources:
        epochs = zip(batches.sources, batches.epochs(steps), strict=True)
        read = ", ".join(_times(times, source.num_tokens, f" of {source.name}") for source, times in epochs)
    else:
        read = _times(batches.epochs(steps)[0], len(batches.tokens))
    replicas = f"{config.pipeline.replicas} replicas x " if config.pipeline.replicas > 1 else ""
    return (
        f"{batches.num_tokens(0):,} tokens a step: {replicas}{config.pipeline.microbatches} microbatches x "
        f"{config.train.microbatch_size} sequences x {components.model.sequence_length}, of a vocabulary of "
        f"{components.model.vocab_size:,}; the run reads {read}"
    )


def _times(times: float, num_tokens: int, whose: str = "") -> str:
    tokens = f"the {num_tokens:,} tokens{whose}"
    return f"{times:.1%} of {tokens}" if times < 1 else f"{tokens} {times:,.1f} times"


def _initial_model(config: Config) -> Iterator[str]:
    """Says where a model that the run starts from does not suit the rest of the configuration."""
    folder, name = expand_home(config.model.initial), config.optimizer.name
    if not config.model.initial or not (folder / "config.json").is_file():  # build_components says what is wrong
        return
    before = pretrained_with(json.loads(read_plain_file(folder / "config.json")))
    # Adapters bound the update, and then the two geometries do about equally well (same paper).
    if name in ORTHOGONALISING and before not in ORTHOGONALISING and config.adapter.rank is None:
        by = before or "AdamW, as nearly all published models were"
        yield (
            f"optimizer.name = {name!r} continues weights that were pretrained with {by}: its other geometry costs "
            "loss at first (arXiv:2605.10468); use a low learning rate, or adamw"
        )
    if config.data.tokenizer == "bytes" and (folder / "tokenizer.json").is_file():
        own = byte_vocabulary() == json.loads(read_plain_file(folder / "tokenizer.json"))["model"].get("vocab")
        is_text = not any(source.endswith(".bin") for source in config.data.sources)
        if is_text and not own:
            yield f"data.tokenizer = 'bytes' is not the tokenizer of the model: set data.tokenizer = {str(folder)!r}"
