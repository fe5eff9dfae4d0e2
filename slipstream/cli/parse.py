"""Parses the arguments of a command into a dataclass. tyro parses them and writes the help text. Every error becomes
one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import typing
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, TypeVar

import tyro

from ..config.toml import wanted
from ..errors import UsageError

Arguments = TypeVar("Arguments")


def find_run(path: Path) -> Path:
    """Returns the path if it exists. Otherwise returns the folder of the run with this name below runs/, if there is
    one."""
    below = Path("runs") / path
    # os.path.exists also returns False for a name that is too long; Path.exists would raise.
    return below if not os.path.exists(path) and os.path.isdir(below) else path


def parse(
    cls: type[Arguments], arguments: list[str], prog: str, description: str, default: Arguments | None = None
) -> Arguments:
    """Parses arguments with tyro. Raises UsageError with one sentence where tyro would print a box with the error.

    prog: the two words of the command, followed by the positional arguments that are no fields of `cls`, such as
    "slipstream train [CONFIG.toml]". The help text shows it."""
    said, command = io.StringIO(), " ".join(prog.split()[:2])
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            given, unknown = tyro.cli(
                cls,
                prog=prog,
                description=description,
                args=arguments,
                return_unknown_args=True,
                **defaults,
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # exit code 0: the user asked for help
        raise UsageError(_explain(said.getvalue(), arguments, _options(cls), command)) from None
    if unknown:
        raise UsageError(_explain_unknown(unknown[0], _options(cls), command))
    return given


def _options(cls: Any, where: str = "") -> dict[str, Any]:
    """Returns the type of every field, by its dotted path."""
    options: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        options |= _options(hint, f"{where}{name}.") if dataclasses.is_dataclass(hint) else {f"{where}{name}": hint}
    return options


def _explain(said: str, arguments: list[str], options: dict[str, Any], command: str) -> str:
    """Turns tyro's error box into one sentence. Only the name of the wrong field comes from the box. Its value comes
    from `arguments` and the valid values from `options`."""
    lines = _unboxed(said)
    if len(lines) > 1 and lines[0].startswith("Missing from"):
        return f"{lines[1].split()[0]} is missing: see {command} --help"
    sentence = " ".join(lines)
    flag = re.search(r"--([\w.-]+\w)", sentence)
    path = flag[1].replace("-", "_") if flag else ""
    if path not in options:
        return f"{sentence}: see {command} --help"
    value = _value_of(path, arguments)
    if not value:
        return f"{path} has no value: write {wanted(options[path])}"
    return f"{path} = {value!r} is invalid: write {wanted(options[path])}"


def _unboxed(said: str) -> list[str]:
    """Returns the lines between the title of tyro's error box and its next horizontal rule. tyro draws frame and rules
    with plain dashes if the terminal supports nothing else, and adds colours if the terminal has them."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    lines = [line.strip("│ ") for line in plain.splitlines()[1:]]
    text = dropwhile(_is_rule, lines)
    return list(takewhile(lambda line: not _is_rule(line), text))


def _is_rule(line: str) -> bool:
    return not line.strip("─-╰╯ ")


def _value_of(path: str, arguments: list[str]) -> str:
    """Returns the value that the arguments give to a field. If the field occurs more than once, the last value
    counts."""
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


def _explain_unknown(argument: str, options: dict[str, Any], command: str) -> str:
    if not argument.startswith("-"):
        remedy = (
            "a configuration file comes before all options" if argument.endswith(".toml") else f"see {command} --help"
        )
        return f"{argument!r} belongs to no option: {remedy}"
    flags = [f"--{path.replace('_', '-')}" for path in options]
    close = difflib.get_close_matches(argument.partition("=")[0].replace("_", "-"), flags, n=1)
    return f"option {argument} is unknown: " + (f"did you mean {close[0]}?" if close else f"see {command} --help")


def cannot_write(error: OSError, field: str) -> str:
    return f"{field} = {str(error.filename)!r} cannot be written ({error.strerror}): choose another"
