"""For faults/fuzz.py, one by one and not by dice: special files and odd names wherever a command takes a path, and
numbers beyond all bounds in every field of every command that takes one."""

from __future__ import annotations

import os
import socket
import typing
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from slipstream.cli.plan import PlanArguments
from slipstream.cli.schedule import ScheduleArguments
from slipstream.config.schema import Config

from .fuzz import Case, Make
from .spoilt_configs import BASE, TEXT, fields_of, options

SMALLEST = options(BASE)
PLAN = ["--devices", "2", *options({path: value for path, value in BASE.items() if path.startswith("model.")})]

COMMANDS: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    "a configuration": (".toml", lambda path: ["train", path]),
    "data.sources": (".txt", lambda path: ["train", *SMALLEST, "--data.sources", path]),
    "shards": (".bin", lambda path: ["train", *SMALLEST, "--data.sources", path, "--data.token-dtype", "uint8"]),
    "data.validation_sources": (".txt", lambda path: ["train", *SMALLEST, "--data.validation-sources", path]),
    "data.tokenizer": (".json", lambda path: ["train", *SMALLEST, "--data.tokenizer", path]),
    "run.folder": ("", lambda path: ["train", *SMALLEST, "--run.folder", path]),
    "run.name": ("", lambda path: ["train", *SMALLEST, "--run.name", path]),
    "a plan's configuration": (".toml", lambda path: ["plan", path, "--devices", "2"]),
    "a plan's profile": (".json", lambda path: ["plan", *PLAN, "--profile", path]),
    "a plan's figure": (".svg", lambda path: ["plan", *PLAN, "--figure", path]),
    "a report": ("", lambda path: ["report", path]),
    "a timeline": ("", lambda path: ["timeline", path]),
    "a reshape": ("", lambda path: ["reshape", path, "2"]),
    "a study": (".toml", lambda path: ["study", path]),
    "text to prepare": (".jsonl", lambda path: ["prepare", path, "--output", "out"]),
    "where to prepare": ("", lambda path: ["prepare", "../text.txt", "--output", path]),
    "a drawing": (".svg", lambda path: ["schedule", "two_bw", "--output", path]),
    "a configuration to write": (".toml", lambda path: ["init", "tiny", "--output", path]),
}
"""By what a path is given for: the ending that it should have, and the command."""


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(path.parent)  # the name of a socket has little room
        listening.bind(path.name)


def _endless_folder(path: Path) -> None:
    path.mkdir()
    (path / "again").symlink_to("..")


THINGS: dict[str, Callable[[Path], object]] = {
    "a pipe that nobody writes to": os.mkfifo,
    "a socket": _socket,
    "endless zeros": lambda path: path.symlink_to("/dev/zero"),
    "endless noise": lambda path: path.symlink_to("/dev/urandom"),
    "a full device": lambda path: path.symlink_to("/dev/full"),
    "nothing": lambda path: path.symlink_to("/dev/null"),
    "the memory of a process": lambda path: path.symlink_to("/proc/self/mem"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to what is not there": lambda path: path.symlink_to("nowhere/at/all"),
    "a folder that contains itself": _endless_folder,
    "an empty file": lambda path: path.write_bytes(b""),
    "UTF-16": lambda path: path.write_text(TEXT, encoding="utf-16"),
    "Latin-1": lambda path: path.write_bytes("[tr\xe4in]\nst\xe9ps = 3\n".encode("latin-1")),
    "a byte order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf[train]\nsteps = 2\n"),
    "zero bytes": lambda path: path.write_bytes(b"\0" * 4096),
    "one long line": lambda path: path.write_bytes(b"x" * (1 << 20)),
    "carriage returns": lambda path: path.write_bytes(b"[train]\rsteps = 2\r" * 20),
}
NAMES: dict[str, str] = {
    "a name of a thousand letters": "x" * 1000,
    "a path of five thousand letters": "/".join(["folder"] * 700),
    "a name with a line break": "a\nb",
    "a name that is no text": os.fsdecode(b"\xff\xfe"),
    "a name from right to left": "\u202eabc\U0001f600",
    "the name of nobody's home": "~nobody_of_this_name/x",
    "no name": "",
    "two dots": "../..",
    "a glob": "**/*",
    "a star in brackets": "[*",
}
PATHS = list(product(COMMANDS, [*THINGS, *NAMES]))


def _path_case(what: str, thing: str, folder: Path) -> Case:
    (folder / "text.txt").write_text(TEXT)
    suffix, command = COMMANDS[what]
    if thing in NAMES:
        name = NAMES[thing] + (suffix if thing not in ("no name", "two dots") else "")
    else:
        name = f"thing{suffix}"
        here = os.getcwd()
        THINGS[thing](folder / "here" / name)
        os.chdir(here)
    return Case(f"{what}: {thing}", command(name), may_write=("here", "home"), may_last=True, timeout=45)


NUMBERS = ["1" + "0" * 40, "-1" + "0" * 40, "1e308", "-1e-320", "nan", "-inf", "0x10", "1_0", "\u0663", "1" * 5000]
COUNTED: list[tuple[str, str]] = [
    (command, path)
    for command, cls in (("train", Config), ("plan", PlanArguments), ("schedule", ScheduleArguments))
    for path, hint in fields_of(cls).items()
    if {int, float} & {hint, *typing.get_args(hint)} and (command == "train" or "." not in path)
]
"""By command, every field that is a number."""
CASES: list[tuple[str, str, str]] = [(*where, number) for where in COUNTED for number in NUMBERS]


def _number_case(command: str, path: str, number: str, folder: Path) -> Case:
    (folder / "text.txt").write_text(TEXT)
    option = f"--{path.replace('_', '-')}={number}"
    words: dict[str, list[str]] = {"train": SMALLEST, "plan": PLAN, "schedule": ["two_bw"]}
    return Case(
        f"{command}, a number: {path} = {number[:20]}",
        [command, *words[command], option],
        may_write=("here", "home"),
        may_last=True,
    )


def _maker(case_of: Callable[..., Case], about: Sequence[str]) -> Make:
    return lambda dice, folder, templates: case_of(*about, folder)


ENUMERATED: dict[str, list[Make]] = {
    "path": [_maker(_path_case, pair) for pair in PATHS],
    "number": [_maker(_number_case, case) for case in CASES],
}
"""By kind."""
