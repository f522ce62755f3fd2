"""A lock that keeps two jobs from writing to one place."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from filelock import FileLock

logger = logging.getLogger(__name__)

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP)


def take(path: Path) -> FileLock:
    """The lock ``path``, held until it is released, or its process ends; not held where the file
    system has no locks: a file in place of one would stay behind a killed process.

    Raises:
        Timeout: another job holds it.
        OSError: its file cannot be made.
    """
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.debug("%s: no lock: %s", path, error)
    return lock
