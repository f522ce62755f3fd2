"""Directories that one may not enter, also where the tests are run by root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_NOBODY = 65534


@contextmanager
def open_directory() -> Iterator[Path]:
    """A new directory that everybody may look into, unlike ``tmp_path``: with one in it closed, the
    others are not."""
    with TemporaryDirectory() as name:
        path = Path(name).resolve()
        path.chmod(0o755)
        yield path


@contextmanager
def closed(directory: Path, mode: int = 0) -> Iterator[None]:
    """Nobody may look below ``directory``, or do there what ``mode`` does not allow; root gives up
    its rights meanwhile."""
    before, mode_before = os.getresuid(), directory.stat().st_mode
    directory.chmod(mode)
    if before[1] == 0:
        os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(*before)
        directory.chmod(mode_before)
