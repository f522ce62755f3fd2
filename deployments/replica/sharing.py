"""What a replica sends to the cluster's model database, and receives from it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from actors.mirror import Mirror, MirrorStats
from actors.sharded_mirror import ShardedMirror
from deployments.replica.inflow import Inflow
from deployments.replica.rate_limiter import RateLimiter
from hdserve.config import ModelDatabaseConfig
from hdserve.core import DEFAULT_NAMESPACE
from hdserve.databases.messages import Standing
from hdserve.databases.snapshot import DatabaseKey
from hdserve.drafting.registry import merge_drafter_states

if TYPE_CHECKING:
    from hdserve.engine.async_engine import AsyncEngine
    from hdserve.engine.engine import Engine
    from hdserve.engine.host import ModelHost

logger = logging.getLogger(__name__)

_CATCH_UP_TIMEOUT_S = 10.0
_STATES_INTERVAL_S = 10.0


class ClusterSharing:
    """Connects the engine's thread, which owns the local databases, with the cluster.

    Finished outputs are published, and now and then what the drafters have learned; what other
    replicas send is passed to the engine's thread.  Nothing here blocks that thread, and no failure
    here reaches a request.
    """

    def __init__(
        self, host: ModelHost, engine: AsyncEngine, config: ModelDatabaseConfig, replica: str
    ) -> None:
        self._engine = engine
        self._inflow = Inflow(host, engine)
        self._rate_limiter = RateLimiter(_STATES_INTERVAL_S)
        self._mirror = ShardedMirror(
            config.num_shards,
            lambda shard: Mirror(
                DatabaseKey(host.config.name, host.tokenizer.fingerprint),
                config,
                self._inflow,
                shard=shard,
                draft_from=host.config.draft_from,
                merge_calibration=merge_drafter_states,
                replica_id=replica,
            ),
        )

    def start(self) -> None:
        """Start sharing; return when drafting can use what the cluster has now, or after some
        seconds."""
        self.use(DEFAULT_NAMESPACE)
        if not self._mirror.wait_until_current(_CATCH_UP_TIMEOUT_S):
            logger.warning("the model database has not sent all yet; drafting begins with less")

    def use(self, namespace: str) -> None:
        """Follow ``namespace``, for which a request has arrived."""
        self._mirror.of(namespace).use(namespace)

    def publish(self, namespace: str, token_ids: list[int]) -> None:
        """Share a finished output; called in the engine's thread."""
        mirror = self._mirror.of(namespace)
        mirror.publish(namespace, token_ids)
        if self._rate_limiter.take(namespace, time.monotonic()):
            standing = mirror.standing(namespace)  # earlier flushes are already queued
            self._engine.call(lambda engine: self._publish_states(engine, namespace, standing))

    def _publish_states(self, engine: Engine, namespace: str, standing: Standing) -> None:
        mirror = self._mirror.of(namespace)
        if mirror.has_calibration(namespace):
            return
        states = engine.drafters.states(namespace)
        if states is not None:
            mirror.publish_calibration(namespace, states, standing)

    def stats(self) -> MirrorStats:
        """Return counts of what was sent to the cluster, and received from it."""
        return self._mirror.stats()

    @property
    def num_skipped_outputs(self) -> int:
        """Outputs that were received but not added to a database, for want of time."""
        return self._inflow.num_skipped_outputs

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish what is still queued, for at most ``timeout_s``, and end."""
        self._mirror.close(timeout_s)
