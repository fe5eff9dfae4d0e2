"""Streams tensors in the safetensors format: 8 bytes of length, a JSON header, then the bytes of all tensors.

The safetensors package would need all bytes at once to hash them. It also returns tensors that stay mapped to the file:
if the file were truncated later, the process would be killed. Files written here can be read by the package, and its
files can be read here.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .files import CheckpointError, read_into
from .records import reading

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, the same as in the safetensors package."""
LENGTH_BYTES = 8
NOT_TENSORS = "__metadata__"


class Description(NamedTuple):
    """What the header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Entry(NamedTuple):
    """A tensor in a file. `start` and `end` count from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def encode(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Returns what `header_of` does, for tensors that can be written as they are."""
    for name, tensor in tensors.items():
        dense = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
        if not dense or tensor.dtype not in CODES:
            raise CheckpointError(
                f"tensor {name!r} is of {tensor.dtype} on {tensor.device}, and not contiguous real numbers on the CPU: "
                "copy it there first"
            )
    return header_of({name: Description(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})


def header_of(tensors: Mapping[str, Description]) -> tuple[bytes, list[str]]:
    """Returns the length and header with which the file begins, and the order in which the tensors follow."""
    if NOT_TENSORS in tensors:
        raise CheckpointError(f"{NOT_TENSORS!r} cannot be a tensor's name: safetensors has another use for it")
    # Elements of the largest size come first. The header is padded to a multiple of 8 bytes, so every tensor is
    # aligned. Otherwise the order is the given one.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {NOT_TENSORS: {"format": "pt"}}
    start = 0
    for name in order:
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the names of {len(order):,} tensors take {len(text):,} bytes: use fewer or shorter ones"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, order


def stream(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """Yields the bytes of the whole file, without copying any tensor."""
    header, order = encode(tensors)
    yield header
    for name in order:
        yield tensor_bytes(tensors[name].detach())


def tensor_bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class TensorFile:
    """A file whose header has been read and matches its size."""

    path: Path
    size: int
    data_start: int
    entries: Mapping[str, Entry]

    def read(self, file: io.FileIO, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        if os.fstat(file.fileno()).st_size != self.size:
            raise CheckpointError(f"{self.path} has changed since it was opened")
        for name in names:
            entry = self.entries[name]
            flat = torch.empty(entry.end - entry.start, dtype=torch.uint8)
            read_into(file, self.data_start + entry.start, tensor_bytes(flat), self.path)
            yield name, flat.view(entry.dtype).reshape(entry.shape)


def read_header(file: io.FileIO, path: Path) -> TensorFile:
    size = os.fstat(file.fileno()).st_size
    if size < LENGTH_BYTES:
        raise CheckpointError(f"{path} is no safetensors file: it has {size} bytes")
    length_bytes = bytearray(LENGTH_BYTES)
    read_into(file, 0, memoryview(length_bytes), path)
    length = int.from_bytes(length_bytes, "little")
    if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} is no safetensors file: its header claims {length:,} of {size:,} bytes")
    text = bytearray(length)
    read_into(file, LENGTH_BYTES, memoryview(text), path)
    with reading(path):
        header = json.loads(text.decode())
        header.pop(NOT_TENSORS, None)
        entries = {
            name: Entry(DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
        }
    for name, entry in entries.items():
        if entry.end - entry.start != math.prod(entry.shape) * entry.dtype.itemsize:
            raise CheckpointError(f"tensor {name!r} of {path} has {entry.end - entry.start} bytes for {entry.shape}")
    told = LENGTH_BYTES + length + max((entry.end for entry in entries.values()), default=0)
    if told != size:
        raise CheckpointError(f"the header of {path} accounts for {told:,} of {size:,} bytes")
    return TensorFile(path, size, LENGTH_BYTES + length, entries)
