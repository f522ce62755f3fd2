"""Which statistics database a replica maps: its node's own, or one fetched from the cluster."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path

from actors.statistics_database import ensure_local
from hdserve.errors import DatabaseError

logger = logging.getLogger(__name__)


def locate_statistics(directories: Iterable[Path], fingerprint: str) -> Path | None:
    """The first of ``directories`` that this node has; else the largest database of the tokenizer
    that any node has, fetched into a cache that all replicas of this node share.

    What this node has is registered with the statistics actor, so that others can fetch it.
    Without the actor the node's own is used: a database lost costs speed, never a request.
    """
    own = [directory for directory in directories if directory.is_dir()]
    try:
        found = ensure_local(fingerprint, _cache_directory(), directories=own)
    except DatabaseError as error:
        logger.warning("the cluster's statistics databases are out of reach: %s", error)
        found = []
    return next(iter([*own, *sorted(found, key=_num_bytes, reverse=True)]), None)


def _cache_directory() -> Path:
    return Path(tempfile.gettempdir()) / "hdserve-statistics"


def _num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
