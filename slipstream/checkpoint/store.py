"""A folder of checkpoints. Several processes write the parts of each, without communicating with one another.

FOLDER/step-00000200.ATTEMPT.partial/     parts arrive: NAME.safetensors, then NAME.json when that is on disk
FOLDER/step-00000200.ATTEMPT.committing/  all parts are there: the process that renamed the folder adds manifest.json
FOLDER/step-00000200/                     committed
FOLDER/step-00000200.TOKEN.replaced/      committed earlier, while a newer checkpoint of the same step replaces it
FOLDER/step-00000200.TOKEN.deleted/       being deleted

Each transition between these states is one rename, so a process may be killed at any time: a reader finds the old
checkpoint or the new one, never a mixture. Nothing is ever unpickled, and every file has a digest.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import CheckpointError, discard, open_plain, reason, stamp, sync_folder, write_file
from .records import MANIFEST, Manifest, PartFiles, PartRecord, read_json
from .tensors import TensorFile, encode, read_header, stream

FOLDER_NAME = re.compile(r"step-([0-9]{8,18})(?:\.([A-Za-z0-9_-]+)\.(partial|committing|replaced|deleted))?")
TENSORS, RECORD = ".safetensors", ".json"
RECORD_BYTES = 4096
"""Estimated size of NAME.json in bytes. Facts are small compared with tensors."""


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint that one process writes."""

    name: str
    """File name without suffix, such as "stage-0" or "stage-0.replica-1"."""
    tensors: Mapping[str, Tensor]
    """Tensors by name. They must be contiguous, on the CPU, and unchanged until they are written. Names are
    arbitrary."""
    facts: Mapping[str, Any]
    """Data in JSON. When it is read, tuples have become lists and all keys strings. nan and inf are refused."""


