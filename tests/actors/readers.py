"""Readers and writers of a model database, without Ray."""

import numpy as np

from actors.model_database_actor import ModelDatabaseActor
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import MAX_REPLY_BYTES, Poll, Position, Publish, Reply
from hdserve.databases.segment import Segment, concatenate
from hdserve.databases.snapshot import DatabaseKey

KEY = DatabaseKey("a-model", "f" * 32)


class Reader:
    """One replica's side of the protocol, without threads or time."""

    def __init__(
        self, actor: ModelDatabaseActor, name: str, *namespaces: str, catch_up_bytes: int = 2**40
    ) -> None:
        self.actor = actor
        self.name = name
        self.epoch = ""
        self._catch_up_bytes = catch_up_bytes
        self.positions = dict.fromkeys(namespaces, Position())

    def poll(self) -> Reply:
        poll = Poll(self.name, self.epoch, self.positions, catch_up_bytes=self._catch_up_bytes)
        data = self.actor.changes_since(poll.encode(KEY))
        assert len(data) <= MAX_REPLY_BYTES
        reply = Reply.decode(data, KEY)
        self.epoch = reply.epoch
        if reply.is_reset:
            self.positions = dict.fromkeys(self.positions, Position())
        for namespace, change in reply.changes.items():
            held = self.positions[namespace].num_held + len(change.segment)
            self.positions[namespace] = Position(change.cursor, change.calibration_version, held)
        return reply

    def read(self) -> list[int]:
        """Sequence numbers of all that is new, of all namespaces."""
        found = []
        while True:
            reply = self.poll()
            found += [change.segment for change in reply.changes.values()]
            if reply.is_complete:
                return concatenate(found).sequence_numbers.tolist()


def message(
    first: int, *lengths: int, namespace: str = "n", key: DatabaseKey = KEY, sender: str = "w"
) -> bytes:
    """What a replica publishes: outputs of these lengths, numbered from ``first`` on."""
    outputs = [np.full(length, first + index, np.uint32) for index, length in enumerate(lengths)]
    segment = Segment.from_outputs(sender, first, outputs)
    return Publish(sender, {namespace: segment}).encode(key)


def count_token(exported: bytes, token_id: int) -> int:
    """How often it is in what an actor exported, of any model."""
    published = Publish.decode(exported, KEY.fingerprint, model=None)
    return sum(int((part.token_ids == token_id).sum()) for part in published.outputs.values())


def restarted(actor: ModelDatabaseActor, config: ModelDatabaseConfig) -> ModelDatabaseActor:
    """As after ``kill -9``: nothing more is written."""
    actor._store.close()
    return ModelDatabaseActor(KEY, config)


def many_namespaces(num: int) -> list[str]:
    """Names, in order."""
    return [f"tenant-{number:05}" for number in range(num)]


def publish_to_all(actor: ModelDatabaseActor, names: list[str], first: int = 0) -> None:
    """One output to each namespace."""
    part = Segment.from_outputs("w", first, [np.ones(100, np.uint32)])
    actor.publish(Publish("w", dict.fromkeys(names, part)).encode(KEY))
