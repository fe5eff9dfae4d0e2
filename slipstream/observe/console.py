"""Defines the console that runs print to."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from rich.console import Console


class Screen(Console):
    """A console that prints plain lines of any length.

    The run continues when the reader of its output exits (`slipstream train | head`), and when its terminal is closed.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, soft_wrap=True)

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)  # everything is written here
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.on_broken_pipe()  # the terminal is closed

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
