"""The errors that callers handle. Each message is one sentence with the field, its value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence


class UsageError(ValueError):
    """The user asked for something that cannot be done; the command line exits with code 2."""


class ConfigError(UsageError):
    """A configuration that cannot run."""


class RunFailure(RuntimeError):
    """Work that began and then failed; the command line exits with code 1."""


class NonFiniteError(RuntimeError):
    """The loss or a gradient has an inf or nan; every stage raises it in the same step."""


class PipelineError(RuntimeError):
    """Another stage failed, so this one cannot continue; the message names the stage and what was waited for."""


class StageFailure(RuntimeError):
    """A stage failed; `details` holds its traceback, if it left one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details
        if details:
            self.add_note(f"In the stage:\n{details}")  # shown when nobody catches it


def first_of(faults: Sequence[str], most: int = 4) -> str:
    """Returns the first faults as one text, and the number of those that it leaves out."""
    more = f"; and {len(faults) - most} more" if len(faults) > most else ""
    return "; ".join(faults[:most]) + more


def in_one_line(error: BaseException) -> str:
    """Returns kind and text of an error that others raised, however many lines it has."""
    return " ".join(f"{type(error).__name__}: {error}".split())
