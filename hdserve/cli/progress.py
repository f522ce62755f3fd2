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
    """Shows the progress of a job."""

    _shown: Progress
    _task: TaskID

    def advance(self, num: int = 1) -> None:
        """Show that ``num`` more units are done."""
        self._shown.advance(self._task, num)

    def show(self, num_done: int) -> None:
        """Show that ``num_done`` units are done in total."""
        self._shown.update(self._task, completed=num_done)

    def print(self, line: str) -> None:
        """Write a line above the bar; it stays when the bar disappears."""
        self._shown.console.print(line)


def shown_bars(*columns: ProgressColumn) -> Progress:
    """Bars with what is done before and ``columns`` behind them, which disappear when the job ends;
    none if standard error is not a terminal, which would show an empty line for them."""
    stderr = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )


@contextmanager
def progress(doing: str, total: int, num_done: int = 0) -> Iterator[Bar]:
    """Show how many of ``total`` units are done and the time that is left, until the job ends.

    Args:
        num_done: units that an interrupted job had done before; they do not count for the speed.
    """
    with shown_bars(MofNCompleteColumn(), TimeRemainingColumn()) as shown:
        yield Bar(shown, shown.add_task(doing, total=total, completed=num_done))


@contextmanager
def bytes_progress(total: int) -> Iterator[Bar]:
    """Show how many of ``total`` bytes are read, until the job ends."""
    with shown_bars(DownloadColumn(), TimeElapsedColumn()) as shown:
        yield Bar(shown, shown.add_task("reading", total=total))
