"""The model database of one model in the cluster, as the administrator sees and changes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors import model_database
from actors.shards import Shard, may_be_on_disk_alone, shard_of, shards
from deployments.off_loop import OffLoop
from hdserve.config import ModelDatabaseConfig
from hdserve.core import DEFAULT_NAMESPACE
from hdserve.databases.append_log import pack_record, take_record
from hdserve.databases.archive import check_message, encode_end, is_continued
from hdserve.databases.messages import Publish
from hdserve.databases.output_log import CHUNK_BYTES
from hdserve.databases.snapshot import DatabaseKey
from hdserve.drafting.registry import merge_drafter_states
from hdserve.drafting.states import unpack_states
from hdserve.errors import DatabaseGone, HdserveError, InvalidRequest, SnapshotError

OBJECT = "speculation.database"
"""The ``object`` field of a database's description."""

_INFO_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 30.0
_CHANGE_TIMEOUT_S = 120.0
"""How long a change may take; it may wait for a slow disk."""

_DATABASE = "the model database"

_ACTOR_STATE = (
    "directory",
    "is_writable",
    "is_unwritten",
    "num_write_failures",
    "num_refused_files",
    "settings",
)


class ClusterDatabase:
    """The model database of one model, through the actors of its shards.

    Args:
        config: the settings of an actor that has to be started.
        actors: the actors by shard; a shard has none if none of its namespaces was used since the
            cluster was started, even if it is on disk.
        former: shards and running actors for other numbers of shards, or other tokenizers.
        off_loop: has the threads that start actors; default: its own.
    """

    def __init__(
        self,
        key: DatabaseKey,
        config: ModelDatabaseConfig,
        actors: dict[Shard, Any],
        former: Sequence[tuple[Shard, Any]] = (),
        off_loop: OffLoop | None = None,
    ) -> None:
        self._key = key
        self._config = config
        self._actors = actors
        self._former = former
        self._off_loop = off_loop or OffLoop()
        self._epochs: dict[Shard, str] = {}

    async def info(self) -> dict[str, Any]:
        """Return what the database holds, by namespace, and the state of its actors; those of
        shards that are only on disk are started.

        Raises:
            HdserveError: an actor raised it, or is out of reach; this holds for all methods.
        """
        timeout_s = _START_TIMEOUT_S if await self._start_stored() else _INFO_TIMEOUT_S
        actors = dict(self._actors)
        found = await asyncio.gather(
            *(
                ask_actor(actor.info.remote(), timeout_s, _called(shard))
                for shard, actor in actors.items()
            )
        )
        self._epochs = {shard: info["epoch"] for shard, info in zip(actors, found, strict=True)}
        namespaces = {name: item for info in found for name, item in info["namespaces"].items()}
        return {
            "id": self._key.model,
            "object": OBJECT,
            "tokenizer_fingerprint": self._key.fingerprint,
            "num_bytes": sum(info["num_bytes"] for info in found),
            "num_readers": sum(info["num_readers"] for info in found),
            "num_shards": self._config.num_shards,
            "directories": [info["directory"] for info in found if info["directory"]],
            "actors": [{name: info.get(name) for name in _ACTOR_STATE} for info in found],
            "namespaces": {
                name: {"num_outputs": item["num_outputs"], "num_bytes": item["num_bytes"]}
                for name, item in sorted(namespaces.items())
            },
        }

    async def flush(self, namespace: str) -> int:
        """Forget a namespace, and return how many outputs actors had of it.

        What is stored for another number of shards, or a former tokenizer, is deleted too: it would
        be drafted from again if these were changed back.

        Raises:
            DatabaseInUse: not everything is forgotten, because a process that is not an actor of
                this cluster holds some of it.
        """
        actors = [await self._actor(namespace)]
        for shard, actor in self._former:
            if shard == shard_of(namespace, shard.num_shards):
                actors.append(actor)
        flushes = [actor.flush.remote(namespace) for actor in actors]
        num_outputs: list[int] = await asyncio.gather(*map(ask_actor, flushes))
        if (root := self._config.snapshot_dir) is not None:
            infos = await asyncio.gather(*(ask_actor(actor.info.remote()) for actor in actors))
            in_use = [info["directory"] for info in infos if info["directory"]]
            await ask_actor(actors[0].flush_former.remote(namespace, root, in_use))
        return sum(num_outputs)

    async def export(self, namespaces: list[str]) -> AsyncGenerator[bytes]:
        """Yield the records of an archive: at least its end, which identifies it.

        Raises:
            DatabaseGone: an actor was restarted since ``info``, or since the export began, and may
                hold less now, which no cursor shows.
        """
        for namespace in namespaces:
            cursor, is_last = 0, False
            while not is_last:
                message, cursor, is_last = await self._exported(namespace, cursor)
                yield pack_record(message)
        yield pack_record(encode_end(self._key))

    async def import_(self, chunks: AsyncIterator[bytes]) -> int:
        """Add the records of an archive as they come; return how many outputs were new.

        Raises:
            InvalidRequest: the archive is empty, corrupt, cut off or of another tokenizer, or has
                entries that no database may have; the records before that stay added.
        """
        buffer, num_new, is_empty, has_more = bytearray(), 0, True, False
        async for chunk in chunks:
            buffer += chunk
            try:
                while (taken := take_record(buffer)) is not None:
                    body, end = taken
                    del buffer[:end]
                    message = await asyncio.to_thread(
                        Publish.decode, body, self._key.fingerprint, model=None
                    )
                    num_new += await self._import_message(message)
                    is_empty, has_more = False, is_continued(message)
            except SnapshotError as error:
                raise _refused(f"the archive cannot be used: {error.message}", num_new) from error
        if buffer or has_more:
            raise _refused("the archive is cut off", num_new)
        if is_empty:
            raise InvalidRequest("the archive is empty")
        return num_new

    async def _import_message(self, received: Publish) -> int:
        """Add one message of an archive, and return how many of its outputs were new.

        Raises:
            SnapshotError: it has entries that no database may have; nothing of it was added.
        """
        check_message(received)
        for calibration in received.calibrations.values():
            unpack_states(calibration)
        num_new = 0
        for namespace, message in received.by_namespace():
            actor = await self._actor(namespace)
            for part in _parts(namespace, message):
                encoded = await asyncio.to_thread(part.encode, self._key)
                num_new += await ask_actor(actor.import_.remote(encoded))
        return num_new

    async def _exported(self, namespace: str, cursor: int) -> tuple[bytes, int, bool]:
        """Return a message, the cursor of the next one, and whether this is the last.

        Raises:
            DatabaseGone: it is from another run of the actor than the messages before.
        """
        shard = shard_of(namespace, self._config.num_shards)
        exporting = (await self._started(shard)).export.remote(namespace, cursor)
        part = await ask_actor(exporting, who=_called(shard))
        if part.epoch != self._epochs.setdefault(shard, part.epoch):
            reason = "was restarted, or has read its disk again, meanwhile; start the export again"
            raise DatabaseGone(f"{_called(shard)} {reason}")
        return part.message, part.cursor, part.is_last

    async def _start_stored(self) -> bool:
        """Start the actors of shards that are only on disk; returns whether there may be any.

        An actor looks for them: this process may not have that disk.
        """
        if not may_be_on_disk_alone(self._config):
            return False
        looking = (await self._actor(DEFAULT_NAMESPACE)).shards_on_disk
        default = _called(shard_of(DEFAULT_NAMESPACE, self._config.num_shards))
        labels = await ask_actor(
            looking.remote(self._config.snapshot_dir), _START_TIMEOUT_S, default
        )
        stored = [shard for shard in shards(self._config.num_shards) if shard.label in labels]
        await asyncio.gather(*map(self._started, stored))
        return True

    async def _actor(self, namespace: str) -> Any:
        """Return the actor that keeps a namespace; it is started if there is none."""
        return await self._started(shard_of(namespace, self._config.num_shards))

    async def _started(self, shard: Shard) -> Any:
        """Return the actor of a shard; it is started if there is none."""
        if shard not in self._actors:
            arguments = self._key, self._config, merge_drafter_states, shard
            starting = self._off_loop.waiting(model_database.get_or_create, *arguments)
            self._actors[shard] = await ask_actor(starting)
        return self._actors[shard]


