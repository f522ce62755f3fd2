"""How much memory is left for this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from hdserve.engine.control_groups import GROUPS, OWN_GROUP, directories, read

MEMORY_INFO = Path("/proc/meminfo")

_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def free_bytes(device: torch.device, gpu_share: float = 1.0) -> float:
    """Free memory of ``device``; of the CPU's no more than the container's limit leaves, of a GPU's
    no more than is left of this process's share.  What PyTorch keeps for later of what was freed,
    such as another engine's KV cache, is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        num_own = torch.cuda.memory_allocated(device)
        num_kept = torch.cuda.memory_reserved(device) - num_own
        return free_bytes_of_share(free + num_kept, total, num_own, gpu_share)
    return min(free_bytes_of_machine(), free_bytes_of_group())


def free_bytes_of_share(free: int, total: int, num_own: int, share: float) -> float:
    """What a process that has ``num_own`` bytes may still take: the others on its device may not
    have begun to take theirs."""
    return float(max(0.0, min(free, total * share - num_own)))


def free_bytes_of_machine(memory_info: Path = MEMORY_INFO) -> float:
    """What Linux says it can give without swapping: pages of files count as free, of which a
    machine that runs for long, or has just read a model, is full.  Elsewhere pages nobody uses."""
    for line in read(memory_info).splitlines():
        name, _, number = line.partition(":")
        if name == "MemAvailable":
            return float(number.removesuffix("kB")) * 1024
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def free_bytes_of_group(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> float:
    """What the memory limits of the control groups (version 2 or 1) leave; infinite without one.

    Inactive pages of files count as free: they go first when memory is short.
    """
    return min((_free_bytes_in(*names) for names in _limits(groups, own_group)), default=math.inf)


def _limits(groups: Path, own_group: Path) -> Iterator[tuple[Path, Path, str]]:
    """The files of each limit and usage, and how its statistics call inactive pages of files."""
    for version, directory in directories("memory", groups, own_group):
        names = _NAMES[version]
        yield directory / names[0], directory / names[1], names[2]


def _free_bytes_in(limit: Path, usage: Path, inactive: str) -> float:
    maximum, used = read(limit).strip(), read(usage).strip()
    if not (maximum.isdecimal() and used.isdecimal()):
        return math.inf
    statistics = dict(
        line.split(" ", 1) for line in read(limit.parent / "memory.stat").splitlines()
    )
    return max(0.0, float(maximum) - float(used) + float(statistics.get(inactive, 0)))
