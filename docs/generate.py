"""Writes the reference pages from the program itself: commands, configuration fields and the Python API.

    python docs/generate.py          # or make docs

The pages are committed, so that they can be read where the repository is browsed. tests/docs/test_docs.py checks that
they are up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import slipstream
from slipstream.cli import dispatch
from slipstream.cli.completion import arguments_of
from slipstream.cli.init import field_texts
from slipstream.config.schema import Config
from slipstream.config.toml import literal

REFERENCE = Path(__file__).resolve().parent / "reference"
NOTE = "<!-- Written by docs/generate.py. Do not edit this page: edit the text in the source, then run make docs. -->"
SECTIONS = {
    "model": "The decoder: a preset, and what differs from it.",
    "data": "What to train on and what to hold out.",
    "pipeline": "The schedule, the layout, and how stages exchange messages.",
    "optimizer": "The update: optimizer, learning rate, clipping, error feedback.",
    "train": "Length, batch, device, precision, memory.",
    "adapter": "LoRA adapters beside frozen weights.",
    "evaluation": "When the held-out text is evaluated, and how much of it.",
    "checkpoint": "When a run is saved, what is kept, and whether to resume.",
    "run": "The folder of the run and what is logged.",
}


def pages() -> dict[str, str]:
    """Every generated page by its file name."""
    return {"commands.md": commands(), "configuration.md": configuration(), "api.md": api()}


def commands() -> str:
    usages = re.findall(r"^    (slipstream (\S+).*)$", dispatch.USAGE, re.MULTILINE)
    parts = [
        "# Command line",
        NOTE,
        "Every command explains itself with `--help`. A mistake in the arguments ends with one sentence and exit code "
        "2. A run that fails ends with one sentence and exit code 1. A command that is interrupted (Ctrl-C, SIGTERM or "
        "SIGHUP) ends with exit code 130, but `slipstream train` with 0 if SIGTERM or SIGHUP made it save and stop.",
        table(
            ["command", "what it does"],
            [[f"[`{name}`](#{name})", first_sentence(explanation(name))] for _, name in usages],
        ),
    ]
    for usage, name in usages:
        arguments = arguments_of(name)
        shared = SECTIONS if issubclass(arguments, Config) else ()
        own = [member for member in dataclasses.fields(arguments) if member.name not in shared]
        parts += [f"## {name}", f"    {usage}", explanation(name)]
        if own:
            parts.append(field_table(arguments, own, options=True))
        if issubclass(arguments, Config):
            every = "Every field of the [configuration](configuration.md) is an option: `--section.field value`."
            parts.append(f"{every} A TOML file may come first; an option wins over the file.")
    return join(parts)


def explanation(command: str) -> str:
    if command == "train":
        return "Trains a language model across pipeline stages. Writes metrics, summary and trace to `runs/NAME`."
    return paragraphs(inspect.getdoc(arguments_of(command)) or "")


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) ", " ".join(text.split()))[0].removesuffix(".")


def configuration() -> str:
    parts = [
        "# Configuration",
        NOTE,
        f"A configuration has {len(SECTIONS)} sections. Write a field in a TOML file:",
        "    [train]\n    steps = 200",
        "or give it on the command line, where `_` becomes `-`: `--train.steps 200`, `--train.microbatch-size 4`. "
        "An option wins over the file. `slipstream init PRESET` writes a file with every field and its meaning. "
        "A field without a default is *not set*: the text says what the program then chooses, and "
        "`runs/NAME/config.toml` records the choice.",
        table(["section", "what it holds"], [[f"[`[{name}]`](#{name})", text] for name, text in SECTIONS.items()]),
    ]
    for section in dataclasses.fields(Config):
        cls = typing.get_type_hints(Config)[section.name]
        parts += [f"## {section.name}", SECTIONS[section.name], field_table(cls, dataclasses.fields(cls))]
    return join(parts)


def api() -> str:
    names = sorted(slipstream.__all__, key=lambda name: (name not in FIRST, FIRST.index(name) if name in FIRST else 0))
    parts = [
        "# Python API",
        NOTE,
        "These are the public names: `from slipstream import Pipeline, launch`. "
        "[Your own model](../start/model.md) and [a training loop of your own](../guides/library.md) show them in use.",
        table(
            ["name", "what it is"],
            [[f"[`{name}`](#{name.lower()})", first_sentence(doc_of(getattr(slipstream, name)))] for name in names],
        ),
    ]
    for name in names:
        value = getattr(slipstream, name)
        parts += [f"## {name}", signature(name, value), paragraphs(doc_of(value))]
        if dataclasses.is_dataclass(value):
            parts.append(table(["field", "meaning"], [[f"`{n}`", text] for n, text in field_texts(value).items()]))
        if inspect.isclass(value):
            parts += [part for method in methods(value) for part in method]
    return join(parts)


FIRST = (
    *("launch", "Pipeline", "StepReport", "Evaluation", "EvaluationReport"),
    *("Checkpoints", "load_weights", "Metrics"),
    *("Group", "muon_and_adamw", "Muon", "AdamW"),
)
"""The order of the page; the rest follows by name."""


def doc_of(value: Any) -> str:
    """The docstring, unless dataclasses made it up from the fields."""
    text = inspect.getdoc(value) or ""
    return "" if text.startswith(f"{value.__name__}(") else text


def signature(name: str, value: Any) -> str:
    """One argument to a line where they do not fit into one."""
    arguments = arguments_text(value)
    line = f"{name}({', '.join(arguments)})"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
    return f"```python\n{line}\n```"


def arguments_text(function: Any) -> list[str]:
    """As they are written in the source: annotations without quotes, functions by their names."""
    texts: list[str] = []
    kinds = inspect.Parameter
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is kinds.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        text = f"{'**' if parameter.kind is kinds.VAR_KEYWORD else ''}{name}"
        if parameter.annotation is not kinds.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not kinds.empty:
            default = parameter.default
            shown = getattr(default, "__name__", repr(default)) if callable(default) else repr(default)
            text += f" = {'...' if shown == '<lambda>' else shown}"
        texts.append(text)
    return texts


def methods(cls: type) -> Iterable[tuple[str, str]]:
    """The methods that the class itself defines and explains."""
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        yield (
            f"**`{cls.__name__}.{name}({', '.join(arguments_text(function))})`**",
            paragraphs(inspect.getdoc(function) or ""),
        )


def field_table(cls: type, members: Sequence[dataclasses.Field[Any]], options: bool = False) -> str:
    """A row for each field: its name and default, its type, and the text below it in the source."""
    texts, hints = field_texts(cls), typing.get_type_hints(cls)
    rows = []
    for member in members:
        shown, note = option(member) if options else setting(member)
        text = texts[member.name].replace("None:", "Not set:")  # which is how TOML says it
        kind = "switch" if options and hints[member.name] is bool else type_of(hints[member.name])
        rows.append([f"`{shown}`<br>{kind}{note}", text])
    return table(["option" if options else "field", "meaning"], rows)


def setting(member: dataclasses.Field[Any]) -> tuple[str, str]:
    """As a line of TOML, and what has to be said of its default."""
    value = default_of(member)
    return (member.name, ", not set") if value is None else (f"{member.name} = {literal(value)}", "")


def option(member: dataclasses.Field[Any]) -> tuple[str, str]:
    """As an argument with its default, and what has to be said of it."""
    flag, value = f"--{member.name.replace('_', '-')}", default_of(member)
    if "Positional" in str(member.type):
        return member.name.upper(), ", required" if value is dataclasses.MISSING else f", `{value}` by default"
    if value is dataclasses.MISSING:
        return flag, ", required"
    if isinstance(value, bool):
        return flag, f", on by default; `--no-{flag[2:]}` turns it off" if value else ", off by default"
    shown = value if str(value).isprintable() else repr(value)
    return (flag, "") if value in (None, ()) else (f"{flag} {shown}", "")


def default_of(member: dataclasses.Field[Any]) -> Any:
    return member.default if member.default_factory is dataclasses.MISSING else member.default_factory()


def type_of(hint: Any) -> str:
    """A type as a reader knows it: the choices of a Literal, and no None, which the default shows."""
    arguments = [argument for argument in typing.get_args(hint) if argument not in (type(None), Ellipsis)]
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(f'`"{choice}"`' for choice in arguments)
    if typing.get_origin(hint) is tuple:
        return f"{type_of(arguments[0])}s"
    if typing.get_origin(hint) is dict:
        return "table of numbers"
    if arguments:
        return ", ".join(map(type_of, arguments))
    return {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}[hint]


def paragraphs(text: str) -> str:
    """A docstring as Markdown. Two aligned columns (a name, its meaning) become a table."""
    return "\n\n".join(columns(part) if re.match(r"\w+ {2,}\S", part) else part for part in text.split("\n\n"))


def columns(text: str) -> str:
    rows: list[list[str]] = []
    for line in text.splitlines():
        if start := re.match(r"(\w+) {2,}(\S.*)", line):
            rows.append([f"`{start[1]}`", start[2]])
        elif rows:
            rows[-1][1] += f" {line.strip()}"
    return table(["argument", "meaning"], rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def join(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    for file_name, page in pages().items():
        (REFERENCE / file_name).write_text(page, encoding="utf-8")
