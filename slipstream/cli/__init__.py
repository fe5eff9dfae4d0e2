"""The command line: one module per command."""

from .dispatch import main, run

__all__ = ["main", "run"]
