"""A progress bar for each corpus on standard error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hdserve.cli.progress import shown_bars


class CorpusBars:
    """Shows the progress of a build."""

    def __init__(self, shown: Progress, tasks: Mapping[Path, TaskID]) -> None:
        self._shown = shown
        self._tasks = tasks
        self._begun_tokens: int | None = None

    def report(self, path: Path, num_bytes: int, num_tokens: int) -> None:
        """Show that ``num_bytes`` of ``path`` were read, and ``num_tokens`` counted in total; the
        speed is measured since the first report."""
        if self._begun_tokens is None:
            self._begun_tokens = num_tokens
        elapsed_s = sum(task.elapsed or 0.0 for task in self._shown.tasks[:1])
        speed = (num_tokens - self._begun_tokens) / max(elapsed_s, 1e-9)
        told = f"{num_tokens:,} tokens, {speed:,.0f}/s"
        self._shown.update(self._tasks[path], completed=num_bytes, speed=told)

    def print(self, line: str) -> None:
        """Write a line above the bars; it stays when the bars disappear."""
        self._shown.console.print(line)


@contextmanager
def corpus_progress(paths: Sequence[Path]) -> Iterator[CorpusBars]:
    """Show how much of each file is read, until the job ends."""
    columns = (
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    with shown_bars(*columns) as shown:
        tasks = {
            path: shown.add_task(path.name, total=path.stat().st_size, speed="") for path in paths
        }
        yield CorpusBars(shown, tasks)