def _called(shard: Shard) -> str:
    """The name of a shard's actor in error messages."""
    return f"{_DATABASE} {shard.label}" if shard.label else _DATABASE


def _refused(problem: str, num_new: int) -> InvalidRequest:
    """The error for an archive of whose records some were added before the ``problem``."""
    added = f"; new outputs added before that: {num_new}" if num_new else ""
    return InvalidRequest(f"{problem}{added}")


def _parts(namespace: str, message: Publish) -> Iterator[Publish]:
    """Yield a message of one namespace in parts that occupy its actor for a moment each."""
    if message.calibrations:
        yield Publish(message.sender, calibrations=message.calibrations)
    if namespace in message.outputs:
        for segment in message.outputs[namespace].split(CHUNK_BYTES):
            yield Publish(message.sender, {namespace: segment})


async def ask_actor(
    reference: Awaitable[Any], timeout_s: float = _CHANGE_TIMEOUT_S, who: str = _DATABASE
) -> Any:
    """Return the answer of an actor of a model database, or of the cluster that has the actors.  A
    call of an actor that nobody waits for any more is withdrawn, unless it has begun.

    Args:
        who: its name in the error if it does not answer.

    Raises:
        HdserveError: the actor raised it, or is out of reach.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _answer(reference)
    except RayError as error:  # which may be a TimeoutError, too
        cause = error.cause if isinstance(error, RayTaskError) else None
        if isinstance(cause, HdserveError):
            raise cause from error
        raise DatabaseGone(f"{who} is out of reach; try again") from error
    except TimeoutError as error:
        reason = f"{who} has not answered in {timeout_s:g} s; try again"
        raise DatabaseGone(reason) from error


async def _answer(reference: Awaitable[Any]) -> Any:
    try:
        return await reference
    except asyncio.CancelledError:
        if isinstance(reference, ray.ObjectRef):
            ray.cancel(reference)  # it would be carried out however much later
        raise
