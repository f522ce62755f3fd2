"""Where Linux keeps the limits of the container a process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def directories(controller: str, groups: Path, own_group: Path) -> Iterator[tuple[int, Path]]:
    """The version of the interface, 1 or 2, and the directories of the groups that limit this
    process, the innermost first.

    Args:
        groups: where the groups are mounted.
        own_group: the file that names this process's groups.
    """
    for line in read(own_group).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, base = 2, groups
        elif controller in controllers.split(","):
            version, base = 1, groups / controller
        else:
            continue
        own = base / path.lstrip("/")
        for directory in (own, *own.parents):
            if directory.is_relative_to(base):
                yield version, directory


def read(path: Path) -> str:
    """The text of a file; empty if it cannot be read.  Names of groups need not be valid text:
    their bytes are kept."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
