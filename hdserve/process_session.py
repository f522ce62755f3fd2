"""The processes of a session: of a command that was started in one, and all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def kill_session(session: int) -> None:
    """End whatever is left of a session.

    Ray gives each of its processes a group of its own, and HAProxy is to outlive the one that
    looks after it; so the group of the first is not all.
    """
    for pid in _members(session):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def _members(session: int) -> Iterator[int]:
    """Yield the processes of a session; none where the system has no ``/proc``."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(directory.name)) == session:
                yield int(directory.name)
