"""A model database in the cluster: actors that are gone or silent, archives that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from actors import detached
from actors.model_database_actor import ModelDatabaseActor
from actors.shards import WHOLE, shard_of, shards
from deployments.http.cluster_database import ClusterDatabase, ask_actor
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.append_log import MAX_RECORD_BYTES, pack_record
from hdserve.databases.archive import encode_end
from hdserve.databases.messages import Poll, Publish, Reply
from hdserve.databases.output_log import MAX_CALIBRATION_BYTES
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.drafting.states import pack_states
from hdserve.errors import DatabaseGone, DatabaseInUse, InvalidRequest, SnapshotError
from tests.actors.listeners import Listener
from tests.clusters import local_ray
from tests.deployments.http.cluster_databases import KEY, Handle, archive_of, database
from tests.waiting import WAIT_S


def test_a_database_that_is_gone_may_come_back() -> None:
    """So the client is told to try again."""
    with pytest.raises(DatabaseGone, match="try again") as caught:
        asyncio.run(ask_actor(_gone()))
    assert caught.value.status == 503


def test_a_time_limit_of_ray_is_not_taken_for_our_own() -> None:
    """Which is longer; Ray's error is a ``TimeoutError``, too."""

    async def fail() -> None:
        raise GetTimeoutError("the head restarts")

    with pytest.raises(DatabaseGone, match="is out of reach; try again"):
        asyncio.run(ask_actor(fail()))


def test_what_an_actor_keeps_on_disk(tmp_path: Path) -> None:
    """Whether it can, and with which settings: others may be deployed than it was started with."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path / "snapshots", max_bytes=2**20)
    (tmp_path / "snapshots").touch()
    actor = ModelDatabaseActor(KEY, config)
    found = ClusterDatabase(KEY, ModelDatabaseConfig(), {WHOLE: Handle(actor)})
    (state,) = asyncio.run(found.info())["actors"]
    assert (state["is_writable"], state["is_unwritten"]) == (False, True)
    assert state["num_write_failures"] == 1
    assert state["settings"]["max_bytes"] == 2**20
    assert state["settings"]["snapshot_dir"] == str(tmp_path / "snapshots")
    (tmp_path / "snapshots").unlink()
    assert actor.snapshot_now()
    (state,) = asyncio.run(found.info())["actors"]
    assert (state["is_writable"], state["is_unwritten"]) == (True, False)


def test_an_archive_cannot_have_a_record_of_any_length() -> None:
    """It is refused by the length it declares, before more of it is read."""
    num_read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_read
        yield (MAX_RECORD_BYTES + 1).to_bytes(4, "little") + bytes(4)
        while True:
            num_read += 1
            yield bytes(2**16)

    database = ClusterDatabase(KEY, ModelDatabaseConfig(), {})
    with pytest.raises(InvalidRequest, match="impossible length"):
        asyncio.run(database.import_(chunks()))
    assert num_read == 0


def test_an_import_occupies_the_actor_for_a_moment_at_a_time() -> None:
    """Though an archive's messages are long; all arrives."""
    outputs = Segment.from_outputs("origin", 0, [np.arange(16_000, dtype=np.uint32)] * 9)
    calibration = pack_states({})
    message = Publish("archive-part", {"n": outputs}, {"n": calibration, "other": calibration})

    async def chunks() -> AsyncIterator[bytes]:
        yield pack_record(message.encode(KEY)) + pack_record(encode_end(KEY))

    handle = Handle(ModelDatabaseActor(KEY, ModelDatabaseConfig()))
    found = ClusterDatabase(KEY, ModelDatabaseConfig(), {WHOLE: handle})
    assert asyncio.run(found.import_(chunks())) == 9
    assert handle.num_imports == 2 + 3
    namespaces = handle.actor.info()["namespaces"]
    assert namespaces["n"]["num_outputs"] == 9
    assert {*namespaces} == {"n", "other"}


def test_a_calibration_that_is_none_is_refused() -> None:
    """Replicas could not read it."""
    message = Publish("archive-part", {}, {"default": b"\xff\x00garbage"})

    async def chunks() -> AsyncIterator[bytes]:
        yield pack_record(message.encode(KEY)) + pack_record(encode_end(KEY))

    _, model_database = database()
    with pytest.raises(InvalidRequest, match="the archive cannot be used: the drafters' states"):
        asyncio.run(model_database.import_(chunks()))


