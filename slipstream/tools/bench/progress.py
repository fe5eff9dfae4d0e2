"""The progress bar over the whole matrix. Stage 0 draws it between two turns, because a drawing thread would cost a
contender time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ...observe.console import Screen
from .contenders import World
from .matrix import guessed_seconds, title, total_seconds
from .turns import Turn


class Bar:
    """Draws the progress when it is called: with a turn before that turn, and with None after the last turn of a world.
    It draws in the process that calls it, and can be pickled before."""

    def __init__(self, matrix: Sequence[World], index: int) -> None:
        self._world = matrix[index]
        self._before = sum(map(total_seconds, matrix[:index]))
        self._total = sum(map(total_seconds, matrix))

    def __call__(self, turn: Turn | None) -> None:
        progress, task = self._drawn
        if turn is None:
            progress.stop()
            return
        number, index = turn
        world, contenders = self._world, self._world.contenders
        done = self._before + number * total_seconds(world) / world.num_rounds
        done += sum(guessed_seconds(world, contender) for contender in contenders[:index])
        words = f"{title(world)}, round {number + 1}/{world.num_rounds}: {contenders[index].name}"
        progress.update(task, completed=done, description=words, left=minutes(self._total - done), refresh=True)

    @cached_property
    def _drawn(self) -> tuple[Progress, TaskID]:
        screen = Screen()
        progress = Progress(
            BarColumn(20),
            TextColumn("{task.fields[left]} left  {task.description}"),
            console=screen,
            auto_refresh=False,
            transient=True,
            disable=not screen.is_terminal,
        )
        task = progress.add_task("", total=self._total, left="")
        progress.start()
        return progress, task


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
