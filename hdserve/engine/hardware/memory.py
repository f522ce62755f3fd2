"""How much memory is left for this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from hdserve.engine.hardware.cgroups import GROUPS, OWN_GROUP, directories, read

MEMORY_INFO = Path("/proc/meminfo")

_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def free_bytes(device: torch.device, gpu_share: float = 1.0) -> float:
    """Free memory of ``device``: of the CPU's, at most what the container's limit leaves; of a
    GPU's, at most what is left of this process's share.  Memory that PyTorch keeps cached after it
    was freed, such as another engine's KV cache, counts as free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        num_own = torch.cuda.memory_allocated(device)
        num_kept = torch.cuda.memory_reserved(device) - num_own
        return free_bytes_of_share(free + num_kept, total, num_own, gpu_share)
    return min(free_bytes_of_machine(), free_bytes_of_group())


def free_bytes_of_share(free: int, total: int, num_own: int, share: float) -> float:
    """What a process that has ``num_own`` bytes may still take; other processes on the device may
    not have taken their shares yet."""
    return float(max(0.0, min(free, total * share - num_own)))


def free_bytes_of_machine(memory_info: Path = MEMORY_INFO) -> float:
    """What Linux can give without swapping: the page cache, which fills a machine that has run long
    or has just read a model, counts as free.  On other systems only unused pages, or half of all
    where those are not told, as on macOS."""
    for line in read(memory_info).splitlines():
        name, _, number = line.partition(":")
        if name == "MemAvailable":
            return float(number.removesuffix("kB")) * 1024
    page_bytes = float(os.sysconf("SC_PAGE_SIZE"))
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return page_bytes * os.sysconf("SC_AVPHYS_PAGES")
    return page_bytes * os.sysconf("SC_PHYS_PAGES") / 2


def free_bytes_of_group(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> float:
    """What the memory limits of the control groups (version 2 or 1) leave; infinite without one.

    Inactive pages of files count as free: they are dropped first when memory is short.
    """
    return min((_free_bytes_in(*names) for names in _limits(groups, own_group)), default=math.inf)


def _limits(groups: Path, own_group: Path) -> Iterator[tuple[Path, Path, str]]:
    """For each limit its file, the usage file, and the statistics' name of inactive file pages."""
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
