"""Names of files as they are printed and kept."""

from __future__ import annotations

import os
from pathlib import Path


def shown(path: Path) -> str:
    """Return a path as text that can be written: it may have bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def shown_name(path: Path) -> str:
    """Return the last part of a path as such a text."""
    return shown(Path(path.name))
