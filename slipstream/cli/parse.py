"""Parses the arguments of a command into a dataclass. tyro parses them and writes the help text. Every error becomes
one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import typing
from itertools import pairwise
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


def run_and_step(text: str) -> tuple[Path, int | None]:
    """Splits RUN@STEP. Without a step it is None."""
    name, at, number = text.partition("@")
    if at and not (number.isascii() and number.isdigit()):
        raise UsageError(f"{text!r} has no step after the @: write RUN@STEP, such as runs/default@200")
    return find_run(Path(name)), int(number) if at else None


def parse(
    cls: type[Arguments], arguments: list[str], prog: str, description: str = "", default: Arguments | None = None
) -> Arguments:
    """Parses arguments with tyro. Raises UsageError with one sentence where tyro would print a box with the error.

    prog: the two words of the command, followed by the positional arguments that are no fields of `cls`, such as
    "slipstream train [CONFIG.toml]". The help text shows it, and the description, which is by default the docstring of
    `cls`."""
    command = " ".join(prog.split()[:2])
    arguments = _capitalised(cls, arguments)
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            given, unknown = tyro.cli(
                cls,
                prog=prog,
                description=description or inspect.getdoc(cls),
                args=arguments,
                return_unknown_args=True,
                **defaults,
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # exit code 0: the user asked for help
        raise UsageError(_explain(cls, arguments, command)) from None
    if unknown:
        raise UsageError(_explain_unknown(unknown[0], options_of(cls), command))
    return given


def flag(path: str) -> str:
    """Returns the option of a field, by its dotted path."""
    return f"--{path.replace('_', '-')}"


def options_of(cls: Any, where: str = "") -> dict[str, Any]:
    """Returns the type of every field, by its dotted path."""
    options: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        options |= options_of(hint, f"{where}{name}.") if dataclasses.is_dataclass(hint) else {f"{where}{name}": hint}
    return options


BOOLEANS = ("true", "false")


def _capitalised(cls: Any, arguments: list[str]) -> list[str]:
    """Returns the arguments with True for true and False for false after an option that may also be not set: tyro takes
    only these."""
    takes_none = {flag(path) for path, hint in options_of(cls).items() if hint == bool | None}
    found = []
    for before, argument in pairwise(["", *arguments]):
        start, equals, value = argument.rpartition("=")
        option = start if equals else before
        is_taken = value in BOOLEANS and option.replace("_", "-") in takes_none
        found.append(f"{start}{equals}{value.capitalize()}" if is_taken else argument)
    return found


def _explain(cls: Any, arguments: list[str], command: str) -> str:
    """Returns a sentence about the first option whose value tyro rejects on its own, or about what is missing."""
    options, given = options_of(cls), _values(arguments)
    for path, hint in options.items():
        if path in given and hint is not bool and not given[path]:
            return f"{path} has no value: write {wanted(hint)}"
        if path in given and hint is not bool and not _is_valid(hint, given[path]):
            return f"{path} = {' '.join(given[path])!r} is invalid: write {wanted(hint)}"
    marks = typing.get_type_hints(cls, include_extras=True)
    places = list(given[""])
    for member in dataclasses.fields(cls):
        is_positional = tyro.conf.Positional in getattr(marks[member.name], "__metadata__", ())
        is_needed = member.default is dataclasses.MISSING and member.default_factory is dataclasses.MISSING
        if is_positional and places:
            place = places.pop(0)
            if typing.get_origin(options[member.name]) is not tuple and not _is_valid(options[member.name], [place]):
                return f"{member.name} = {place!r} is invalid: write {wanted(options[member.name])}"
        elif is_positional and is_needed:
            return f"{member.name.upper()} is missing: see {command} --help"
        elif is_needed and member.name not in given:
            return f"{flag(member.name)} is missing: see {command} --help"
    return f"{' '.join(arguments)!r} is invalid: see {command} --help"


def _values(arguments: list[str]) -> dict[str, list[str]]:
    """Returns the values that the arguments give to each field, and under "" those before the first option. If a field
    occurs more than once, the last one counts."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, _, inline = argument.removeprefix("--").partition("=")
            current = name.replace("-", "_")
            found[current] = [inline] if inline else []
        else:
            found[current].append(argument)
    return found


def _is_valid(hint: Any, values: list[str]) -> bool:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tyro.cli(hint, args=values)
    except SystemExit:
        return False
    return True


def _explain_unknown(argument: str, options: dict[str, Any], command: str) -> str:
    if not argument.startswith("-"):
        remedy = (
            "a configuration file comes before all options" if argument.endswith(".toml") else f"see {command} --help"
        )
        return f"{argument!r} belongs to no option: {remedy}"
    close = difflib.get_close_matches(argument.partition("=")[0].replace("_", "-"), map(flag, options), n=1)
    return f"option {argument} is unknown: " + (f"did you mean {close[0]}?" if close else f"see {command} --help")


def cannot_write(error: OSError, field: str) -> str:
    return f"{field} = {str(error.filename)!r} cannot be written ({error.strerror}): choose another"
