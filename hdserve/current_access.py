"""The access keys that are valid now: changes of their files take effect without a restart."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from threading import Thread

from hdserve.access import Access, Identity
from hdserve.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0

_MAX_WAIT_S = 0.5
"""How long a request waits for a check, which takes less than a millisecond where no disk hangs."""

_LATE_S = 30.0
"""How long a check may take before the log says that it has not ended."""


class CurrentAccess:
    """Checks the key files when somebody signs in, and reads them if they have changed.

    Links are followed, so changes of a Kubernetes volume, whose links are all replaced at once, are
    seen.  Files that cannot be used leave the keys unchanged, are reported once in the log, and are
    read again at each check until they can.  So do files on a disk that hangs: each check has a
    thread of its own, which is hardly waited for.  Only one thread may use this class.

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
        self._late_at_s = math.inf
        self._checking = Thread()
        self._last_error = ""

    @property
    def needs_key(self) -> bool:
        """Tell whether a key is required; the administrator's counts."""
        return bool(self._access.keys)

    def identify(self, authorization: str) -> Identity:
        """Identify the sender of this header by the present keys, see :meth:`Access.identify`."""
        now_s = time.monotonic()
        if self._checking.is_alive():
            self._note_late(now_s)
        elif self._files and now_s >= self._next_check_s:
            self._next_check_s = now_s + self._check_interval_s
            self._late_at_s = now_s + _LATE_S
            self._checking = Thread(target=self._check, name="hdserve-keys", daemon=True)
            self._checking.start()
            self._checking.join(_MAX_WAIT_S)
        return self._access.identify(authorization)

    def _note_late(self, now_s: float) -> None:
        if now_s >= self._late_at_s:
            self._late_at_s = math.inf
            told = "the keys stay as they were: their files have not been read for %g s"
            logger.error(told, _LATE_S)

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
