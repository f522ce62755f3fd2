"""Writing results so that they are on disk completely, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from hdserve.errors import ConfigError


def write_whole(path: Path, text: str) -> None:
    """Write ``text``; an interruption leaves ``path`` unchanged.

    If ``path`` is not a regular file, for example a pipe, it is written to directly.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        new = target.with_name(f".{target.name}.{os.getpid()}.new")
        try:
            new.write_text(text, encoding="utf-8")
            if target.exists():
                new.chmod(target.stat().st_mode & 0o7777)
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
