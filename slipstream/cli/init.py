"""`slipstream init`: writes a configuration file in which every field is explained."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..config.schema import Config, ModelSection, RunSection
from ..config.toml import literal
from ..errors import UsageError
from ..model.presets import PRESETS
from .parse import parse

CHOSEN = (
    "model.preset",
    "data.sources",
    "pipeline.schedule",
    "pipeline.stages",
    "pipeline.microbatches",
    "optimizer.name",
    "train.steps",
    "train.microbatch_size",
    "evaluation.every_steps",
    "run.name",
)
"""The most important fields, which are active in the file. All other fields are commented out."""
WIDTH = 110


@dataclass(frozen=True)
class InitArguments:
    """Writes a configuration file to start from. It has the ten most important fields, and all other fields commented
    out, each with its meaning and default."""

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET]")] = "tiny"
    """A preset of the model, such as tiny, 135m or moe-2b."""
    output: Path | None = None
    """The file to write; by default PRESET.toml in this folder."""


def main(arguments: list[str]) -> None:
    given = parse(InitArguments, arguments, "slipstream init")
    if given.preset not in PRESETS:
        raise UsageError(f"preset = {given.preset!r} is unknown: choose one of {', '.join(PRESETS)}")
    output = given.output or Path(f"{given.preset}.toml")
    config = Config(model=ModelSection(preset=given.preset), run=RunSection(name=given.preset))
    try:
        with output.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"# slipstream train {output}\n\n{explained(config)}")
    except FileExistsError:
        raise UsageError(f"output = {str(output)!r} exists: choose another, or remove it") from None
    except OSError as error:
        raise UsageError(f"output = {str(output)!r} cannot be written ({error.strerror}): choose another") from error
    print(f"{output}: edit it, then slipstream train {output}")


def explained(config: Config) -> str:
    """Returns the configuration as TOML, with the meaning of every field in a comment above it."""
    sections = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        texts = field_texts(type(values))
        entries = [f"[{section.name}]"]
        for member in dataclasses.fields(values):
            meaning = texts[member.name].replace("None:", "Not set:")  # TOML has no None: the field is left out
            lines = [f"# {line}" for line in textwrap.wrap(meaning, WIDTH)]
            entries.append("\n".join([*lines, _line(f"{section.name}.{member.name}", getattr(values, member.name))]))
        sections.append("\n\n".join(entries))
    return "\n\n\n".join(sections) + "\n"


def _line(path: str, value: Any) -> str:
    name = path.partition(".")[2]
    if value is None:
        return f"# {name}: not set"
    return f"{'' if path in CHOSEN else '# '}{name} = {literal(value)}"


def field_texts(section: type) -> dict[str, str]:
    """Returns the text below every field of a section. It parses the source, because Python does not keep docstrings of
    fields."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for member, text in pairwise(definition.body):
        if isinstance(member, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(member.target)] = " ".join(str(text.value.value).split())
    return found
