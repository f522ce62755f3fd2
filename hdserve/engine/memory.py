"""How much memory is left for this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def free_bytes(device: torch.device) -> float:
    """Free memory of ``device``; of the CPU's no more than the container's limit leaves."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(float(machine), free_bytes_of_group())


def free_bytes_of_group(groups: Path = _GROUPS, own_group: Path = _OWN_GROUP) -> float:
    """What the memory limits of the control groups (version 2 or 1) leave; infinite without one.

    Inactive pages of files count as free: they go first when memory is short.
    """
    return min((_free_bytes_in(*names) for names in _limits(groups, own_group)), default=math.inf)


def _limits(groups: Path, own_group: Path) -> Iterator[tuple[Path, Path, str]]:
    """The files of each limit and usage, and how its statistics call inactive pages of files."""
    for line in _read(own_group).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = base / path.lstrip("/")
        for directory in (own, *own.parents):
            if directory.is_relative_to(base):
                yield directory / names[0], directory / names[1], names[2]


def _free_bytes_in(limit: Path, usage: Path, inactive: str) -> float:
    maximum, used = _read(limit).strip(), _read(usage).strip()
    if not (maximum.isdecimal() and used.isdecimal()):
        return math.inf
    statistics = dict(
        line.split(" ", 1) for line in _read(limit.parent / "memory.stat").splitlines()
    )
    return max(0.0, float(maximum) - float(used) + float(statistics.get(inactive, 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
