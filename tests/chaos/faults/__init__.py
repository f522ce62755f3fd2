"""Every fault there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tests.chaos.fault import Fault
from tests.chaos.faults.clients import ClientNeverReads
from tests.chaos.faults.clock import ClockSteps
from tests.chaos.faults.disk import DatabaseDiskFull, DatabaseKilledWhileWriting
from tests.chaos.faults.engine import DrafterRaises, EngineBreaks, EnginePanics
from tests.chaos.faults.killed import (
    DatabaseKilled,
    GatewayKilled,
    HAProxyKilled,
    ProxyKilled,
    ReplicaKilled,
    StatisticsKilled,
)
from tests.chaos.faults.nodes import DatabaseNodeLost, GcsRestarted, NodeKilled
from tests.chaos.faults.snapshots import (
    SnapshotBitFlipped,
    SnapshotOfAnotherTokenizer,
    SnapshotOfNewerVersion,
    SnapshotTruncated,
)
from tests.chaos.faults.statistics import CorpusMissing
from tests.chaos.faults.updates import ConfigDeployed, RollingUpdate

FAULTS: Mapping[str, type[Fault]] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            ReplicaKilled,
            DatabaseKilled,
            GatewayKilled,
            ProxyKilled,
            HAProxyKilled,
            EngineBreaks,
            EnginePanics,
            DrafterRaises,
            SnapshotTruncated,
            SnapshotBitFlipped,
            SnapshotOfAnotherTokenizer,
            SnapshotOfNewerVersion,
            StatisticsKilled,
            RollingUpdate,
            ConfigDeployed,
            ClientNeverReads,
            NodeKilled,
            DatabaseNodeLost,
            DatabaseKilledWhileWriting,
            DatabaseDiskFull,
            CorpusMissing,
            GcsRestarted,
            ClockSteps,
        )
    }
)
"""By name, in the order in which they are recorded."""


def by_setting(names: Iterable[str]) -> dict[str, list[str]]:
    """The faults of each kind of system."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(FAULTS[name].setting, []).append(name)
    return groups
