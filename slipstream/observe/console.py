"""The console that runs print to."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class Screen(Console):
    """Plain lines of any length, and a run that goes on when nobody reads them any more (`slipstream train | head`)."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
