"""How many cores a model may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from hdserve.engine.hardware.cgroups import GROUPS, OWN_GROUP, directories, read


def default_num_threads(reserved: float, num_models: int, available: int | None = None) -> int:
    """Threads of a model's CPU kernels if nobody says.

    Args:
        reserved: cores Ray reserves for a replica: from one core on, this many threads; below that
            the models share the available cores.
        num_models: that are served.
        available: cores this process may use; default: :func:`available_cpus`.
    """
    available = available_cpus() if available is None else available
    wanted = int(reserved) if reserved >= 1 else available // num_models
    return max(1, min(wanted, available))


def available_cpus(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> int:
    """Cores this process may use: its CPU affinity, or less if its container's limit is lower."""
    quota = min(_quotas(groups, own_group), default=math.inf)
    return max(1, int(min(_num_usable(), quota)))


def _num_usable() -> int:
    """Cores this process may run on, if the system says; else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(groups: Path, own_group: Path) -> Iterator[float]:
    """Cores by the limits of the control groups."""
    for version, directory in directories("cpu", groups, own_group):
        if version == 2:
            quota, period = (read(directory / "cpu.max").split() or ["max", "1"])[:2]
        else:
            quota = read(directory / "cpu.cfs_quota_us").strip()
            period = read(directory / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            yield int(quota) / int(period)
