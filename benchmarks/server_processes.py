"""The processes of a serving application on this machine, and their memory."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REPLICA = re.compile(r"ServeReplica:[^:]*:([^:]+?)(?:\.handle_\w+|\.\w+)?$")
_PROC = Path("/proc")
_OWN = ("model-", "gateway", "ModelDatabase", "StatisticsDatabase")
_RAYS = ("ServeController", "ProxyActor")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process of the server.

    Attributes:
        name: its deployment or actor where it is one of hdserve's, else Ray's own title.
    """

    pid: int
    name: str
    is_hdserve: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one process, in bytes.

    Attributes:
        rss: resident, pages of files and of shared memory included.
        private: resident and of this process alone.
    """

    rss: int
    private: int


def server_processes(root_pid: int) -> list[ServerProcess]:
    """Return the descendants of ``root_pid`` that run code of Ray Serve or of hdserve."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children[int(fields[1])].append(int(entry.name))
    found, waiting = [], [root_pid]
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        process = _described(pid)
        if process is not None:
            found.append(process)
    return sorted(found, key=lambda process: process.pid)


def memory(pid: int) -> Memory | None:
    """Return what a process has in memory; ``None`` if it has ended."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    sizes = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines)
    }
    return Memory(sizes["Rss"], sizes["Private_Clean"] + sizes["Private_Dirty"])


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time a process has used, all its threads together."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _described(pid: int) -> ServerProcess | None:
    try:
        title = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return None
    if not title.startswith("ray::"):
        return None
    replica = _REPLICA.search(title)
    name = replica.group(1) if replica else title.removeprefix("ray::").partition(".")[0]
    is_hdserve = name.startswith(_OWN)
    return ServerProcess(pid, name, is_hdserve) if is_hdserve or name.startswith(_RAYS) else None


class MemoryLog:
    """Memory of each process over time, one line a second."""

    def __init__(self, processes: Sequence[ServerProcess]) -> None:
        self._processes = processes
        self._started_s = time.monotonic()
        self.samples: dict[int, list[tuple[float, int, int]]] = {p.pid: [] for p in processes}

    async def run(self) -> None:
        while True:
            for process in self._processes:
                found = memory(process.pid)
                if found is not None:
                    at_s = round(time.monotonic() - self._started_s, 1)
                    self.samples[process.pid].append((at_s, found.rss, found.private))
            await asyncio.sleep(1.0)

    def rows(self, warm_up_s: float, end_s: float) -> list[dict[str, Any]]:
        """Per process how memory changed over the second half of the time after the warm-up:
        the largest of its last fifth over the largest of its first fifth, less one."""
        middle_s = warm_up_s + (end_s - warm_up_s) / 2
        rows = []
        for process in self._processes:
            samples = self.samples[process.pid]
            later = [sample for sample in samples if middle_s <= sample[0] <= end_s]
            size = max(1, len(later) // 5)
            row: dict[str, Any] = {
                "pid": process.pid,
                "name": process.name,
                "is_hdserve": process.is_hdserve,
                "is_alive": memory(process.pid) is not None,
            }
            for column, kind in ((1, "rss"), (2, "private")):
                values = [sample[column] for sample in later]
                growth = max(values[-size:]) / max(values[:size]) - 1 if values else None
                row[f"{kind}_growth"] = growth
                row[f"{kind}_mib"] = [round(value / 2**20, 1) for value in values[:1] + values[-1:]]
            rows.append(row)
        return rows
