"""Opens files that a user named, or that were found in a folder whose content is unknown."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


def open_plain_file(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading.

    Raises an OSError for anything else: opening a pipe could block, and reading a device might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, os.strerror(number) if stat.S_ISDIR(mode) else "it is no plain file", str(path))


def read_plain_file(path: Path) -> bytes:
    with open_plain_file(path) as file:
        return file.read()


def check_output(path: Path) -> None:
    """Raises an OSError if the path is a pipe without a reader, because opening it for writing would block."""
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def expand_home(path: str | Path) -> Path:
    """Expands ~ as the shell does. The path is returned unchanged if the home folder is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
