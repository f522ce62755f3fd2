"""Sends a replica's finished outputs to the model database."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from actors.link import ActorLink, ActorUnreachable
from actors.output_queue import OutputQueue
from actors.subscription import Subscription
from hdserve.databases.messages import PUBLISH_BYTES, Publish
from hdserve.databases.output_log import OutputLog
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError

logger = logging.getLogger(__name__)

MAX_NUMBERED_NAMESPACES = 2**14
"""The most namespaces whose next output number is remembered.  One that was forgotten continues
above the numbers of all forgotten ones."""


class Publisher:
    """Sends what a replica has finished, one message at a time.

    A message whose fate is unknown is sent again unchanged; the actor recognises its outputs by
    their numbers.  So a restart of the actor loses nothing that was not yet acknowledged.

    Args:
        origin: the replica's id, unique to this process.
        kept: gets every published output, to send it again if the actor loses it.
        subscription: the replica's own, which knows what flushes it has heard of.

    Attributes:
        is_due: set when there is enough for a message.
        num_outputs: outputs that were acknowledged.
        num_refused: outputs of messages that the actor did not understand.
        num_flushed: outputs left out because of a flush: by the actor, as far as it has reported
            so, or here, before a message was sent again.  Those that the actor leaves out of such a
            message are not counted.
    """

    def __init__(
        self,
        link: ActorLink,
        key: DatabaseKey,
        origin: str,
        queue: OutputQueue,
        kept: OutputLog,
        subscription: Subscription,
        interval_s: float,
    ) -> None:
        self.is_due = asyncio.Event()
        self.num_outputs = 0
        self.num_refused = 0
        self.num_flushed = 0
        self._link = link
        self._key = key
        self._origin = origin
        self._queue = queue
        self._kept = kept
        self._subscription = subscription
        self._interval_s = interval_s
        self._unsent: Publish | None = None
        self._flushed_versions: dict[str, int] = {}
        """The flushed version of each of its namespaces when the unsent message was made."""
        self._next_numbers: dict[str, int] = {}
        self._first_number = 0
        """The first output number of a namespace whose own is not remembered: no output name is
        ever used again."""

    async def run(self) -> None:
        """Publish at the interval, or as soon as there is enough for a message."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self.is_due.wait()
            self.is_due.clear()
            if not await self.publish_all():
                await asyncio.sleep(self._link.back_off_s)

    async def publish_all(self) -> bool:
        """Send all that is queued; ``False`` if the actor cannot be reached now."""
        while True:
            sent_before = self._unsent_now()
            is_sent_again = sent_before is not None
            message = self._unsent = sent_before or self._next_message()
            if message is None:
                return True
            try:
                num_new: int = await self._link.call("publish", message.encode(self._key))
            except ActorUnreachable:
                return False
            except DatabaseError:
                self.num_refused += message.num_outputs
            else:
                num_taken = message.num_outputs if is_sent_again else num_new
                self.num_outputs += num_taken
                self.num_flushed += message.num_outputs - num_taken
                self._subscription.was_published(message)
            self._unsent = None

    async def drain(self) -> None:
        """Try until nothing is left."""
        while not await self.publish_all():
            await asyncio.sleep(self._link.back_off_s)

    def _unsent_now(self) -> Publish | None:
        """The message whose fate is unknown, without what was forgotten since it was made: an actor
        that has lost its disk would not know that it was flushed."""
        if self._unsent is None:
            return None
        held = {name for name in self._unsent.namespaces if not self._is_forgotten(name)}
        message = self._unsent.only(held)
        self.num_flushed += self._unsent.num_outputs - message.num_outputs
        return message if held else None

    def _is_forgotten(self, namespace: str) -> bool:
        now = self._kept.partition(namespace).flushed_version
        return now != self._flushed_versions[namespace]

    def _next_message(self) -> Publish | None:
        batch = self._queue.take(PUBLISH_BYTES)
        if not batch:
            return None
        segments = {}
        for namespace, outputs in batch.outputs.items():
            first = self._take_numbers(namespace, len(outputs))
            segments[namespace] = Segment.from_outputs(self._origin, first, outputs)
            self._kept.append(namespace, segments[namespace])
        stand = self._subscription.publication(segments)
        message = replace(
            stand, outputs=segments, calibrations=batch.calibrations, standings=batch.standings
        )
        self._flushed_versions = {
            name: self._kept.partition(name).flushed_version for name in message.namespaces
        }
        return message

    def _take_numbers(self, namespace: str, num_outputs: int) -> int:
        """Reserve the next numbers of ``namespace``; returns the first."""
        first = self._next_numbers.pop(namespace, self._first_number)
        self._next_numbers[namespace] = first + num_outputs
        if len(self._next_numbers) > MAX_NUMBERED_NAMESPACES:
            oldest = next(iter(self._next_numbers))
            self._first_number = max(self._first_number, self._next_numbers.pop(oldest))
        return first
