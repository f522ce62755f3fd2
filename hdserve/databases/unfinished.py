"""The names of files that a build of a statistics database has not finished."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT_NAME = "unfinished"
"""The directory of the state to continue from; the next and the last one have a suffix."""

PARTIAL_SUFFIX = ".partial"


def is_unfinished(path: Path) -> bool:
    """Whether a file, named relative to the directory of a database, does not belong to it."""
    return path.parts[0].startswith(CHECKPOINT_NAME) or path.suffix == PARTIAL_SUFFIX
