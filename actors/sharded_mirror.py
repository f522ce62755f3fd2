"""A replica's side of a model database whose namespaces are divided among several actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import fields

from actors.mirror import Mirror, MirrorStats
from actors.shards import Shard, shard_of


class ShardedMirror:
    """A :class:`Mirror` for each shard with a namespace that was used.

    Thread-safe; a mirror, which is a thread, is started at the first use of a namespace of its
    shard, so that a replica talks to no more actors than it needs.

    Args:
        make: the mirror of a shard, not started.
    """

    def __init__(self, num_shards: int, make: Callable[[Shard], Mirror]) -> None:
        self._num_shards = num_shards
        self._make = make
        self._mirrors: dict[Shard, Mirror] = {}
        self._lock = threading.Lock()

    def of(self, namespace: str) -> Mirror:
        """The mirror of a namespace's shard; it is started if there was none."""
        shard = shard_of(namespace, self._num_shards)
        with self._lock:
            mirror = self._mirrors.get(shard)
            if mirror is None:
                mirror = self._mirrors[shard] = self._make(shard)
                mirror.start()
            return mirror

    def wait_until_current(self, timeout_s: float) -> bool:
        """See :meth:`Mirror.wait_until_current`; waits for all that were started."""
        until_s = time.monotonic() + timeout_s
        return all(
            mirror.wait_until_current(max(0.0, until_s - time.monotonic()))
            for mirror in self._begun()
        )

    def stats(self) -> MirrorStats:
        """The sum over the shards; of ages the largest."""
        found = [mirror.stats() for mirror in self._begun()]
        totals = {
            field.name: sum(getattr(stats, field.name) for stats in found)
            for field in fields(MirrorStats)
        }
        totals["last_poll_age_s"] = max((stats.last_poll_age_s for stats in found), default=0.0)
        return MirrorStats(**totals)

    def close(self, timeout_s: float = 5.0) -> None:
        """See :meth:`Mirror.close`; all at the same time."""
        threads = [
            threading.Thread(target=mirror.close, args=(timeout_s,)) for mirror in self._begun()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _begun(self) -> list[Mirror]:
        with self._lock:
            return list(self._mirrors.values())
