"""Writing results so that they are on disk completely, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hdserve.databases.snapshot import sync_directory
from hdserve.errors import ConfigError


def write_whole(path: Path, text: str) -> None:
    """Write ``text``; an interruption or a power failure leaves ``path`` unchanged.  Once this
    returns, a power failure no longer loses ``text``.

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
            with new.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                new.chmod(target.stat().st_mode & 0o7777)
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)
        with suppress(OSError):  # it is written, also where a directory cannot be synced
            sync_directory(target.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
