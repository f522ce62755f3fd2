"""Directories that one may not enter, also where the tests are run by root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def closed(directory: Path) -> Iterator[None]:
    """Nobody may look below ``directory``; root gives up its rights meanwhile."""
    before, mode = os.getresuid(), directory.stat().st_mode
    directory.chmod(0)
    if before[1] == 0:
        os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(*before)
        directory.chmod(mode)
