"""Files that are whole or not there, and files that are read without trusting them."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PIECE_BYTES = 4 << 20
"""Hashed and written at a time: other threads get their turn in between."""


class CheckpointError(RuntimeError):
    """One sentence: which file, what is wrong with it, and what to do where something can be done."""


class Stamp(NamedTuple):
    """What a file's bytes are compared by."""

    size: int
    sha256: str


def reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def write_file(path: Path, chunks: Iterable[memoryview | bytes]) -> Stamp:
    """Written beside, synced, read back and compared with what was meant, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    digest, size = hashlib.sha256(), 0
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                for start in range(0, len(view), PIECE_BYTES):
                    piece = view[start : start + PIECE_BYTES]
                    digest.update(piece)
                    size += len(piece)
                    while piece:
                        piece = piece[os.write(descriptor, piece) :]
            os.fsync(descriptor)
            _drop_cached(descriptor)
            meant = Stamp(size, digest.hexdigest())
            if stamp(descriptor) != meant:
                raise CheckpointError(f"{path} is not on disk as it was written: check the disk")
            _drop_cached(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except Exception:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return meant


def stamp(descriptor: int) -> Stamp:
    """Of the whole file, wherever it was read to before."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        return Stamp(os.fstat(descriptor).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _drop_cached(descriptor: int) -> None:
    """What is read next comes from the disk, where the system can be told so, and memory is left to training."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Makes renames in it last. Some file systems cannot, and say EINVAL."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def open_plain(folder: Path, name: str) -> Iterator[io.FileIO]:
    """Of a file in the folder itself. Links could lead out of it, and a pipe would be waited for: both are refused.

    An OSError inside the block is one of this file's, too.
    """
    path = folder / name
    try:
        within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=within)
        finally:
            os.close(within)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(f"{path} is no plain file")
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                yield file
        finally:
            os.close(descriptor)
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else f"cannot be read ({reason(error)})"
        raise CheckpointError(f"{path} {what}") from error


def read_into(file: io.FileIO, start: int, buffer: memoryview, path: Path) -> None:
    """Fills the buffer from there on."""
    file.seek(start)
    while buffer:
        num_read = file.readinto(buffer)
        if not num_read:
            raise CheckpointError(f"{path} ends too early: {len(buffer):,} bytes are missing")
        buffer = buffer[num_read:]


def discard(folder: Path) -> None:
    """Renamed first, so that half of it is never taken for the whole. Trouble is no reason to stop: it is in nobody's
    way under its new name, and `Store.clean` tries again."""
    doomed = folder.with_name(f"{folder.name.partition('.')[0]}.{secrets.token_hex(4)}.deleted")
    with suppress(OSError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
