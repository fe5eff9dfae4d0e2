"""Finds the command that the user names, runs it, and turns an error into one line and an exit code."""

from __future__ import annotations

import difflib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import NoReturn

from rich.console import Console

from ..errors import RunFailure, UsageError
from ..transport.environment import under_torchrun

USAGE = """The commands of Slipstream:

    slipstream init [PRESET]
    slipstream train [CONFIG.toml] [--section.field value ...]
    slipstream tune [CONFIG.toml] --tokens N [--budget 2%]
    slipstream reshape RUN LAYOUT
    slipstream schedule NAME --stages P --microbatches M
    slipstream plan [CONFIG.toml] --devices N --memory GIB
    slipstream profile [CONFIG.toml]
    slipstream bench [--only emulated|real] [--device cuda]
    slipstream study [GRID.toml]
    slipstream report RUN ...
    slipstream timeline RUN [--start S --seconds S]
    slipstream prepare SOURCE ... --output PREFIX
    slipstream export RUN[@STEP] FOLDER
    slipstream generate RUN --prompt TEXT
    slipstream eval RUN --tasks TASK ...
    slipstream completion bash

Each explains itself with --help. A user's mistake is one sentence and exit code 2; a stage that failed is one sentence
and exit code 1; an interrupt is exit code 130.
"""
COMMANDS = tuple(re.findall(r"^    slipstream (\S+)", USAGE, re.MULTILINE))
"""Names of all commands. Each is a module of this package that has a function `main(arguments)`."""
IMPORT_SECONDS, RETRY_SECONDS = 20.0, 0.02
"""Maximum time that a signal waits for the end of an import, and the time between two looks."""
SAME_SECONDS = 0.3
"""Signals that are no further apart count as one: `timeout` sends each of its signals twice."""


def main() -> NoReturn:
    # torch prints C++ stacks as warnings where a peer is lost, which a sentence of ours says.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not under_torchrun():  # under torchrun, torchrun ends the stages
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
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may contain bytes that cannot be encoded
    command = arguments[0] if arguments else "--help"
    try:
        if command in ("-h", "--help"):
            print(USAGE, flush=True)
            return 0
        if command == "--version":
            print(f"slipstream {version('slipstream')}", flush=True)
            return 0
        if command not in COMMANDS:
            close = difflib.get_close_matches(command, COMMANDS, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(COMMANDS)}"
            raise UsageError(f"command {command!r} is unknown: {remedy}")
        # The import is here because most commands import torch, and --help and --version should not wait for that.
        import_module(f".{command}", __package__).main(list(arguments[1:]))
        sys.stdout.flush()
    except UsageError as error:
        return _say(error, 2)
    except RunFailure as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output closed the pipe. The rest of the buffer goes to /dev/null, so that the flush at exit
        # does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _say(message: Exception | str, code: int) -> int:
    """Prints the message to stderr as one line and returns the code."""
    console = Console()
    if console.is_terminal and code != 2:
        console.show_cursor()  # a stage with a progress bar hid the cursor, and may have ended before it could show it
        console.print()
    text = " ".join(str(message).split()).removesuffix(".")
    print(f"slipstream: {text}", file=sys.stderr)
    return code


def _end_stages_on_signals() -> None:
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt, so that they also end the stages. By default they would end only
    this process. A forked stage keeps the default behaviour.

    A signal during an import waits for its end. Otherwise half of a module would remain, and a library that catches
    every exception would go on with it."""
    parent, since, raised = os.getpid(), 0.0, -SAME_SECONDS

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal since, raised
        now = time.monotonic()
        if os.getpid() != parent:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif _is_importing(frame) and (not since or now - since < IMPORT_SECONDS):
            since = since or now
            signal.signal(signal.SIGALRM, lambda *_: os.kill(parent, signum))
            signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)
        elif now - raised >= SAME_SECONDS:
            since, raised = 0.0, now
            raise KeyboardInterrupt

    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # Do not replace another handler: nohup ignores SIGHUP on purpose.
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, interrupt)
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda signum, frame: None)  # a request to save, before there is anything to save


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
