"""Defines the console that runs print to."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class Screen(Console):
    """A console that prints plain lines of any length.

    The run continues when the reader of its output exits (`slipstream train | head`).
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
