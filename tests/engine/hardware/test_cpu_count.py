"""A model takes no more cores than the container has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hdserve.engine.hardware.cpu_count import available_cpus, default_num_threads

NUM_CORES = len(os.sched_getaffinity(0))


def test_a_quota_counts(tmp_path: Path) -> None:
    """Version 2, of the group and of those around it; part of a core is one."""
    own = tmp_path / "own"
    own.write_text("0::/slice/service\n")
    group = tmp_path / "slice" / "service"
    group.mkdir(parents=True)
    assert available_cpus(tmp_path, own) == NUM_CORES
    (group / "cpu.max").write_text("max 100000\n")
    assert available_cpus(tmp_path, own) == NUM_CORES
    (group / "cpu.max").write_text(f"{NUM_CORES + 1}00000 100000\n")
    assert available_cpus(tmp_path, own) == NUM_CORES
    (tmp_path / "slice" / "cpu.max").write_text("150000 100000\n")
    assert available_cpus(tmp_path, own) == 1
    (tmp_path / "slice" / "cpu.max").write_text("50000 100000\n")
    assert available_cpus(tmp_path, own) == 1


@pytest.mark.skipif(NUM_CORES < 2, reason="one core is the least there is")
def test_version_1_counts(tmp_path: Path) -> None:
    """The controller has a tree of its own; -1 is no limit."""
    own = tmp_path / "own"
    own.write_text("4:memory:/a\n5:cpu,cpuacct:/x\n")
    group = tmp_path / "cpu" / "x"
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert available_cpus(tmp_path, own) == NUM_CORES
    (group / "cpu.cfs_quota_us").write_text("100000\n")
    assert available_cpus(tmp_path, own) == 1


def test_a_system_without_cgroups(tmp_path: Path) -> None:
    assert available_cpus(tmp_path, tmp_path / "missing") == NUM_CORES


@pytest.mark.parametrize(
    ("reserved", "num_models", "available", "expected"),
    [
        (0.5, 2, 2, 1),
        (0.5, 1, 2, 2),
        (0.25, 3, 2, 1),
        (0.0, 2, 64, 32),
        (4.0, 3, 64, 4),
        (1.0, 1, 64, 1),
        (8.0, 1, 4, 4),
    ],
)
def test_default_num_threads(
    reserved: float, num_models: int, available: int, expected: int
) -> None:
    """What is reserved, or a share; never more than there is and never none."""
    assert default_num_threads(reserved, num_models, available) == expected
