"""Functions that `slipstream plan`, `slipstream profile` and `slipstream tune` share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from ..config.files import check_output
from ..config.models import model_of
from ..config.optimizers import parameter_groups
from ..config.rules import validate
from ..config.schema import Config, DataConfig
from ..config.toml import load_toml
from ..data import check_sources, known_vocab_size
from ..errors import UsageError
from ..model.spec import ModelSpec
from ..observe.console import Screen
from ..train.build import corpus_vocab_size
from .parse import parse

Arguments = TypeVar("Arguments", bound=Config)


def parse_with_config(cls: type[Arguments], arguments: list[str], name: str) -> tuple[Arguments, str | None, Config]:
    default, path = Config(), None
    if arguments and not arguments[0].startswith("-"):
        path = arguments.pop(0)
        default = load_toml(Path(path))
    given = parse(cls, arguments, f"slipstream {name} [CONFIG.toml]", default=cls(**vars(default)))
    return given, path, default


def config_of(given: Config) -> Config:
    config = Config(**{member.name: getattr(given, member.name) for member in fields(Config)})
    validate(config)
    parameter_groups(config)
    if config.data.loader == "files":
        check_sources(config.data)
    return config


def model_of_run(config: Config) -> ModelSpec:
    """Returns the model that a run would train. Its vocabulary follows the corpus, if the configuration names one and
    does not set the vocabulary."""
    section, size = config.model, 0
    if section.vocab_size is None and "vocab_size" not in section.arguments and config.data != DataConfig():
        if section.name != "decoder":
            size = corpus_vocab_size(config)
        else:
            try:
                size = known_vocab_size(config.data)
            except (ValueError, OSError) as error:
                Screen().print(f"the corpus cannot be read here, and may have more token ids than the preset: {error}")
    return model_of(config, size)


def check_folder(name: str, path: Path) -> None:
    if not os.path.isdir(path.parent) or os.path.isdir(path):
        reason = "is a folder" if os.path.isdir(path) else f"has no folder {str(path.parent)!r} to go to"
        raise UsageError(f"{name} = {str(path)!r} {reason}: name a file in a folder that exists")


def progress_bar() -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def wide_console() -> Console:
    """Returns a console that has the width of the terminal, or a large width if the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def write_to(name: str, path: Path, write: Callable[[], object]) -> None:
    try:
        check_output(path)
        write()
    except OSError as error:
        raise UsageError(f"{name} = {str(path)!r} cannot be written ({error.strerror}): choose another") from error
