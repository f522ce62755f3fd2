"""What groups of figures are called beside all of them together."""

from __future__ import annotations

from collections.abc import Collection

ALL_TASKS = "all"
"""The figures of all tasks together; also the task of what names none."""

_NO_TASK = "no task"


def name_among(task: str, tasks: Collection[str]) -> str:
    """Return what ``task`` is called among ``tasks``, each of which is there once: what names none
    is kept apart from all together, where others name one."""
    return _NO_TASK if task == ALL_TASKS and len(tasks) > 1 else task
