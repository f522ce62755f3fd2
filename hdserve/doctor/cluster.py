"""What the processes of a configuration are placed on: this machine, or a Ray cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdserve.cluster_address import why_unanswered
from hdserve.config.deployed import OWN_CLUSTER
from hdserve.doctor.placement import Resources

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes, and what is on them.

    Attributes:
        nodes: all resources of each node.
        free: those of each that nobody has reserved.
        deployed: what Ray Serve says of those deployments of the application that are not healthy;
            ``None`` if the application is not there.
    """

    nodes: Sequence[Resources]
    free: Sequence[Resources]
    deployed: Mapping[str, str] | None = None


def is_own(address: str) -> bool:
    """Return whether the cluster at ``address`` is one that starts with the application, here."""
    return address in ("", OWN_CLUSTER)


def read_cluster(address: str) -> Cluster | None:
    """Return the cluster at ``address``, by what Ray counts, which is asked in a separate process;
    ``None`` if it does not say what it has."""
    if is_own(address):
        nodes = _said("deployments.nodes")
        return None if nodes is None else Cluster([nodes], [nodes])
    if why_unanswered(address):
        return None
    try:
        return Cluster(**(_said("deployments.cluster_state", address) or {}))
    except TypeError:
        return None


def _said(module: str, *arguments: str) -> Any:
    """Return what a module that runs as a program prints last; ``None`` if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
        return json.loads(result.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None