class Checkpoint(Mapping[str, Tensor]):
    """A committed checkpoint that was intact when it was opened: its tensors by name, each read when it is accessed."""

    def __init__(
        self, step: int, folder: Path, facts: dict[str, dict[str, Any]], files: Mapping[str, TensorFile]
    ) -> None:
        self.step = step
        self.facts = facts
        """Facts of every part, by its name."""
        self._folder = folder
        self._files = files
        self._parts: dict[str, str] = {}
        """The part of every tensor, by the name of the tensor."""
        for part, file in files.items():
            for name in file.entries:
                if name in self._parts:
                    raise CheckpointError(f"{folder} has tensor {name[:200]!r} in both {self._parts[name]} and {part}")
                self._parts[name] = part

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self.read([name])[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def names(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns the dtype and shape of the tensors of all parts, by name."""
        return {name: self._files[part].entries[name][:2] for name, part in self._parts.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads tensors. It opens only the files that it needs, and does not verify their digests again."""
        wanted: dict[str, list[str]] = {}
        names = list(names)
        for name in names:
            if name not in self:
                raise CheckpointError(f"{self._folder} has no tensor {name[:200]!r}")
            wanted.setdefault(self._parts[name], []).append(name)
        found: dict[str, Tensor] = {}
        for part, its_names in wanted.items():
            with open_plain(self._folder, part + TENSORS) as file:
                found |= self._files[part].read(file, its_names)
        return {name: found[name] for name in names}


class _Found(NamedTuple):
    """A folder in the store's folder, with the fields of its name."""

    step: int
    attempt: str | None
    state: str | None
    path: Path


class Store:
    """Writes and reads the checkpoints of a run.

    folder       the folder of all checkpoints of a run
    keep_last    number of newest checkpoints to keep
    keep_every   keep also checkpoints whose step is divisible by this; 0 means no others
    attempt      letters and digits that are the same for all processes of a launch and different for every launch, so
                 that parts of two launches never form one checkpoint; None means random ones, for a single process
    """

    def __init__(self, folder: Path, keep_last: int = 2, keep_every: int = 0, attempt: str | None = None) -> None:
        if keep_last < 1 or keep_every < 0:
            raise ValueError(f"keep_last is {keep_last} and keep_every {keep_every}: use at least 1 and 0")
        self.folder = Path(folder)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._attempt = attempt or secrets.token_hex(4)

    # ---- writing

    def write(self, step: int, part: Part, num_parts: int) -> bool:
        """Writes a part. If it is the last of `num_parts`, commits the checkpoint, deletes checkpoints that need not be
        kept, and returns True. Any process may be the last one. Each process must write its steps in order.

        If it fails with a CheckpointError, nothing of this step remains: without this part, the others are useless.
        """
        partial = self._path(step, self._attempt, "partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._discard_hopeless(step, part.name)
            self._check_space(part)
            partial.mkdir(exist_ok=True)
            tensors = write_file(partial / (part.name + TENSORS), stream(part.tensors))
            record = PartRecord(step, num_parts, tensors, dict(part.facts))
            write_file(partial / (part.name + RECORD), [record.encode(part.name)])
            committing = self._claim(step, num_parts)
        except Exception as error:
            gone = isinstance(error, FileNotFoundError) and self.folder.is_dir() and not partial.exists()
            discard(partial)
            if gone:
                raise CheckpointError(f"{partial} is gone: another process gave this checkpoint up") from error
            if isinstance(error, OSError):
                raise CheckpointError(f"{error.filename or partial} cannot be written ({reason(error)})") from error
            raise
        if committing is not None:
            self._commit(step, committing, num_parts)
            self._prune(step)
        return committing is not None

    def _claim(self, step: int, num_parts: int) -> Path | None:
        """Claims the commit if all parts are there. If several processes find all parts, only one succeeds in renaming
        the folder and returns its new path. The others find it gone and return None, because the first one will commit
        the checkpoint."""
        partial, committing = (self._path(step, self._attempt, state) for state in ("partial", "committing"))
        try:
            if len(_part_names(partial)) < num_parts:
                return None
            os.rename(partial, committing)
        except FileNotFoundError:
            if committing.exists() or self._path(step).exists():
                return None
            raise
        return committing

    def _commit(self, step: int, committing: Path, num_parts: int) -> None:
        try:
            parts = {name: self._stamps(committing, name, step, num_parts) for name in _part_names(committing)}
            write_file(committing / MANIFEST, [Manifest(step, parts).encode()])
            sync_folder(committing)
            self._swap_in(step, committing)
        except Exception as error:
            discard(committing)
            if isinstance(error, OSError):
                raise CheckpointError(f"{committing} cannot be committed ({reason(error)})") from error
            raise

    def _stamps(self, folder: Path, name: str, step: int, num_parts: int) -> PartFiles:
        text, record_stamp = read_json(folder, name + RECORD)
        record = PartRecord.decode(text, folder / (name + RECORD))
        if (record.step, record.num_parts) != (step, num_parts):
            raise CheckpointError(
                f"{folder} has a part {name} that is one of {record.num_parts} of step {record.step}, "
                f"and others that are of {num_parts} of step {step}"
            )
        tensors = folder / (name + TENSORS)
        if not tensors.is_file() or tensors.lstat().st_size != record.tensors.size:
            raise CheckpointError(f"{tensors} is not what {name}{RECORD} says it was")
        return PartFiles(record_stamp, record.tensors)

    def _swap_in(self, step: int, committing: Path) -> None:
        """Moves the checkpoint to its final name. Two folders cannot be exchanged atomically. In between, readers find
        the old checkpoint under the name that ends in ".replaced"."""
        committed = self._path(step)
        replaced = self._path(step, secrets.token_hex(4), "replaced")
        with suppress(FileNotFoundError):
            os.rename(committed, replaced)
        try:
            os.rename(committing, committed)
        except OSError:
            with suppress(OSError):
                os.rename(replaced, committed)
            raise
        sync_folder(self.folder)
        discard(replaced)

    def _prune(self, step: int) -> None:
        """Deletes checkpoints that need not be kept. Checkpoints of later steps stay: they are from a run that has been
        resumed from an earlier step, and will be replaced one by one."""
        steps = [earlier for earlier in self.steps() if earlier <= step]
        for earlier in steps[: -self._keep_last]:
            if not self._keep_every or earlier % self._keep_every:
                discard(self._path(earlier))

    def _discard_hopeless(self, step: int, name: str) -> None:
        """Deletes unfinished earlier checkpoints of this launch that lack this part, because it failed or was skipped.
        This process will not write it any more. So they would never be complete, and on a full disk they would keep it
        full."""
        for found in self._list():
            past = found.state == "partial" and found.attempt == self._attempt and found.step < step
            if past and not (found.path / (name + RECORD)).exists():
                discard(found.path)

    def clean(self) -> None:
        """Removes or repairs what crashes have left behind. One process calls it, once, before any process of the
        launch writes."""
        for found in self._list():
            if found.state == "replaced" and not self._path(found.step).exists():
                with suppress(OSError):
                    os.rename(found.path, self._path(found.step))
            elif found.state == "deleted":
                shutil.rmtree(found.path, ignore_errors=True)
            elif found.state is not None:
                discard(found.path)

    # ---- space

    @staticmethod
    def needed_bytes(part: Part) -> int:
        header, _ = encode(part.tensors)
        return len(header) + sum(tensor.nbytes for tensor in part.tensors.values()) + RECORD_BYTES

    def _check_space(self, part: Part) -> None:
        """Raises CheckpointError if there is not enough space for a part, before anything is written. Other processes
        may use up the same space. Then the write itself fails."""
        needed, free = self.needed_bytes(part), shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                f"{part.name} needs {_in_words(needed)}, {self.folder} has {_in_words(free)} left: "
                "make room, or keep fewer checkpoints"
            )

    # ---- reading

    def steps(self) -> list[int]:
        """Returns the steps of the committed checkpoints, in order."""
        return sorted({found.step for found in self._list() if found.state in (None, "replaced")})

    def newest(self, on_damage: Callable[[str], None]) -> Checkpoint | None:
        """Returns the newest checkpoint that is complete and intact. For each one that is not, it calls `on_damage`
        with one sentence (which file, what is wrong) and tries the previous one."""
        for step in reversed(self.steps()):
            try:
                return self.open(step)
            except CheckpointError as damage:
                on_damage(str(damage))
        return None

    def open(self, step: int, verify: bool = True) -> Checkpoint:
        """Opens a checkpoint. Raises CheckpointError if it is damaged or missing. With `verify=False`, it does not
        compare the tensor files with their digests, because another process has just done so."""
        folder = self._committed(step)
        text, _ = read_json(folder, MANIFEST)
        manifest = Manifest.decode(text, folder / MANIFEST)
        if manifest.step != step:
            raise CheckpointError(f"{folder / MANIFEST} is of step {str(manifest.step)[:20]}")
        facts, files = {}, {}
        for name, stamps in manifest.parts.items():
            text, record_stamp = read_json(folder, name + RECORD)
            if record_stamp != stamps.record:
                raise _damaged(folder / (name + RECORD))
            record = PartRecord.decode(text, folder / (name + RECORD))
            if (record.step, record.num_parts, record.tensors) != (step, len(manifest.parts), stamps.tensors):
                raise CheckpointError(f"{folder / (name + RECORD)} belongs to another checkpoint")
            path = folder / (name + TENSORS)
            with open_plain(folder, path.name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != stamps.tensors.size:
                    raise CheckpointError(f"{path} has {size:,} bytes, and {MANIFEST} says otherwise")
                if verify and stamp(file.fileno()) != stamps.tensors:
                    raise _damaged(path)
                files[name] = read_header(file, path)
            facts[name] = record.facts
        return Checkpoint(step, folder, facts, files)

    # ---- names

    def _path(self, step: int, attempt: str | None = None, state: str | None = None) -> Path:
        return self.folder / (f"step-{step:08d}" if attempt is None else f"step-{step:08d}.{attempt}.{state}")

    def _committed(self, step: int) -> Path:
        folder = self._path(step)
        if os.path.lexists(folder):
            return folder
        asides = [found.path for found in self._list() if found.step == step and found.state == "replaced"]
        if not asides:
            raise CheckpointError(f"{folder} does not exist: there are {self.steps() or 'none'}")
        return asides[0]

    def _list(self) -> Iterator[_Found]:
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read ({reason(error)})") from error
        for name in names:
            match = FOLDER_NAME.fullmatch(name)
            if match and match[1] == f"{int(match[1]):08d}":
                yield _Found(int(match[1]), match[2], match[3], self.folder / name)


def _part_names(folder: Path) -> list[str]:
    return [name.removesuffix(RECORD) for name in os.listdir(folder) if name.endswith(RECORD) and name != MANIFEST]


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: its bytes have another sha256 than {MANIFEST} says")


def _in_words(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"
