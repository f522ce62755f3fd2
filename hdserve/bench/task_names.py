"""The names of groups of figures, next to the name for all of them together."""

from __future__ import annotations

from collections.abc import Collection

ALL_TASKS = "all"
"""The name for all tasks together; also the task of rows that name none."""

_NO_TASK = "no task"


def name_among(task: str, tasks: Collection[str]) -> str:
    """Return the name for ``task`` among ``tasks``, each of which occurs once: rows that name no
    task are kept separate from all together, if others name one."""
    return _NO_TASK if task == ALL_TASKS and len(tasks) > 1 else task
