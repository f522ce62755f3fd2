"""The messages between replicas and the model database's actor.

    replica                                        actor
       │  Publish(outputs, calibration)              │
       ├────────────────────────────────────────────>│  log
       │                                             │
       │  Poll(epoch, cursor of each namespace)      │
       ├────────────────────────────────────────────>│
       │<────────────────────────────────────────────┤
       │  Reply(epoch, changes, next_poll_s, refill) │

``epoch`` identifies one run of the actor.  From a new epoch the replica learns that the actor was
restarted.  The actor learns whether outputs were lost from the replica's cursor, and from the
numbers of the outputs it has published since its last poll.  If some were, ``refill`` asks that
replica for what it has and the actor lacks; it answers with ordinary ``Publish`` messages of
outputs under their original origins, the last of which lists the namespace in ``refilled``.

Every ``Publish`` says how far its sender had followed each namespace.  If the namespace was flushed
after that point, the message is outdated and ignored there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hdserve.databases import snapshot
from hdserve.databases.output_log import Changes
from hdserve.databases.seen_outputs import OriginRanges, checked_interval, checked_ranges
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import SnapshotError

MAX_REPLY_BYTES = 96 * 2**10
"""Ray sends larger results through the object store, at four times the cost."""

PUBLISH_BYTES = 64 * 2**10


class Standing(NamedTuple):
    """How far a replica has followed a namespace: ``cursor`` is the next version it wants, in the
    run ``epoch`` of the actor."""

    epoch: str = ""
    cursor: int = 0


@dataclass(frozen=True, slots=True)
class Publish:
    """Finished outputs, and the calibration state of their origin.

    Attributes:
        sender: the replica's id.
        outputs: by namespace.
        calibrations: by namespace.
        refilled: namespaces of which the sender has now sent everything it had.
        epoch: of the last reply to the sender; empty before the first.
        cursors: the sender's cursor in each namespace of ``outputs`` and ``refilled``.
        standings: the sender's standing when it took each of the calibrations.
    """

    sender: str
    outputs: Mapping[str, Segment] = field(default_factory=dict)
    calibrations: Mapping[str, bytes] = field(default_factory=dict)
    refilled: tuple[str, ...] = ()
    epoch: str = ""
    cursors: Mapping[str, int] = field(default_factory=dict)
    standings: Mapping[str, Standing] = field(default_factory=dict)

    @property
    def num_outputs(self) -> int:
        """How many outputs there are in all namespaces."""
        return sum(len(segment) for segment in self.outputs.values())

    def encode(self, key: DatabaseKey) -> bytes:
        payload = {
            "sender": self.sender,
            "outputs": {name: segment.to_wire() for name, segment in self.outputs.items()},
            "calibrations": dict(self.calibrations),
            "refilled": list(self.refilled),
            "epoch": self.epoch,
            "cursors": dict(self.cursors),
            "standings": {name: list(standing) for name, standing in self.standings.items()},
        }
        return snapshot.encode(payload, kind="publish", key=key)

    @property
    def namespaces(self) -> set[str]:
        """The namespaces with outputs or calibration."""
        return {*self.outputs, *self.calibrations}

    def only(self, names: Container[str]) -> Publish:
        """This message, with the outputs and calibrations of only these namespaces."""
        return replace(
            self,
            outputs={name: part for name, part in self.outputs.items() if name in names},
            calibrations={name: part for name, part in self.calibrations.items() if name in names},
        )

    def by_namespace(self) -> Iterator[tuple[str, Publish]]:
        """Each namespace with this message's content for it."""
        for name in {**self.outputs, **self.calibrations}:
            outputs = {name: self.outputs[name]} if name in self.outputs else {}
            calibrations = {name: self.calibrations[name]} if name in self.calibrations else {}
            yield name, Publish(self.sender, outputs, calibrations)

    @classmethod
    def decode(cls, data: bytes, fingerprint: str, model: str | None) -> Publish:
        """
        Raises:
            SnapshotError: corrupt, or of another tokenizer or ``model``.
        """
        payload = snapshot.decode(data, kind="publish", fingerprint=fingerprint, model=model)
        fields = _Fields(payload)
        outputs = fields.mapping("outputs", dict)
        standings = fields.mapping("standings", list)
        return cls(
            sender=fields.get("sender", str),
            outputs={name: Segment.from_wire(wire) for name, wire in outputs.items()},
            calibrations=fields.mapping("calibrations", bytes),
            refilled=tuple(fields.items("refilled", str)),
            epoch=fields.get("epoch", str),
            cursors=fields.cursors("cursors"),
            standings={name: _standing(item) for name, item in standings.items()},
        )


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has come in one namespace.

    Attributes:
        cursor: the next version it wants.
        calibration_version: of the calibration it has.
        num_held: how many outputs it could return in a refill.
    """

    cursor: int = 0
    calibration_version: int = 0
    num_held: int = 0

    def restarted(self) -> Position:
        """The same reader's position for a run that does not know its version numbers."""
        return Position(cursor=min(self.cursor, 1))


