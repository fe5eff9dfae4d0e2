"""The command line: init | train | reshape | schedule | plan | profile | bench | study | report | timeline | prepare.

    slipstream init [PRESET]
    slipstream train [CONFIG.toml] [--section.field value ...]
    slipstream reshape RUN LAYOUT
    slipstream schedule NAME --stages P --microbatches M
    slipstream plan [CONFIG.toml] --devices N --memory GIB
    slipstream profile [CONFIG.toml]
    slipstream bench [--only emulated|real] [--device cuda]
    slipstream study [GRID.toml]
    slipstream report RUN ...
    slipstream timeline RUN [--start S --seconds S]
    slipstream prepare SOURCE ... --output PREFIX

Each explains itself with --help. A user's mistake is one sentence and exit code 2; a stage that failed is one sentence
and exit code 1.
"""

from __future__ import annotations

import difflib
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from rich.console import Console

from ..errors import RunFailure, UsageError
from ..transport.environment import under_torchrun

COMMANDS = (
    "init",
    "train",
    "reshape",
    "schedule",
    "plan",
    "profile",
    "bench",
    "study",
    "report",
    "timeline",
    "prepare",
)
"""Each is a module of this package, with a function `main(arguments)`."""


def main() -> NoReturn:
    if not under_torchrun():  # whose stages are not ours to end
        _end_stages_on_signals()
    if "" not in sys.path:
        sys.path.insert(0, "")  # the user's own models and sinks are looked for in this folder too
    code = run(sys.argv[1:])
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a process group that lost a peer may hang in its destructor
    sys.exit(0)


def run(arguments: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if arguments[0] == "--version":
        print(f"slipstream {version('slipstream')}")
        return 0
    command = arguments[0]
    try:
        if command not in COMMANDS:
            close = difflib.get_close_matches(command, COMMANDS, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(COMMANDS)}"
            raise UsageError(f"command {command!r} is unknown: {remedy}")
        # Imported only now: most of them import torch, which --help and --version should not wait for.
        import_module(f".{command}", __package__).main(list(arguments[1:]))
        sys.stdout.flush()
    except UsageError as error:
        return _say(error, 2)
    except RunFailure as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _say(message: Exception | str, code: int) -> int:
    """One line, however many the message had."""
    console = Console()
    if console.is_terminal and code != 2:
        console.show_cursor()  # a stage that was drawing a progress bar hid it, and may be past showing it again
        console.print()
    text = " ".join(str(message).split()).removesuffix(".")
    print(f"slipstream: {text}", file=sys.stderr)
    return code


def _end_stages_on_signals() -> None:
    """SIGTERM and SIGHUP would end this process alone. As an interrupt, they end the stages too; in a stage they stay
    what they are."""
    parent = os.getpid()

    def interrupt(signum: int, frame: object) -> None:
        if os.getpid() == parent:
            raise KeyboardInterrupt
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # nohup ignores the one, and means it
            signal.signal(signum, interrupt)
