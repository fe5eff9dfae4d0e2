"""Locates the folder of a run, checks whether it may be used, and fills it at the start."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..checkpoint.reading import FOLDER_NAME
from ..config.schema import Config
from ..config.toml import to_toml
from ..errors import ConfigError
from .build import Components
from .reshape import COMMAND_NAME


def run_folder(config: Config) -> Path:
    return Path(config.run.folder) / config.run.name


_held: set[int] = set()
"""File descriptors of the folders that this process occupies."""


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Locks a run's folder for the duration of the `with` block. Raises a ConfigError if another process has it: two
    runs in one folder would overwrite each other's files. The kernel ends the lock with the process, however it ends.
    Some network file systems cannot lock a folder. There nothing is checked."""
    with ExitStack() as stack:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # others report these
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            _held.add(descriptor)
            stack.callback(_held.discard, descriptor)
            _lock(descriptor, folder)
        yield


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run.name = {folder.name!r} is in use, another process trains in {folder}: stop it, or choose another"
        ) from None
    except OSError:  # a file system that cannot lock a folder
        pass


def _release() -> None:
    """Closes the folders in a forked process, which would otherwise keep the lock when its parent is killed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_release)


def has_summary(folder: Path, step: int) -> bool:
    """Returns whether the folder has a summary of this step.

    A run that was killed after its last checkpoint may have none yet.
    """
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["steps"] == step
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_folder(folder: Path, overwrite: bool, resumes: bool) -> None:
    try:
        if not (folder.exists() or folder.is_symlink()):
            return
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):  # left by a killed run
            return
        is_run = (folder / "config.toml").exists() and not folder.is_symlink()
    except OSError as error:
        raise unwritable(folder, error) from error
    if resumes and (is_run or (folder / FOLDER_NAME).is_dir()):
        return
    if not overwrite:
        raise ConfigError(
            f"run.name = {folder.name!r} has been used, {folder} exists: choose another, set checkpoint.resume to "
            "continue it, or run.overwrite"
        )
    if not is_run:
        raise ConfigError(
            f"run.name = {folder.name!r} would overwrite {folder}, which has no config.toml and is no run: "
            "choose another, or remove it yourself"
        )


def make_folder(folder: Path, config: Config, components: Components, keep: bool) -> None:
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        if folder.exists() and not keep:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (COMMAND_NAME, "summary.json"):  # left by an earlier part of the run
            (folder / stale).unlink(missing_ok=True)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        if components.tokenizer_json is not None:
            (folder / "tokenizer.json").write_bytes(components.tokenizer_json)
    except OSError as error:
        for parent in made:  # a run that cannot start leaves no folders behind
            with suppress(OSError):
                parent.rmdir()
        raise unwritable(folder, error) from error


def discard_unstarted(folder: Path) -> None:
    """Removes the new folder of a run that has trained nothing, so that its name can be used again. For example, a rank
    did not come."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {"config.toml", "tokenizer.json"}:
            shutil.rmtree(folder)


def unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.folder = {str(folder.parent)!r} cannot take the folder {folder.name!r} ({error.strerror}): use another"
    )