def test_an_archive_of_nothing() -> None:
    """Every export says whose it is, so this is none, but perhaps one that failed."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b""

    _, model_database = database()
    with pytest.raises(InvalidRequest, match="the archive is empty"):
        asyncio.run(model_database.import_(chunks()))


def test_an_archive_that_is_cut_between_two_records() -> None:
    """Is told from a whole one, with what of it was added."""
    _, found = database()

    async def exported() -> list[bytes]:
        return [record async for record in found.export(["a", "b"])]

    records = asyncio.run(exported())

    async def chunks(num_records: int) -> AsyncIterator[bytes]:
        for record in records[:num_records]:
            yield record

    for num_records in range(1, len(records)):
        with pytest.raises(InvalidRequest, match=r"the archive is cut off$"):
            asyncio.run(found.import_(chunks(num_records)))
    assert asyncio.run(found.import_(chunks(len(records)))) == 0
    _, other = database(namespaces=())
    with pytest.raises(InvalidRequest, match=r"is cut off; new outputs added before that: 1$"):
        asyncio.run(other.import_(chunks(1)))


@pytest.mark.parametrize("num_records", [0, 1])
def test_an_export_from_an_actor_that_was_started_again(num_records: int) -> None:
    """Has no end: of what it held less may be there, and no cursor tells."""
    handle = Handle(ModelDatabaseActor(KEY, ModelDatabaseConfig()))
    for namespace in ("a", "b"):
        handle.actor.import_(archive_of(namespace).encode(KEY))
    found = ClusterDatabase(KEY, ModelDatabaseConfig(), {WHOLE: handle})
    came = []

    async def export() -> None:
        names = list((await found.info())["namespaces"])
        records = found.export(names)
        came.extend([await anext(records) for _ in range(num_records)])
        handle.actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
        came.extend([record async for record in records])

    async def chunks() -> AsyncIterator[bytes]:
        for record in came:
            yield record

    with pytest.raises(DatabaseGone, match="was restarted, or has read its disk again"):
        asyncio.run(export())
    assert len(came) == num_records
    with pytest.raises(InvalidRequest, match=r"the archive is (cut off|empty)"):
        asyncio.run(found.import_(chunks()))


def test_a_shard_that_does_not_answer(tmp_path: Path) -> None:
    """Is named, and nothing is told of the others alone."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path, num_shards=2)
    actors = {shard: ModelDatabaseActor(KEY, shard.config(config)) for shard in shards(2)}
    gone = next(shard for shard in actors if shard != shard_of("default", 2))
    handles = {shard: Handle(actor) for shard, actor in actors.items()}
    handles[gone].info.remote = _gone
    found = ClusterDatabase(KEY, config, dict(handles))
    with pytest.raises(DatabaseGone, match=f"the model database {gone.label} is out of reach"):
        asyncio.run(found.info())


async def _gone() -> None:
    raise RayActorError


@pytest.mark.parametrize("num_bytes", [MAX_CALIBRATION_BYTES, MAX_CALIBRATION_BYTES + 1])
def test_a_calibration_that_is_too_large(num_bytes: int) -> None:
    """Its record is refused, and nothing of it added."""
    actor, found = database()

    async def chunks() -> AsyncIterator[bytes]:
        yield pack_record(archive_of("new", num_bytes).encode(KEY))
        yield pack_record(encode_end(KEY))

    if num_bytes <= MAX_CALIBRATION_BYTES:
        assert asyncio.run(found.import_(chunks())) == 1
        return
    with pytest.raises(InvalidRequest, match="a calibration of 65537 bytes is over the 65536"):
        asyncio.run(found.import_(chunks()))
    assert "new" not in actor.info()["namespaces"]


@pytest.mark.parametrize("namespace", ["", "a" * 65, "a b", "a/b", "é", "a\n"])
def test_an_archive_of_a_namespace_that_no_key_could_have(namespace: str) -> None:
    """Is refused: nobody could draft from it, and not every name could be forgotten."""
    actor, found = database()

    async def chunks() -> AsyncIterator[bytes]:
        yield pack_record(archive_of(namespace).encode(KEY))

    with pytest.raises(InvalidRequest, match="the archive cannot be used: it has a namespace '"):
        asyncio.run(found.import_(chunks()))
    with pytest.raises(SnapshotError, match="1 to 64 letters"):
        actor.import_(archive_of(namespace).encode(KEY))
    assert set(actor.info()["namespaces"]) == {"a", "b"}


def test_what_was_forgotten_is_not_listed() -> None:
    """Of it, and of a namespace that never was, only the mark for replicas stays."""
    actor, found = database()
    for namespace in ("a", "nobody"):
        asyncio.run(found.flush(namespace))
    assert list(asyncio.run(found.info())["namespaces"]) == ["b"]
    poll = Poll("r", "", {}, idle={"a": 1, "nobody": 1})
    reply = Reply.decode(actor.changes_since(poll.encode(KEY)), KEY)
    assert all(reply.changes[name].is_flushed for name in ("a", "nobody"))


