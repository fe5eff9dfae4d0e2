"""The contents of the JSON files of a checkpoint, which are read without trusting them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import CheckpointError, Stamp, open_plain, read_into

FORMAT = 1
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 16_000_000
PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def check_part_name(name: str, where: str) -> None:
    """Raises CheckpointError unless the name is a plain file name and not that of the manifest."""
    if not PART_NAME.fullmatch(name) or name.lower() == "manifest":
        raise CheckpointError(
            f"{where} has a part named {name[:200]!r}: use letters, digits, dots and dashes, and not 'manifest'"
        )


@dataclass(frozen=True)
class PartRecord:
    """The contents of NAME.json, which is written after NAME.safetensors is on disk."""

    step: int
    num_parts: int
    facts: dict[str, Any]
    tensors: Stamp

    def encode(self, name: str) -> bytes:
        where = f"part {name!r} of step {self.step}"
        try:
            text = json.dumps(
                {
                    "format": FORMAT,
                    "step": self.step,
                    "num_parts": self.num_parts,
                    "tensors": self.tensors._asdict(),
                    "facts": self.facts,
                },
                allow_nan=False,
            ).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} has facts that JSON cannot say ({error})") from error
        if len(text) > MAX_JSON_BYTES:
            raise CheckpointError(f"{where} has facts of {len(text):,} bytes: put what is large into tensors")
        return text

    @classmethod
    def decode(cls, text: bytes, path: Path) -> PartRecord:
        kinds = {"format": int, "step": int, "num_parts": int, "tensors": dict, "facts": dict}
        found = fields(parse(text, str(path)), kinds, str(path))
        return cls(found["step"], found["num_parts"], found["facts"], _stamp(found["tensors"], str(path)))


@dataclass(frozen=True)
class PartFiles:
    """The stamps of the two files of a part."""

    record: Stamp
    tensors: Stamp


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json. It is written when all parts are there, so that no part can be lost or exchanged
    unnoticed."""

    step: int
    parts: Mapping[str, PartFiles]

    def encode(self) -> bytes:
        parts = {
            name: {"record": files.record._asdict(), "tensors": files.tensors._asdict()}
            for name, files in sorted(self.parts.items())
        }
        return json.dumps({"format": FORMAT, "step": self.step, "parts": parts}).encode()

    @classmethod
    def decode(cls, text: bytes, path: Path) -> Manifest:
        where = str(path)
        found = fields(parse(text, where), {"format": int, "step": int, "parts": dict}, where)
        parts = {}
        for name, files in found["parts"].items():
            check_part_name(name, where)
            stamps = fields(files, {"record": dict, "tensors": dict}, where)
            parts[name] = PartFiles(_stamp(stamps["record"], where), _stamp(stamps["tensors"], where))
        if not parts:
            raise CheckpointError(f"{where} names no parts")
        return cls(found["step"], parts)


def read_json(folder: Path, name: str) -> tuple[bytes, Stamp]:
    with open_plain(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{folder / name} has {size:,} bytes, more than any checkpoint's")
        text = bytearray(size)
        read_into(file, 0, memoryview(text), folder / name)
    return bytes(text), Stamp(size, hashlib.sha256(text).hexdigest())


def parse(text: bytes, where: str) -> Any:
    """Parses strict JSON: UTF-8, no duplicate keys, no NaN or Infinity, and nested no deeper than Python's recursion
    limit."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_no_key_twice, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no valid JSON ({' '.join(str(error).split())[:200]})") from error


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def fields(value: object, kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    """Returns `value` if it is a JSON object with exactly the given keys and types. True does not count as an int."""
    if type(value) is not dict:
        raise CheckpointError(f"{where} is no JSON object where there should be one")
    if "format" in kinds and type(value.get("format")) is int and value["format"] != FORMAT:
        raise CheckpointError(f"{where} is of format {str(value['format'])[:20]}, and this version reads {FORMAT}")
    if value.keys() != kinds.keys():
        raise CheckpointError(f"{where} should have {', '.join(kinds)}, and has others")
    for key, kind in kinds.items():
        if type(value[key]) is not kind:
            raise CheckpointError(f"{where} has {type(value[key]).__name__} as {key}, not {kind.__name__}")
    return value


def _stamp(value: object, where: str) -> Stamp:
    return Stamp(**fields(value, {"size": int, "sha256": str}, where))
