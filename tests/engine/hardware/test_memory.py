"""The memory that is left is what the machine and the container leave."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from hdserve.engine.hardware.memory import (
    free_bytes,
    free_bytes_of_group,
    free_bytes_of_machine,
    free_bytes_of_share,
)


def write_group(directory: Path, names: tuple[str, str], limit: str, usage: int, stat: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{stat}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    """Version 2: the limit, less what is used, but for pages of files that can be dropped."""
    own = tmp_path / "own"
    own.write_text("0::/\n")
    write_group(tmp_path, V2, "1000", 700, "inactive_file 200")
    assert free_bytes_of_group(tmp_path, own) == 500


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    """A group is bound by its own limit and by those around it."""
    own = tmp_path / "own"
    own.write_text("0::/slice/service\n")
    write_group(tmp_path, V2, "max", 700, "inactive_file 0")
    write_group(tmp_path / "slice", V2, "900", 700, "inactive_file 0")
    write_group(tmp_path / "slice" / "service", V2, "500", 100, "inactive_file 0")
    assert free_bytes_of_group(tmp_path, own) == 200


@pytest.mark.parametrize("name", ["größe".encode(), b"\xff"], ids=["text", "bytes"])
def test_a_group_has_any_name(tmp_path: Path, name: bytes) -> None:
    """One that is no text, too; what a file says that is none is no number."""
    own = tmp_path / "own"
    own.write_bytes(b"0::/" + name + b"\n")
    group = tmp_path / os.fsdecode(name)
    write_group(group, V2, "500", 100, "inactive_file 0")
    assert free_bytes_of_group(tmp_path, own) == 400
    (group / "memory.max").write_bytes(b"\xff")
    assert free_bytes_of_group(tmp_path, own) == math.inf


def test_version_1_counts(tmp_path: Path) -> None:
    """The memory controller has a tree of its own."""
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/a\n")
    write_group(tmp_path / "memory" / "a", V1, "800", 900, "total_inactive_file 150")
    assert free_bytes_of_group(tmp_path, own) == 50


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_all_is_free(tmp_path: Path, limit: str | None) -> None:
    """No limit, or a system without control groups."""
    if limit is not None:
        write_group(tmp_path, V2, limit, 700, "inactive_file 200")
    assert free_bytes_of_group(tmp_path, tmp_path / "missing") == math.inf


def test_what_the_system_keeps_of_files_is_free(tmp_path: Path) -> None:
    """A model that was just read from a disk leaves few pages that nobody uses."""
    info = tmp_path / "meminfo"
    info.write_text(
        "MemTotal:       64000 kB\nMemFree:          500 kB\nMemAvailable:   48000 kB\n"
    )
    assert free_bytes_of_machine(info) == 48000 * 1024
    assert 0 < free_bytes_of_machine(tmp_path / "missing") < math.inf


def test_where_the_system_tells_only_of_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.delitem(os.sysconf_names, "SC_AVPHYS_PAGES")
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert free_bytes_of_machine(tmp_path / "missing") == all_bytes / 2


def test_this_machine_has_memory() -> None:
    """Some, and less than infinitely much."""
    assert 0 < free_bytes(torch.device("cpu")) < math.inf


def test_processes_that_share_a_gpu_leave_each_other_room() -> None:
    """The first one takes no more than its share, less its weights, though all the rest is free."""
    assert free_bytes_of_share(90, 100, 10, 0.5) == 40
    assert free_bytes_of_share(90, 100, 10, 1.0) == 90
    assert free_bytes_of_share(20, 100, 10, 0.5) == 20
    assert free_bytes_of_share(20, 100, 60, 0.5) == 0
