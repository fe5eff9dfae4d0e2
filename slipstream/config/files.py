"""Files that were named by hand, or found in a folder that anyone may have filled."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


def open_plain_file(path: Path) -> io.BufferedReader:
    """A pipe would be waited for and a device may have no end: what is no plain file is an OSError like any other."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        return file
    file.close()
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, os.strerror(number) if stat.S_ISDIR(mode) else "it is no plain file", str(path))


def read_plain_file(path: Path) -> bytes:
    with open_plain_file(path) as file:
        return file.read()


def check_output(path: Path) -> None:
    """A pipe that nobody reads would be waited for: an OSError like any other."""
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def expand_home(path: str | Path) -> Path:
    """~ as the shell knows it; of somebody who is not known here, the path stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
