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
