"""Writes files atomically, and reads plain files only."""

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
"""Number of bytes that are hashed and written at a time. Other threads can run in between."""


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written or read. The message is one sentence: which file, what is wrong with
    it, and what to do if something can be done."""


class Stamp(NamedTuple):
    """The size and digest of a file, by which its bytes are compared."""

    size: int
    sha256: str


def reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def write_file(path: Path, chunks: Iterable[memoryview | bytes]) -> Stamp:
    """Writes a file atomically: under a temporary name, synced, read back and compared, then renamed. Returns its
    stamp. An OSError names the file in its `filename`."""
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
    except Exception as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    return meant


def stamp(descriptor: int) -> Stamp:
    """Returns the stamp of the whole file, independent of the current position in it."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        return Stamp(os.fstat(descriptor).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _drop_cached(descriptor: int) -> None:
    """Drops the file from the page cache, where the system supports it. So the next read comes from the disk, and the
    memory stays free for training."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable. Some file systems cannot do this and return EINVAL, which is ignored."""
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
    """Opens a regular file that is directly in the folder. It refuses links, which could lead out of the folder, and
    pipes, which could block.

    An OSError inside the block is treated as an error of this file.
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
    """Fills the buffer with the bytes of the file from `start` on."""
    file.seek(start)
    while buffer:
        num_read = file.readinto(buffer)
        if not num_read:
            raise CheckpointError(f"{path} ends too early: {len(buffer):,} bytes are missing")
        buffer = buffer[num_read:]


def discard(folder: Path) -> None:
    """Deletes a folder. It is renamed first, so that a half-deleted folder is never mistaken for a complete one. Errors
    are ignored: under its new name the folder does no harm, and `Store.clean` tries again."""
    doomed = folder.with_name(f"{folder.name.partition('.')[0]}.{secrets.token_hex(4)}.deleted")
    with suppress(OSError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
