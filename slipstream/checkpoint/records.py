"""The contents of the JSON files of a checkpoint.

The manifest has the digests of all other files, and each of its own values must agree with another file. So damage
anywhere is found, and what a file with the right digest says is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import CheckpointError, Stamp, open_plain, read_into

FORMAT = 1
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 16_000_000
PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Name of a part: a plain file name, so that no manifest leads out of its folder."""


@dataclass(frozen=True)
class PartRecord:
    """The contents of NAME.json, which is written after NAME.safetensors is on disk."""

    step: int
    num_parts: int
    tensors: Stamp
    facts: dict[str, Any]

    def encode(self, name: str) -> bytes:
        where = f"part {name!r} of step {self.step}"
        tree = {"format": FORMAT, **vars(self), "tensors": self.tensors._asdict()}
        try:
            text = json.dumps(tree, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} has facts that JSON cannot say ({error})") from error
        if len(text) > MAX_JSON_BYTES:
            raise CheckpointError(f"{where} has facts of {len(text):,} bytes: put what is large into tensors")
        return text

    @classmethod
    def decode(cls, text: bytes, path: Path) -> PartRecord:
        with reading(path):
            found = _parse(text, path)
            return cls(found["step"], found["num_parts"], Stamp(**found["tensors"]), found["facts"])


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
        with reading(path):
            found, parts = _parse(text, path), {}
            for name, files in found["parts"].items():
                if not PART_NAME.fullmatch(name) or name.lower() == "manifest":
                    raise CheckpointError(f"{path} has a part named {name[:200]!r}, which is no name of a part")
                parts[name] = PartFiles(Stamp(**files["record"]), Stamp(**files["tensors"]))
            return cls(found["step"], parts)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an error about the content of a file into a CheckpointError that names the file."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is damaged, or no file of a checkpoint ({type(error).__name__}: {said})"
        ) from error


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.decode())
    if found["format"] != FORMAT:
        raise CheckpointError(f"{path} is of format {str(found['format'])[:20]}, and this version reads {FORMAT}")
    return found


def read_json(folder: Path, name: str) -> tuple[bytes, Stamp]:
    with open_plain(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{folder / name} has {size:,} bytes, more than any checkpoint's")
        text = bytearray(size)
        read_into(file, 0, memoryview(text), folder / name)
    return bytes(text), Stamp(size, hashlib.sha256(text).hexdigest())
