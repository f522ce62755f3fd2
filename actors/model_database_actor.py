"""What one model generated anywhere in the cluster, kept by an actor.

It merges, keeps and distributes; nobody waits for it while generating a token.  Replicas talk to it
through :class:`actors.mirror.Mirror`.  After a restart it continues with what is on its disk, and
asks replicas for the rest.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from actors.readers import Readers
from actors.refills import Refills
from actors.settings import actor_settings
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.archive import next_message, take_message
from hdserve.databases.former_databases import forget_in_former
from hdserve.databases.messages import (
    MAX_REPLY_BYTES,
    Poll,
    Position,
    Publish,
    Reply,
    Standing,
    refill_bytes,
)
from hdserve.databases.output_files import database_directory, left_by_other_versions
from hdserve.databases.output_log import MergeCalibration, OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.partition import Partition
from hdserve.databases.seen_outputs import OriginRanges
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.databases.stored import stored_shards
from hdserve.errors import DatabaseError

logger = logging.getLogger(__name__)

_ROOM = MAX_REPLY_BYTES - 2**10
"""The room for the contents of a reply, without its envelope."""

_MIN_REPLY_ROOM = 2**12

_MAX_LAST_CALIBRATIONS = 2**14
"""The most pairs of a replica and a namespace whose last calibration is remembered."""

_MAX_DISK_WAIT_S = 5.0
"""How long a flush waits for a snapshot that is being written."""

_MAX_REOPEN_S = 60.0
"""The longest pause before a database that could not be read is tried again."""

_MAX_SLEEP_S = 86400.0
"""The longest sleep: Python refuses to sleep for centuries."""


class ExportPart(NamedTuple):
    """A part of what is kept of a namespace.

    Attributes:
        message: for ``import_``.
        cursor: of the next part.
        epoch: identifies the run, and reading of the disk, that the cursor belongs to; in another
            one it may be beyond the end.
    """

    message: bytes
    cursor: int
    is_last: bool
    epoch: str


class ModelDatabaseActor:
    """The database of one model; a plain class, so that tests can call it without Ray.

    Args:
        key: of the database; messages with another key are refused.
        merge_calibration: merges the calibration of two replicas; without it the last one written
            is kept.
    """

    def __init__(
        self,
        key: DatabaseKey,
        config: ModelDatabaseConfig,
        merge_calibration: MergeCalibration | None = None,
    ) -> None:
        self._key = key
        self._config = config
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._refills = Refills()
        self._readers = Readers(config.poll_interval_s)
        self._num_refused_calibrations = 0
        self._last_calibrations: dict[tuple[str, str], int] = {}
        self._merge_calibration = merge_calibration
        self._store: OutputStore | None = None
        self._open_failure = ""
        self._is_unwritten = config.snapshot_dir is not None
        self._epoch = uuid4().hex
        self._log = self._new_log(first_version=1)
        if config.snapshot_dir is not None:
            self._open_store(config.snapshot_dir)
            threading.Thread(target=self._sync_forever, daemon=True).start()

    def publish(self, message: bytes) -> int:
        """Add finished outputs and calibration; return how many outputs were new.

        Sending the last message again changes nothing.  Calibration that cannot be used is counted
        and left out; outputs and calibration from before a flush of the namespace are left out
        without being counted.

        Raises:
            SnapshotError: it is corrupt, or of another model or tokenizer.
        """
        received = Publish.decode(message, self._key.fingerprint, self._key.model)
        with self._lock:
            received = self._without_flushed(received)
            num_new = self._append(received.outputs)
            now_s = time.monotonic()
            for namespace in received.outputs:
                self._refills.extend(namespace, received.sender, now_s)
            for namespace in received.refilled:
                self._refills.finish(namespace, received.sender)
            for namespace, calibration in received.calibrations.items():
                standing = received.standings.get(namespace, Standing())
                is_new = self._is_new(received.sender, namespace, calibration)
                if is_new and not self._was_flushed_since(namespace, standing):
                    self._take_calibration(namespace, calibration)
        return num_new

    def changes_since(self, message: bytes) -> bytes:
        """The encoded :class:`Reply` to an encoded :class:`Poll`, at most ``MAX_REPLY_BYTES`` but
        for the names of outputs in a refill.

        Raises:
            SnapshotError: the message is corrupt, or of another model or tokenizer.
        """
        poll = Poll.decode(message, self._key)
        with self._lock:
            self._readers.note(poll.reader, len(poll.positions))
            self._forget_silent_readers()
            self._note_losses(poll)
            is_reset = self._is_unknown_epoch(poll.epoch)
            idle = poll.idle
            if is_reset:
                idle = {name: min(cursor, 1) for name, cursor in idle.items()}
            flushes = self._log.flushes_since(idle)
            reply = Reply(self._epoch, 0.0, is_reset, flushes, is_unwritten=self._has_unwritten)
            reply = replace(reply, refill=self._refill(poll, (_ROOM - reply.num_bytes) // 2))
            reply = replace(reply, lost=self._lost(poll, reply, (_ROOM - reply.num_bytes) // 4))
            room = _ROOM - reply.num_bytes
            while True:
                data = self._with_changes(reply, poll, room).encode(self._key)
                if len(data) <= MAX_REPLY_BYTES or room < _MIN_REPLY_ROOM:
                    return data
                room = room * 3 // 4

    def flush(self, namespace: str) -> int:
        """Forget ``namespace``: here, on disk, and in each mirror at its next poll; return how many
        outputs it had.

        If the actor loses its disk, or dies without having one, before a mirror has polled, that
        mirror does not learn of the flush and sends its outputs again; then flush once more.

        Raises:
            DatabaseInUse: it is forgotten here, but another process, such as the actor of another
                cluster, still has it and owns its files.
            DatabaseError: it is forgotten, but files of it could not be deleted, or not yet; this
                is tried again.
        """
        with self._lock:
            num_outputs = self._log.partition(namespace).num_outputs
            self._log.flush(namespace)
            self._refills.forget(namespace)
            if self._store:
                self._store.flush_later(namespace)
        if not self._sync_lock.acquire(timeout=_MAX_DISK_WAIT_S):  # all other calls wait meanwhile
            raise DatabaseError(
                f"namespace {namespace} was forgotten in memory, but the disk is slow: its files "
                "are deleted after the present write"
            )
        try:
            with self._lock:
                if self._store:
                    self._store.flush(namespace, self._log)
                elif self._open_failure:
                    raise DatabaseError(self._open_failure)
        finally:
            self._sync_lock.release()
        return num_outputs

    def flush_former(self, namespace: str, root: Path, in_use: Iterable[str]) -> None:
        """Delete what the model's databases for other numbers of shards, and for former tokenizers,
        have of ``namespace`` below ``root``.

        Args:
            in_use: the directories of actors that were flushed, including this one's.

        Raises:
            DatabaseInUse: yet another process is writing one of them.
            DatabaseError: one cannot be changed, or read.
        """
        forget_in_former(root, self._key, namespace, map(Path, in_use))

    def export(self, namespace: str, cursor: int = 0) -> ExportPart:
        """Outputs of ``namespace`` from ``cursor`` on, and its calibration.

        Raises:
            DatabaseError: the disk cannot be read, so that this would be incomplete.
        """
        with self._lock:
            if self._open_failure:
                raise DatabaseError(self._open_failure)
            message, cursor, is_last = next_message(self._log, namespace, cursor)
            epoch = self._epoch
        return ExportPart(message.encode(self._key), cursor, is_last, epoch)

    def shards_on_disk(self, root: Path) -> list[str]:
        """The labels of the shards that have a database of this model below ``root``.

        Raises:
            DatabaseError: the disk cannot be read.
        """
        return [path.name for path in stored_shards(root, self._key)]

    def import_(self, message: bytes) -> int:
        """Add the result of ``export``, of this or another model's database of this tokenizer.

        Returns:
            The number of new outputs.

        Raises:
            SnapshotError: it is corrupt, of another tokenizer, or has entries no database may have.
        """
        received = Publish.decode(message, self._key.fingerprint, model=None)
        with self._lock:
            return take_message(received, self._log, self._store)

    def snapshot_now(self) -> bool:
        """Write everything to the disk; ``False`` if that failed, or there is no disk."""
        root = self._config.snapshot_dir
        if root is None:
            return False
        with self._sync_lock:
            if self._store is None:
                self._open_store(root)
            if self._store is None:
                return False
            is_complete = self._store.sync(self._log, self._lock)
            if self._store.is_overtaken or self._store.is_closed:
                self._open_store(root)
                is_complete = self._store.sync(self._log, self._lock)
            self._is_unwritten = not is_complete
            return is_complete

    def info(self) -> dict[str, Any]:
        """What is kept, for tools and metrics; nothing of namespaces that were flushed."""
        with self._lock:
            self._forget_silent_readers()
            partitions = {name: self._log.partition(name) for name in self._log.namespaces()}
            return {
                "model": self._key.model,
                "fingerprint": self._key.fingerprint,
                "pid": os.getpid(),
                "epoch": self._epoch,
                "settings": actor_settings(self._config),
                "num_readers": len(self._readers),
                "num_bytes": self._log.num_bytes,
                "directory": str(self._store.directory) if self._store else None,
                "is_writable": bool(self._store and self._store.is_writable),
                "is_unwritten": self._has_unwritten,
                "num_write_failures": self._store.num_failures if self._store else 0,
                "num_refused_files": self._store.num_refused if self._store else 0,
                "num_refused_calibrations": self._num_refused_calibrations,
                "namespaces": {
                    name: {
                        "num_outputs": partition.num_outputs,
                        "num_bytes": partition.num_bytes,
                        "next_version": partition.next_version,
                    }
                    for name, partition in partitions.items()
                    if partition.num_outputs or partition.calibration
                },
            }

    def close(self) -> str | None:
        """Write everything and release the directory, until the next snapshot.

        Returns:
            Why something is only in memory, if it is: then the directory is not released.  ``None``
            also where nothing is to be written.
        """
        if self._config.snapshot_dir is None:
            return None
        self.snapshot_now()
        with self._sync_lock, self._lock:
            if self._store is None:
                return self._open_failure
            if not self._store.sync(self._log):
                return self._store.why_unwritten
            self._store.close()
        return None

    @property
    def _has_unwritten(self) -> bool:
        """Whether something that should be on disk is only in memory, as far as is known."""
        return self._is_unwritten or bool(self._store and self._store.is_failing)

    def _new_log(self, first_version: int) -> OutputLog:
        return OutputLog(
            self._config.max_bytes,
            self._config.max_total_bytes,
            first_version=first_version,
            merge_calibration=self._merge_calibration,
        )

    def _open_store(self, root: Path) -> None:
        """Continue with what is on the disk.  Outputs that arrived before it could be read, or
        before another waiting process wrote it, are added after that; then readers start over, as
        after a restart.

        While the disk cannot be read the database is only in memory.
        """
        try:
            store, log = self._restored(root)
        except (DatabaseError, OSError) as error:
            if str(error) != self._open_failure:
                logger.error("nothing is kept on disk until it can be read: %s", error)
            self._open_failure = str(error)
            return
        with self._lock:
            before, earlier = self._store, self._log
            self._log = log
            self._store, self._epoch, self._open_failure = store, store.epoch, ""
            self._is_unwritten = not store.is_writable
            for name in earlier.namespaces():
                self._take_earlier(name, earlier.partition(name), before)
        if before:
            before.close()

    def _restored(self, root: Path) -> tuple[OutputStore, OutputLog]:
        """
        Raises:
            DatabaseError, OSError: the disk cannot be read.
        """
        directory = database_directory(root, self._key)
        others = left_by_other_versions(root)
        store = OutputStore(directory, self._key)
        log = self._new_log(store.first_version)
        try:
            store.restore(log)
        except DatabaseError:
            store.close()
            raise
        for other, what_to_do in others.items():
            if other.name == directory.name:
                logger.warning("%s is left unchanged: %s", other, what_to_do)
        return store, log

    def _take_earlier(self, namespace: str, earlier: Partition, before: OutputStore | None) -> None:
        """Take over outputs of ``namespace`` that arrived while the disk could not be read, or
        after ``before`` was opened; none if it was flushed on the disk meanwhile, as the order is
        not known."""
        first_version = before.first_version if before else 0
        is_flushed = before.has_flushed(namespace) if before else earlier.flushed_version > 0
        if is_flushed:
            self._log.flush(namespace)
            if self._store:
                self._store.flush_later(namespace)
        if before and self._store and self._store.knows_newer_flush(namespace, before):
            return
        for version, segment in earlier.segments():
            if version >= first_version:
                self._append({namespace: segment})
        if earlier.calibration:
            self._take_calibration(namespace, earlier.calibration)

    def _without_flushed(self, received: Publish) -> Publish:
        """Without what its sender had before a flush that it has not heard of."""
        flushed = {
            name
            for name, cursor in received.cursors.items()
            if self._was_flushed_since(name, Standing(received.epoch, cursor))
        }
        is_asked_now = received.epoch in ("", self._epoch)
        refilled = [name for name in received.refilled if is_asked_now and name not in flushed]
        return replace(
            received,
            outputs={name: part for name, part in received.outputs.items() if name not in flushed},
            refilled=tuple(refilled),
        )

    def _was_flushed_since(self, namespace: str, standing: Standing) -> bool:
        flushed_version = self._log.partition(namespace).flushed_version
        if not flushed_version:
            return False
        return self._is_unknown_epoch(standing.epoch) or standing.cursor < flushed_version

    def _append(self, outputs: Mapping[str, Segment]) -> int:
        num_new = 0
        for namespace, segment in outputs.items():
            for appended in self._log.append(namespace, segment):
                num_new += len(appended.segment)
                if self._store:
                    self._store.append(namespace, appended)
                    self._is_unwritten |= self._store.is_closed
        return num_new

    def _is_new(self, sender: str, namespace: str, calibration: bytes) -> bool:
        """Whether a calibration is not from a repeated message: merged twice it would count
        twice."""
        last = self._last_calibrations.pop((sender, namespace), None)
        self._last_calibrations[sender, namespace] = hash(calibration)
        if len(self._last_calibrations) > _MAX_LAST_CALIBRATIONS:
            del self._last_calibrations[next(iter(self._last_calibrations))]
        return last != hash(calibration)

    def _take_calibration(self, namespace: str, calibration: bytes) -> None:
        try:
            changed = self._log.set_calibration(namespace, calibration)
        except DatabaseError as error:
            if not self._num_refused_calibrations:
                logger.warning("of %s, %r: %s", self._key.model, namespace, error)
            self._num_refused_calibrations += 1
            return
        if self._store:
            self._store.state_changed(*changed)

    def _refill(self, poll: Poll, room: int) -> dict[str, OriginRanges]:
        """What to ask the reader for: as many namespaces as fit ``room`` bytes, at least one."""
        now_s = time.monotonic()
        refill: dict[str, OriginRanges] = {}
        for name, position in poll.positions.items():
            if refill and room <= 0:
                break
            if position.num_held and self._refills.ask(name, poll.reader, now_s):
                refill[name] = self._log.partition(name).seen()
                room -= refill_bytes(name, refill[name])
        return refill

    def _lost(self, poll: Poll, reply: Reply, room: int) -> tuple[str, ...]:
        """What the reader will be asked for later: as many namespaces as fit ``room`` bytes."""
        lost = []
        for name, position in poll.positions.items():
            if room <= 0:
                break
            is_done = not position.num_held or name in reply.refill
            if not is_done and self._refills.is_wanted(name, poll.reader):
                lost.append(name)
                room -= refill_bytes(name, {})
        return tuple(lost)

    def _with_changes(self, reply: Reply, poll: Poll, room: int) -> Reply:
        """Answer with at most ``room`` bytes of outputs and calibration."""
        positions = poll.positions
        if reply.is_reset:
            positions = {name: position.restarted() for name, position in positions.items()}
        changes = self._log.changes_since(
            {name: position.cursor for name, position in positions.items()},
            max_bytes=room,
            exclude_origin=poll.reader,
            calibration_versions={
                name: position.calibration_version for name, position in positions.items()
            },
            takes_one=not reply.num_bytes,
            catch_up_bytes=poll.catch_up_bytes,
        )
        reply = replace(reply, changes={**changes, **reply.changes})
        next_poll_s = self._readers.next_poll_s(is_complete=reply.is_complete)
        return replace(reply, next_poll_s=next_poll_s)

    def _is_unknown_epoch(self, epoch: str) -> bool:
        """Whether the version numbers of ``epoch`` mean nothing in this run."""
        return epoch != self._epoch and (self._store is None or epoch not in self._store.epochs)

    def _note_losses(self, poll: Poll) -> None:
        """Compare what the reader knew of earlier runs with what was restored from the disk."""
        first_version = self._store.first_version if self._store else 0
        for namespace, position in poll.positions.items():
            is_of_this_run = poll.epoch == self._epoch and position.cursor >= first_version
            knows_nothing = position.cursor <= 1 and not position.num_held
            if is_of_this_run or (knows_nothing and namespace not in poll.published):
                continue
            if self._has_lost(poll, namespace, position):
                self._refills.note_lost(namespace)

    def _has_lost(self, poll: Poll, namespace: str, position: Position) -> bool:
        """Whether something the reader knows of ``namespace`` is missing here, or may be."""
        if poll.epoch and self._is_incomplete(poll.epoch, namespace):
            return True
        partition = self._log.partition(namespace)
        return partition.lacks_end_before(position.cursor) or self._lacks(poll, namespace)

    def _is_incomplete(self, epoch: str, namespace: str) -> bool:
        """Whether something that arrived in the run ``epoch``, or before, is missing here."""
        store = self._store
        if store is None or self._is_unknown_epoch(epoch):
            return epoch != self._epoch
        return store.num_refused > 0 or store.is_incomplete(namespace)

    def _lacks(self, poll: Poll, namespace: str) -> bool:
        """Whether something that the reader has published is missing here."""
        start, stop = poll.published.get(namespace, (0, 0))
        return stop > 0 and not self._log.partition(namespace).has_seen(poll.reader, start, stop)

    def _forget_silent_readers(self) -> None:
        if silent := self._readers.forget_silent():
            self._refills.forget_readers(silent)

    def _sync_forever(self) -> None:
        """What is on the disk is read from its beginning at every try, so those that fail come
        further and further apart."""
        interval_s = pause_s = min(self._config.snapshot_interval_s, _MAX_SLEEP_S)
        while True:
            time.sleep(pause_s)
            is_open = self._store is not None
            pause_s = interval_s if is_open else max(interval_s, min(2 * pause_s, _MAX_REOPEN_S))
            try:
                self.snapshot_now()
            except Exception:  # the database continues in memory
                logger.exception("the snapshot of %s failed", self._key.model)
