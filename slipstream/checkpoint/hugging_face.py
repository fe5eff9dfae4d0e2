"""Reads and writes folders of weights as Hugging Face keeps them: safetensors, in one file or in several with an index.

    folder = WeightFolder(path)
    folder.shapes                                # of every tensor, by name; only headers are read
    folder.read("model.norm.weight")             # one tensor
    write_weights(path, entries, read)           # tensor by tensor, in shards

No tensor is mapped into memory, and none is held longer than it takes to copy it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from .files import CheckpointError, open_plain, write_file
from .records import read_json, reading
from .tensors import Description, TensorFile, header_of, read_header, tensor_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096
"""How much of a file its fingerprint reads."""


class WeightFolder:
    """The tensors of a folder. Raises CheckpointError if it has none that can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = [SINGLE]
        if (path / INDEX).is_file():
            text, _ = read_json(path, INDEX)
            with reading(path / INDEX):
                names = sorted(set(json.loads(text.decode())["weight_map"].values()))
        self._files: dict[str, TensorFile] = {}
        """The file of every tensor, by the name of the tensor."""
        for name in names:
            with open_plain(path, name) as file:
                found = read_header(file, path / name)
            self._files |= dict.fromkeys(found.entries, found)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.entries[name].shape for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        found = self._files[name]
        with open_plain(self.path, found.path.name) as file:
            ((_, tensor),) = found.read(file, [name])
        return tensor


def fingerprint(path: Path) -> dict[str, str]:
    """Returns a digest of every file of weights in a folder, of its size and of samples of its bytes. It tells whether
    the folder still has the same weights, without reading all of them."""
    digests = {}
    for name in sorted(found.name for found in path.glob("*.safetensors")):
        with open_plain(path, name) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(str(size).encode())
            for index in range(NUM_SAMPLES):
                file.seek(index * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES) or b"")
        digests[name] = digest.hexdigest()[:16]
    return digests


def write_weights(
    path: Path,
    entries: Mapping[str, Description],
    read: Callable[[str], Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes tensors of known dtypes and shapes, each of which `read` returns when it is its turn.

    progress: called with the number of bytes written so far, and with that of all.
    """
    shards: list[dict[str, Description]] = [{}]
    size = 0
    for name, entry in entries.items():
        if size and size + entry.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += entry.nbytes
    done, total = 0, sum(entry.nbytes for entry in entries.values())
    weight_map: dict[str, str] = {}

    def stream(shard: Mapping[str, Description]) -> Iterator[memoryview | bytes]:
        nonlocal done
        header, order = header_of(shard)
        yield header
        for name in order:
            tensor = read(name).to(shard[name].dtype).contiguous()
            if tuple(tensor.shape) != shard[name].shape:
                raise CheckpointError(f"{name} is {tuple(tensor.shape)}, not {shard[name].shape}")
            yield tensor_bytes(tensor)
            done += shard[name].nbytes
            progress(done, total)

    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(path / name, stream(shard))
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_file(path / INDEX, [json.dumps(index, indent=2).encode()])