@pytest.mark.parametrize(("before", "now"), [(1, 4), (4, 1), (2, 4)])
def test_what_was_forgotten_does_not_come_back_with_the_former_number_of_shards(
    before: int, now: int, tmp_path: Path
) -> None:
    """Nor with the former tokenizer; other namespaces do."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path)
    other = next(
        name
        for name in (f"other-{number}" for number in range(100))
        if all(shard_of(name, number) == shard_of("a", number) for number in (before, now))
    )
    keys = (KEY, DatabaseKey(KEY.model, "former"))
    for key in keys:
        actor = ModelDatabaseActor(key, shard_of("a", before).config(config))
        for name in ("a", other):
            actor.import_(archive_of(name).encode(key))
        actor.close()
    shard = shard_of("a", now)
    current = ModelDatabaseActor(KEY, shard.config(config))
    current.import_(archive_of("a").encode(KEY))
    new = config.model_copy(update={"num_shards": now})
    found = ClusterDatabase(KEY, new, {shard: Handle(current)})
    assert asyncio.run(found.flush("a")) == 1
    for key in keys:
        actor = ModelDatabaseActor(key, shard_of("a", before).config(config))
        assert list(actor.info()["namespaces"]) == [other]
        actor.close()


@pytest.mark.parametrize("has_disk", [False, True])
def test_what_is_forgotten_is_by_actors_of_the_former_number_of_shards(
    has_disk: bool, tmp_path: Path
) -> None:
    """Those that still run, and keep such a namespace."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path if has_disk else None)
    actors = {shard: ModelDatabaseActor(KEY, shard.config(config)) for shard in [WHOLE, *shards(2)]}
    for actor in actors.values():
        actor.import_(archive_of("a").encode(KEY))
    former = [(shard, Handle(actor)) for shard, actor in actors.items() if shard != WHOLE]
    found = ClusterDatabase(KEY, config, {WHOLE: Handle(actors[WHOLE])}, former)
    elsewhere = next(shard for shard in shards(2) if shard != shard_of("a", 2))
    if has_disk:
        with pytest.raises(DatabaseInUse, match=f"but .*{elsewhere.label}.* another process"):
            asyncio.run(found.flush("a"))
        actors[elsewhere].close()
    assert asyncio.run(found.flush("a")) == (0 if has_disk else 2)
    kept = {shard for shard, actor in actors.items() if actor.info()["namespaces"]}
    assert kept == {elsewhere}
    left = [path for path in tmp_path.rglob("*/*/*/*") if path.suffix in (".log", ".chunk")]
    assert left == []


def test_an_actor_of_the_former_number_of_shards_that_is_out_of_reach() -> None:
    """Has perhaps not forgotten it, so that the administrator is told; the current one has."""
    actor, _ = database()
    gone = Handle(actor)
    gone.flush.remote = lambda _: _gone()
    former = [(shard, gone) for shard in shards(2)]
    found = ClusterDatabase(KEY, ModelDatabaseConfig(), {WHOLE: Handle(actor)}, former)
    with pytest.raises(DatabaseGone):
        asyncio.run(found.flush("a"))
    assert "a" not in actor.info()["namespaces"]


def test_a_database_that_does_not_answer() -> None:
    """Its actor may wait for a place in the cluster, or hang."""

    async def asked() -> None:
        with pytest.raises(DatabaseGone, match=r"0\.01 s; try again"):
            await ask_actor(asyncio.sleep(60.0), 0.01)

    asyncio.run(asked())


@pytest.mark.ray
def test_a_call_that_nobody_waits_for_any_more_is_withdrawn() -> None:
    """Else an actor that waits for a place would later forget what came after the question."""

    async def asked(actor: Any) -> None:
        with pytest.raises(DatabaseGone):
            await ask_actor(actor.tell.remote(b"too late"), 0.1)
        asking = asyncio.create_task(ask_actor(actor.tell.remote(b"client is gone")))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])

    with local_ray():
        holder = detached.get_or_create(Listener, "holder", 2, {})
        ray.get(holder.told.remote(), timeout=WAIT_S)
        waiting = detached.get_or_create(Listener, "waiting", 2, {})
        asyncio.run(asked(waiting))
        after = waiting.told.remote()
        ray.kill(holder)
        assert ray.get(after, timeout=WAIT_S) == []
