"""A bar on standard error while a job runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@dataclass(frozen=True, slots=True)
class Bar:
    """Shows what a job tells of itself."""

    _shown: Progress
    _task: TaskID

    def advance(self, num: int = 1) -> None:
        """Show that ``num`` more units are done."""
        self._shown.advance(self._task, num)

    def show(self, num_done: int) -> None:
        """Show that ``num_done`` units are done, all told."""
        self._shown.update(self._task, completed=num_done)

    def print(self, line: str) -> None:
        """Write a line above the bar, which stays when the bar goes."""
        self._shown.console.print(line)


def shown_bars(*columns: ProgressColumn) -> Progress:
    """Bars that go when the job ends; none where standard error is no terminal, which would have an
    empty line of them."""
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)


@contextmanager
def progress(doing: str, total: int, num_done: int = 0) -> Iterator[Bar]:
    """Show how many of ``total`` units are done and the time that is left, until the job ends.

    Args:
        num_done: units that an interrupted job had done before, which say nothing of the speed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with shown_bars(*columns, TimeRemainingColumn()) as shown:
        yield Bar(shown, shown.add_task(doing, total=total, completed=num_done))


@contextmanager
def bytes_progress(total: int) -> Iterator[Bar]:
    """Show how many of ``total`` bytes are read, until the job ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with shown_bars(*columns) as shown:
        yield Bar(shown, shown.add_task("reading", total=total))
