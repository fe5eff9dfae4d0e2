"""Tensors come back as they were, and the safetensors package agrees on what is in the file."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from slipstream.checkpoint import CheckpointError, Part, Store
from slipstream.checkpoint.files import open_plain, write_file
from slipstream.checkpoint.tensors import DTYPES, read_header, stream


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in wanted.items()}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Of every dtype, with every bit pattern; none, one and several dimensions; odd names."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 256, (24 * 8,), dtype=torch.uint8, generator=generator)
    found = {}
    for code, dtype in DTYPES.items():
        values = random % 2 if dtype == torch.bool else random
        values = values.view(dtype)[:24]
        found |= {
            f"{code}": values.reshape(2, 3, 4).clone(),
            f"{code}.0-dim": values[0].clone(),
            f"{code}/empty": torch.empty(0, 7, dtype=dtype),
        }
    odd = ["", ".", "../up", "/root", "a\nb", "ü λ 模", 'quote"\\', "\x00", "a" * 1000]
    return found | {name: torch.tensor([i]) for i, name in enumerate(odd)}


def test_every_dtype_and_shape_comes_back_bit_by_bit(tmp_path, tensors):
    store = Store(tmp_path / "checkpoints")
    store.write(7, Part("stage-0", tensors, {"a": [1, 2.5, None, "x"], "ü": {}}), 1)
    checkpoint = store.open(7)
    assert checkpoint.names() == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert_same(checkpoint.read(tensors), tensors)
    assert checkpoint.facts == {"stage-0": {"a": [1, 2.5, None, "x"], "ü": {}}}


def test_the_package_reads_what_was_written(tmp_path, tensors):
    path = tmp_path / "ours.safetensors"
    write_file(path, stream(tensors))
    assert_same(safetensors.torch.load_file(path), tensors)


def test_what_the_package_writes_is_read(tmp_path, tensors):
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"a": "b"})
    with open_plain(tmp_path, path.name) as file:
        header = read_header(file, path)
        assert_same(dict(header.read(file, tensors)), tensors)


def test_every_tensor_is_aligned(tmp_path, tensors):
    write_file(tmp_path / "ours.safetensors", stream(tensors))
    with open_plain(tmp_path, "ours.safetensors") as file:
        header = read_header(file, tmp_path / "ours.safetensors")
    assert header.data_start % 8 == 0
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in header.entries.values())


def test_a_part_may_have_no_tensors(tmp_path):
    store = Store(tmp_path)
    store.write(0, Part("facts-only", {}, {}), 1)
    checkpoint = store.open(0)
    assert checkpoint.names() == checkpoint.read([]) == {}


def test_tensors_longer_than_a_piece_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.checkpoint.files.PIECE_BYTES", 1000)
    wanted = {"long": torch.arange(12345), "parameter": torch.nn.Parameter(torch.randn(777))}
    store = Store(tmp_path)
    store.write(0, Part("stage-0", wanted, {}), 1)
    found = store.open(0).read(["parameter", "long"])
    assert list(found) == ["parameter", "long"]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3).T,
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
    ],
    ids=["strided", "complex", "elsewhere", "sparse"],
)
def test_a_tensor_that_cannot_be_written_is_refused(tmp_path: Path, tensor):
    with pytest.raises(CheckpointError, match=r"'w' is of .* and not contiguous real numbers on the CPU: copy it"):
        Store(tmp_path).write(0, Part("stage-0", {"w": tensor}, {}), 1)
    assert list(tmp_path.iterdir()) == []
