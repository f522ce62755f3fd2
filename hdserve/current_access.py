"""The access keys that are valid now: changes of their files take effect without a restart."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from hdserve.access import Access, Identity
from hdserve.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0


class CurrentAccess:
    """Checks the key files when somebody signs in, and reads them if they have changed.

    Links are followed, so changes of a Kubernetes volume, whose links are all replaced at once, are
    seen.  Files that cannot be used leave the keys unchanged, are reported once in the log, and are
    read again at each check until they can.  Only one thread may use it.

    Args:
        access: from the files as they were elsewhere, some time ago; they are read again at first.
        check_interval_s: the least time between two checks of the files.
    """

    def __init__(self, access: Access, check_interval_s: float = CHECK_INTERVAL_S) -> None:
        self._access = access
        self._check_interval_s = check_interval_s
        self._files = [path for path in (access.keys_file, access.admin_key_file) if path]
        self._states: list[_State | None] | None = None
        self._next_check_s = 0.0
        self._last_error = ""

    @property
    def needs_key(self) -> bool:
        """Tell whether a key is required; the administrator's counts."""
        return bool(self._access.keys)

    def identify(self, authorization: str) -> Identity:
        """Identify the sender of this header by the present keys, see :meth:`Access.identify`."""
        now_s = time.monotonic()
        if self._files and now_s >= self._next_check_s:
            self._next_check_s = now_s + self._check_interval_s
            self._check()
        return self._access.identify(authorization)

    def _check(self) -> None:
        states = [_state(path) for path in self._files]
        if states == self._states:
            return
        try:
            found = self._access.read_again()
        except ConfigError as error:
            if error.message != self._last_error:
                logger.error("the keys stay as they were: %s", error.message)
            self._last_error = error.message
            return
        self._states, self._last_error = states, ""
        if found != self._access:
            logger.info("the keys have changed; there are %d API keys", len(found.keys))
        self._access = found


_State = tuple[int, int, int, int, int]


def _state(path: Path) -> _State | None:
    """Return what changes when a file does, or ``None`` if it cannot be accessed."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
