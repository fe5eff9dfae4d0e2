"""From a command's arguments to a dataclass: tyro parses them and writes the help, mistakes become one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import typing
from typing import Any, TypeVar

import tyro

from .config import wanted

Arguments = TypeVar("Arguments")


class UsageError(ValueError):
    """Arguments that cannot be understood, or asked for what cannot be done."""


def parse(
    cls: type[Arguments], arguments: list[str], prog: str, description: str, default: Arguments | None = None
) -> Arguments:
    """tyro's parser, with its help, and without the boxes it draws around mistakes."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given, unknown = tyro.cli(
                cls,
                prog=prog,
                description=description,
                args=arguments,
                default=tyro.MISSING if default is None else default,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # it was asked for help
        raise UsageError(_explain(said.getvalue(), arguments, _options(cls), prog)) from None
    if unknown:
        raise UsageError(_explain_unknown(unknown[0], _options(cls), prog))
    return given


def _options(cls: Any, where: str = "") -> dict[str, Any]:
    """The path of every field, and its type."""
    options: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        options |= _options(hint, f"{where}{name}.") if dataclasses.is_dataclass(hint) else {f"{where}{name}": hint}
    return options


def _explain(said: str, arguments: list[str], options: dict[str, Any], prog: str) -> str:
    """One sentence from a box: what stands above its first rule, with the frame taken off."""
    lines = [line.strip(" │") for line in said.splitlines()[1:]]
    lines = lines[: next((i for i, line in enumerate(lines) if set(line) <= {"─", "╰", "╯"}), None)]
    if lines and lines[0].startswith("Missing from") and len(lines) > 1:
        return f"{lines[1].split()[0]} is missing: see {prog} --help"
    sentence = " ".join(lines)
    flag = re.search(r"--([\w.-]+\w)", sentence)
    path = flag[1].replace("-", "_") if flag else ""
    if path not in options:
        return f"{sentence}: see {prog} --help"
    value = _value_of(path, arguments)
    if not value:
        return f"{path} has no value: write {wanted(options[path])}"
    return f"{path} = {value!r} does not do: write {wanted(options[path])}"


def _value_of(path: str, arguments: list[str]) -> str:
    """What was given for a field, as it was given last."""
    value: list[str] = []
    current = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, _, inline = argument.removeprefix("--").partition("=")
            current = name.replace("-", "_")
            if current == path:
                value = [inline] if inline else []
        elif current == path:
            value.append(argument)
    return " ".join(value)


def _explain_unknown(argument: str, options: dict[str, Any], prog: str) -> str:
    if not argument.startswith("-"):
        remedy = "a configuration file comes before all options" if argument.endswith(".toml") else f"see {prog} --help"
        return f"{argument!r} belongs to no option: {remedy}"
    flags = [f"--{path.replace('_', '-')}" for path in options]
    close = difflib.get_close_matches(argument.partition("=")[0].replace("_", "-"), flags, n=1)
    return f"option {argument} is unknown: " + (f"did you mean {close[0]}?" if close else f"see {prog} --help")
