"""What a replica runs next to its engine to share generated text with the cluster.

    engine thread ── publish ──> queue ──> Publisher ─────┐
                                                          ├── actor of the own model
    replica      <── deliver ─────────── Subscription ────┘
                 <── deliver ─────────── Subscription ─────── actors of ``draft_from`` models

All calls of actors and of the receiver are made on one background thread with its own event loop;
no failure of an actor, of Ray or of the receiver leaves it.  Methods run in the threads of their
callers: those of the engine never block, ``wait_until_current`` and ``close`` wait.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from uuid import uuid4

from actors import model_database
from actors.link import ActorLink
from actors.output_queue import OutputQueue
from actors.publisher import Publisher
from actors.settings import warn_of_other_settings
from actors.shards import WHOLE, Shard
from actors.subscription import Receiver, Subscription
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import PUBLISH_BYTES, Standing
from hdserve.databases.output_log import MAX_CALIBRATION_BYTES, MergeCalibration, OutputLog
from hdserve.databases.segment import TokenIds
from hdserve.databases.snapshot import DatabaseKey

logger = logging.getLogger(__name__)

QUEUE_BYTES = 4 * 2**20
NAMESPACE_IDLE_S = 3600.0
"""A namespace that was not used for this long is no longer followed."""

MAX_FOLLOWED_NAMESPACES = 4096
"""The most namespaces that are followed: those used last."""

_RESTART_S = 1.0

CLOSING_S = 1.0
"""How long calls in progress may take to end, in addition to publishing what is left."""

_CATCH_UP_SHARE = 8
"""A new replica asks for one part in this many of the text that the actor may keep of a namespace.
A token takes 180 bytes in the index of the replica and four in the text, so that is still several
times what fits."""


@dataclass(frozen=True, slots=True)
class MirrorStats:
    """Counters since the start.

    Attributes:
        num_published_outputs: acknowledged by the actor.
        num_dropped_outputs: lost because the queue was full or the actor refused them.
        num_flushed_outputs: not shared, because they are from before a flush, or from before the
            first reply of an actor that ever had a flush.
        num_received_outputs: delivered to the replica, of all models followed.
        num_refilled_outputs: sent again to an actor that had lost them.
        num_failures: calls of an actor that failed.
        num_dropped_calibrations: calibration states that were too large to be shared, or to wait
            for the actor with those of other namespaces.
        num_receiver_failures: exceptions of the receiver.
        num_queued_bytes: waiting to be published.
        last_poll_age_s: since the last successful poll of the own model's actor; before the first
            poll, since the start.
        num_unwritten_actors: actors of the own model that last reported a disk they cannot write.
    """

    num_published_outputs: int
    num_dropped_outputs: int
    num_flushed_outputs: int
    num_received_outputs: int
    num_refilled_outputs: int
    num_failures: int
    num_dropped_calibrations: int
    num_receiver_failures: int
    num_queued_bytes: int
    last_poll_age_s: float
    num_unwritten_actors: int


class Mirror:
    """Publishes the outputs of one replica and delivers those of all others.

    Args:
        key: the replica's model and tokenizer.
        shard: whose actors it talks to; use it only for their namespaces.
        receiver: what the replica does with news.
        draft_from: further models of the same tokenizer to read.
        merge_calibration: passed to the actor if this mirror is the one that starts it.
        replica_id: for logs; a random suffix makes it unique to this object.
    """

    def __init__(
        self,
        key: DatabaseKey,
        config: ModelDatabaseConfig,
        receiver: Receiver,
        *,
        shard: Shard = WHOLE,
        draft_from: Iterable[str] = (),
        merge_calibration: MergeCalibration | None = None,
        replica_id: str = "",
    ) -> None:
        self.replica_id = f"{replica_id}#{uuid4().hex[:12]}"
        self._last_used: dict[str, float] = {}
        self._queue = OutputQueue(QUEUE_BYTES)
        self._num_dropped_calibrations = 0
        self._num_crashes = 0
        self._shard = shard
        self._started_s = time.monotonic()
        compared: object = None

        def resolve() -> object:
            nonlocal compared
            actor = model_database.get_or_create(key, config, merge_calibration, shard)
            # asked once: an actor keeps its settings when it restarts, and telling them is work
            is_new = actor != compared
            if is_new and warn_of_other_settings(actor, key, shard.config(config)):
                compared = actor
            return actor

        link = ActorLink(resolve, f"the model database of {key.model}")
        refill_bytes = config.refill_bytes // shard.num_shards  # there is a mirror for each
        kept = OutputLog(refill_bytes, refill_bytes)
        self._catch_up_bytes = max(config.refill_bytes, config.max_bytes // _CATCH_UP_SHARE)
        own = self._subscription(link, key, self._queue, kept, receiver)
        self._subscriptions = [own]
        self._publisher = Publisher(
            link, key, self.replica_id, self._queue, kept, own, config.publish_interval_s
        )
        for model in draft_from:
            other = DatabaseKey(model, key.fingerprint)
            self._subscriptions.append(self._follow(other, receiver))
        self._loop = asyncio.new_event_loop()
        self._is_closing = asyncio.Event()
        self._drain_s = 0.0
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        """Start; if there is no actor, it is started in the background."""
        self._started_s = time.monotonic()
        self._thread.start()

    def publish(self, namespace: str, token_ids: TokenIds) -> None:
        """Share one finished output, which must not be changed afterwards.

        Never blocks and never raises; the oldest outputs are dropped when the queue is full.
        """
        self.use(namespace)
        self._queue.put(namespace, token_ids)
        self._publish_if_due()

    def standing(self, namespace: str) -> Standing:
        """How far the receiver was told of ``namespace``, with all flushes up to there."""
        return self._subscriptions[0].standing(namespace)

    def publish_calibration(self, namespace: str, calibration: bytes, standing: Standing) -> None:
        """Share the calibration state of ``namespace``, at most ``MAX_CALIBRATION_BYTES``.

        Args:
            standing: from before the state was taken; the state is ignored if ``namespace`` was
                flushed after that.
        """
        if len(calibration) > MAX_CALIBRATION_BYTES:
            if not self._num_dropped_calibrations:
                logger.warning("%d bytes of calibration are too many to share", len(calibration))
            self._num_dropped_calibrations += 1
            return
        self.use(namespace)
        self._queue.put_calibration(namespace, calibration, standing)
        self._publish_if_due()

    def has_calibration(self, namespace: str) -> bool:
        """Whether calibration state of ``namespace`` has not been sent yet.  A new one would
        replace it, and yet count only as what was learned after it."""
        return self._queue.has_calibration(namespace)

    def use(self, namespace: str) -> None:
        """A request of ``namespace`` has arrived: follow it from now on.  Never blocks."""
        is_new = namespace not in self._last_used
        self._last_used[namespace] = time.monotonic()
        if is_new:
            for subscription in self._subscriptions:
                self._wake(subscription.is_due)

    def wait_until_current(self, timeout_s: float) -> bool:
        """Wait until what the actor now has of the namespaces in use, as far as it is wanted here,
        is delivered.

        A new replica calls it to draft from the cluster's text with its first request.
        """
        own = self._subscriptions[0]
        poll = own.current_poll()
        self._wake(own.is_due)
        return own.wait_for(poll, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish what is queued, for at most ``timeout_s``, and end, which takes at most
        ``CLOSING_S`` more."""
        if not self._thread.is_alive():
            self._loop.close()
            return
        self._drain_s = timeout_s
        self._wake(self._is_closing)
        self._thread.join(timeout_s + CLOSING_S)

    def stats(self) -> MirrorStats:
        """What was published and received so far, and how far behind the mirror is."""
        own = self._subscriptions[0]
        last_s = self._started_s if own.last_poll_s is None else own.last_poll_s
        return MirrorStats(
            num_published_outputs=self._publisher.num_outputs,
            num_dropped_outputs=self._queue.num_dropped + self._publisher.num_refused,
            num_flushed_outputs=self._queue.num_forgotten + self._publisher.num_flushed,
            num_received_outputs=sum(item.num_outputs for item in self._subscriptions),
            num_refilled_outputs=own.num_refilled_outputs,
            num_failures=sum(item.link.num_failures for item in self._subscriptions)
            + self._num_crashes,
            num_dropped_calibrations=self._num_dropped_calibrations
            + self._queue.num_dropped_calibrations,
            num_receiver_failures=sum(item.num_receiver_failures for item in self._subscriptions),
            num_queued_bytes=self._queue.num_bytes,
            last_poll_age_s=time.monotonic() - last_s,
            num_unwritten_actors=int(own.is_unwritten),
        )

    def _follow(self, key: DatabaseKey, receiver: Receiver) -> Subscription:
        """A reader of another model's database, which it neither starts nor refills."""
        link = ActorLink(
            lambda: model_database.get_to_read(key, self._shard),
            f"the model database of {key.model}",
        )
        queue, kept = OutputQueue(max_bytes=0), OutputLog(max_bytes=0, max_total_bytes=0)
        return self._subscription(link, key, queue, kept, receiver)

    def _subscription(
        self,
        link: ActorLink,
        key: DatabaseKey,
        queue: OutputQueue,
        kept: OutputLog,
        receiver: Receiver,
    ) -> Subscription:
        return Subscription(
            link,
            key,
            self.replica_id,
            queue,
            kept,
            self._used_namespaces,
            receiver,
            self._catch_up_bytes,
        )

    def _used_namespaces(self) -> list[str]:
        """The namespaces to follow: those used last, no more than fit into a poll."""
        since_s = time.monotonic() - NAMESPACE_IDLE_S
        items = list(self._last_used.items())
        used = [item for item in items if item[1] >= since_s]
        if len(items) > 2 * len(used) + MAX_FOLLOWED_NAMESPACES:
            for name, at_s in items:
                if at_s < since_s and self._last_used.get(name) == at_s:
                    del self._last_used[name]
        latest = heapq.nlargest(MAX_FOLLOWED_NAMESPACES, used, key=lambda item: item[1])
        return [name for name, _ in latest]

    def _publish_if_due(self) -> None:
        if self._queue.num_bytes >= PUBLISH_BYTES:
            self._wake(self._publisher.is_due)

    def _wake(self, event: asyncio.Event) -> None:
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            logger.debug("the mirror has ended")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        runs = [self._publisher.run, *(item.run for item in self._subscriptions)]
        tasks = [asyncio.create_task(self._forever(run)) for run in runs]
        await self._is_closing.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(self._drain_s):
                await self._publisher.drain()
        except TimeoutError:
            told = "%d bytes were not published, nor perhaps the message being sent"
            logger.warning(told, self._queue.num_bytes)

    async def _forever(self, run: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await run()
            except Exception:
                logger.exception("the mirror goes on after an error")
                self._num_crashes += 1
                await asyncio.sleep(_RESTART_S)
