"""The processes of a session: a command that leads its own session, and all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def kill_session(session: int) -> None:
    """Kill whatever is left of a session.

    Ray gives each of its processes its own group, and HAProxy is meant to outlive the process that
    supervises it; so killing the leader's group is not enough.
    """
    for pid in _members(session):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def _members(session: int) -> Iterator[int]:
    """Yield the processes of a session; none if the system has no ``/proc``."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(directory.name)) == session:
                yield int(directory.name)