@dataclass(frozen=True, slots=True)
class Poll:
    """A reader's request for news.

    Attributes:
        reader: the replica's id; outputs of this origin are not sent back.
        epoch: of the last reply; empty before the first.
        positions: by namespace.
        idle: cursors in namespaces for which the reader only wants to know of flushes.
        published: by namespace, the numbers of the reader's own outputs that were acknowledged
            since its last poll: the first, and the last plus one.
        catch_up_bytes: when it starts, how much of the newest outputs of each namespace it wants;
            it would not keep older ones.
    """

    reader: str
    epoch: str = ""
    positions: Mapping[str, Position] = field(default_factory=dict)
    idle: Mapping[str, int] = field(default_factory=dict)
    published: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    catch_up_bytes: int = 2**62

    def encode(self, key: DatabaseKey) -> bytes:
        payload = {
            "reader": self.reader,
            "epoch": self.epoch,
            "positions": {
                name: [position.cursor, position.calibration_version, position.num_held]
                for name, position in self.positions.items()
            },
            "idle": dict(self.idle),
            "published": {name: list(numbers) for name, numbers in self.published.items()},
            "catch_up_bytes": self.catch_up_bytes,
        }
        return snapshot.encode(payload, kind="poll", key=key)

    @classmethod
    def decode(cls, data: bytes, key: DatabaseKey) -> Poll:
        """
        Raises:
            SnapshotError: corrupt, or of another tokenizer or model.
        """
        payload = snapshot.decode(data, kind="poll", fingerprint=key.fingerprint, model=key.model)
        fields = _Fields(payload)
        positions = fields.mapping("positions", list)
        published = fields.mapping("published", list)
        return cls(
            reader=fields.get("reader", str),
            epoch=fields.get("epoch", str),
            positions={name: Position(*_integers(item, 3)) for name, item in positions.items()},
            idle=fields.cursors("idle"),
            published={name: checked_interval(item) for name, item in published.items()},
            catch_up_bytes=fields.get("catch_up_bytes", int),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The actor's answer to a poll.

    Attributes:
        epoch: of this run of the actor.
        next_poll_s: when to poll again; the actor sets the pace of its readers.
        is_reset: the actor did not know the reader's epoch, so its cursors are void and
            ``changes`` begins at the oldest outputs kept.
        changes: by namespace; if all of them are complete, a namespace not listed has none.
        refill: namespaces to send again, with the sequence numbers the actor has.
        is_unwritten: new outputs are only in the actor's memory, as its disk cannot be written.
        lost: namespaces that the reader will be asked to send again later, while another reader
            is sending them now.
    """

    epoch: str
    next_poll_s: float
    is_reset: bool = False
    changes: Mapping[str, Changes] = field(default_factory=dict)
    refill: Mapping[str, OriginRanges] = field(default_factory=dict)
    is_unwritten: bool = False
    lost: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the reader is up to date."""
        return all(change.is_complete for change in self.changes.values())

    @property
    def num_bytes(self) -> int:
        """About how much of the message changes and refill take."""
        changes = sum(len(name) + change.num_bytes for name, change in self.changes.items())
        refill = sum(refill_bytes(name, seen) for name, seen in self.refill.items())
        return changes + refill + sum(refill_bytes(name, {}) for name in self.lost)

    def covers(self, namespace: str) -> bool:
        """Whether the reader is up to date in ``namespace``, which it asked for."""
        change = self.changes.get(namespace)
        return self.is_complete if change is None else change.is_complete

    def encode(self, key: DatabaseKey) -> bytes:
        payload = {
            "epoch": self.epoch,
            "next_poll_s": self.next_poll_s,
            "is_reset": self.is_reset,
            "changes": {name: _pack_changes(change) for name, change in self.changes.items()},
            "refill": dict(self.refill),
            "is_unwritten": self.is_unwritten,
            "lost": list(self.lost),
        }
        return snapshot.encode(payload, kind="reply", key=key)

    @classmethod
    def decode(cls, data: bytes, key: DatabaseKey) -> Reply:
        """
        Raises:
            SnapshotError: corrupt, or of another tokenizer or model.
        """
        payload = snapshot.decode(data, kind="reply", fingerprint=key.fingerprint, model=key.model)
        fields = _Fields(payload)
        refill = fields.mapping("refill", dict)
        return cls(
            epoch=fields.get("epoch", str),
            next_poll_s=fields.get("next_poll_s", float),
            is_reset=fields.get("is_reset", bool),
            changes={
                name: _unpack_changes(item)
                for name, item in fields.mapping("changes", dict).items()
            },
            refill={name: checked_ranges(item) for name, item in refill.items()},
            is_unwritten=fields.get("is_unwritten", bool),
            lost=tuple(fields.items("lost", str)),
        )


def refill_bytes(namespace: str, seen: OriginRanges) -> int:
    """The most bytes a request takes for outputs of ``namespace`` that are not among ``seen``."""
    origins = sum(len(origin) + 6 + 19 * len(intervals) for origin, intervals in seen.items())
    return len(namespace) + 6 + origins


class _Fields:
    """A decoded payload whose fields are checked when they are read."""

    def __init__(self, payload: Any) -> None:
        self._payload = payload if isinstance(payload, dict) else {}

    def get(self, name: str, expected: type) -> Any:
        value = self._payload.get(name)
        if type(value) is not expected:
            raise SnapshotError(f"corrupt: {name} is missing or has another type")
        return value

    def items(self, name: str, expected: type) -> list[Any]:
        values: list[Any] = self.get(name, list)
        _check_types(name, values, expected)
        return values

    def mapping(self, name: str, expected: type) -> dict[str, Any]:
        values: dict[str, Any] = self.get(name, dict)
        _check_types(name, values, str)
        _check_types(name, values.values(), expected)
        return values

    def cursors(self, name: str) -> dict[str, int]:
        values = self.mapping(name, int)
        _integers(list(values.values()), len(values))
        return values


def _check_types(name: str, values: Iterable[Any], expected: type) -> None:
    if not all(type(value) is expected for value in values):
        raise SnapshotError(f"corrupt: {name} holds a value of another type")


def _integers(values: Any, count: int) -> list[int]:
    if not isinstance(values, list) or len(values) != count:
        raise SnapshotError("corrupt: a list has another length")
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise SnapshotError("corrupt: a number is out of range")
    return values


def _standing(wire: list[Any]) -> Standing:
    if len(wire) != 2 or type(wire[0]) is not str:
        raise SnapshotError("corrupt: a standing must be [epoch, cursor]")
    return Standing(wire[0], *_integers(wire[1:], 1))


def _pack_changes(change: Changes) -> dict[str, Any]:
    return {
        "outputs": change.segment.to_wire(),
        "cursor": change.cursor,
        "is_complete": change.is_complete,
        "is_flushed": change.is_flushed,
        "calibration": change.calibration or b"",
        "calibration_version": change.calibration_version,
    }


def _unpack_changes(wire: dict[str, Any]) -> Changes:
    fields = _Fields(wire)
    return Changes(
        segment=Segment.from_wire(fields.get("outputs", dict)),
        cursor=fields.get("cursor", int),
        is_complete=fields.get("is_complete", bool),
        is_flushed=fields.get("is_flushed", bool),
        calibration=fields.get("calibration", bytes) or None,
        calibration_version=fields.get("calibration_version", int),
    )
