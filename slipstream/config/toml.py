"""Reads and writes configurations as TOML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from .files import read_plain_file
from .rules import choose
from .schema import Config


def load_toml(path: Path) -> Config:
    return build(Config, read_toml(path), f"{path}: ")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_plain_file(path).decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:  # bad TOML or UTF-8, too long a number, too deeply nested tables
        raise ConfigError(f"{path} is not valid TOML ({error}): correct it there") from error


def build(cls: type, tree: Any, where: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"{where.rstrip('. ')} = {tree!r} is not a section: write it as a TOML table")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in tree.items():
        if name not in hints:
            raise ConfigError(f"{where}{name} is unknown: {_suggest(name, hints)}")
        values[name] = _convert(hints[name], value, f"{where}{name}")
    return cls(**values)


def _suggest(name: str, hints: dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, hints, n=1)
    if close:
        return f"did you mean {close[0]}?"
    for section, hint in hints.items():
        if dataclasses.is_dataclass(hint) and name in typing.get_type_hints(hint):
            return f"did you mean {section}.{name}?"
    return f"known are {', '.join(hints)}"


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:  # JSON has null, TOML has no such value
            return None
        return _convert(next(a for a in arguments if a is not types.NoneType), value, where)
    if origin is Literal and isinstance(value, str):
        choose(where, value, arguments)
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, f"{where}.")
    if origin is dict and isinstance(value, dict):
        return {str(key): _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(f"{where} = {value} is too large: write a smaller number") from error
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool) == isinstance(value, bool):
        return value
    raise ConfigError(f"{where} = {value!r} has the wrong type: write {wanted(hint)}")


def wanted(hint: Any) -> str:
    """Returns a text that says what to write for a field of this type, in TOML or on the command line."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return wanted(next(a for a in arguments if a is not types.NoneType))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"a list, each item {wanted(arguments[0])}"
    if origin is dict:
        return f"a table, each value {wanted(arguments[1])}"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, "a text")


def to_toml(config: Config) -> str:
    """Returns the configuration as TOML, from which `load_toml` reads the same configuration. Fields without a value
    are left out."""
    lines = []
    for section, values in dataclasses.asdict(config).items():
        entries = [f"{name} = {literal(value)}" for name, value in values.items() if value is not None]
        lines += [f"[{section}]", *entries, ""]
    return "\n".join(lines)


def literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # The escapes of TOML are those of JSON, but TOML has no surrogate pairs and does not accept an unescaped DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)} = {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns all fields as "section.name", with values as they would be read from JSON."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        is_section = isinstance(value, dict) and not before
        plain = list(value) if isinstance(value, tuple) else value
        found |= flat(value, f"{name}.") if is_section else {f"{before}{name}": plain}
    return found
