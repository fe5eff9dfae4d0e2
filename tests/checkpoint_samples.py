"""Small parts whose numbers tell where they come from, and what may be said of them afterwards."""

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.checkpoint import Checkpoint, Part, Store

NAMES = ("stage-0", "stage-1")


def make_part(name: str, mark: int) -> Part:
    """mark: another for every checkpoint, so that a mix of two is seen."""
    tensors = {
        f"{name}/layers.0.weight": torch.full((3, 4), float(mark)),
        f"{name}/layers.0.weight/momentum": torch.full((5,), mark, dtype=torch.bfloat16),
        f"{name}/step": torch.tensor(mark),
    }
    return Part(name, tensors, {"mark": mark, "generator": [1, 2, 3]})


def write_all(store: Store, step: int, mark: int, names: tuple[str, ...] = NAMES) -> None:
    for name in names:
        store.write(step, make_part(name, mark), len(names))


def mark_of(checkpoint: Checkpoint, names: tuple[str, ...] = NAMES) -> int:
    """The mark that all of it has."""
    assert set(checkpoint.facts) == set(names)
    tensors = checkpoint.read(checkpoint.names())
    assert len(tensors) == 3 * len(names)
    marks = {facts["mark"] for facts in checkpoint.facts.values()}
    marks |= {int(number) for tensor in tensors.values() for number in tensor.reshape(-1).tolist()}
    assert len(marks) == 1, marks
    return marks.pop()


def no_damage(sentence: str) -> None:
    raise AssertionError(sentence)


def restamp(folder: Path) -> None:
    """Makes all digests right again, as one would who means harm."""

    def stamp(path: Path) -> dict[str, object]:
        return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}

    manifest = json.loads((folder / "manifest.json").read_text())
    for name, stamps in manifest["parts"].items():
        record = json.loads((folder / f"{name}.json").read_text())
        stamps["tensors"] = record["tensors"] = stamp(folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(record))
        stamps["record"] = stamp(folder / f"{name}.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))


def in_child(action: Callable[[], None]) -> int:
    """What becomes of a process that does it: 0, 1 if it raises, -9 if it is killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


FILE_OPERATIONS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


def interrupt(
    patch: Callable[[str, Callable], None], at: int, happens: Callable[[], None], forever: bool = False
) -> None:
    """patch(name, function) puts a function in the place of os's; instead of call `at`, counted from 0 over all of
    them (forever: and of all that follow), something else happens; a write is half done by then."""
    count = 0

    def wrap(name: str) -> Callable:
        original = getattr(os, name)

        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            if count - 1 == at or (forever and count - 1 > at):
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                happens()
            return original(*args, **kwargs)

        return counted

    for name in FILE_OPERATIONS:
        patch(name, wrap(name))


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
