"""What the administrator's routes do with actors that are gone and archives that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import SecretStr
from ray.exceptions import RayActorError
from starlette.testclient import TestClient

from actors import model_database
from actors.model_database_actor import ModelDatabaseActor
from actors.shards import WHOLE
from deployments.gateway import Gateway
from deployments.generation import ModelInfo
from deployments.http import admin
from deployments.http.admin import _ask, _Database
from deployments.http.routes import build_api
from hdserve.access import read_access
from hdserve.config import (
    AccessConfig,
    AutoscalingConfig,
    ModelConfig,
    ModelDatabaseConfig,
    ServeConfig,
    default_config,
)
from hdserve.databases.append_log import MAX_RECORD_BYTES, pack_record, take_record
from hdserve.databases.messages import Poll, Publish, Reply
from hdserve.databases.output_log import MAX_CALIBRATION_BYTES
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseGone, InvalidRequest, SnapshotError

KEY = DatabaseKey("m", "f")
ADMIN_KEY = "the-key-of-the-administrator"
INFO = ModelInfo(
    name=KEY.model,
    max_model_len=64,
    dtype="float32",
    device="cpu",
    is_compiled=False,
    is_exact=False,
    num_threads=1,
    num_slots=1,
    num_kv_tokens=64,
    num_running=0,
    num_waiting=0,
    weight_bytes=1,
    drafters=(),
    tokenizer_fingerprint=KEY.fingerprint,
)


class Handle:
    """Of an actor that runs here, and dies after so many records of an export."""

    def __init__(self, actor: ModelDatabaseActor, num_records: int = 1000) -> None:
        self._actor = actor
        self._num_records = num_records
        self.info = SimpleNamespace(remote=self._info)
        self.import_ = SimpleNamespace(remote=self._import)
        self.export = SimpleNamespace(remote=self._export)
        self.flush = SimpleNamespace(remote=self._flush)

    async def _info(self) -> Any:
        return self._actor.info()

    async def _import(self, message: bytes) -> int:
        return self._actor.import_(message)

    async def _flush(self, namespace: str) -> int:
        return self._actor.flush(namespace)

    async def _export(self, namespace: str, cursor: int) -> Any:
        if not self._num_records:
            raise RayActorError
        self._num_records -= 1
        return self._actor.export(namespace, cursor)


def database(num_records: int = 1000) -> tuple[ModelDatabaseActor, _Database]:
    """One with two namespaces, and its actor."""
    config = ModelDatabaseConfig()
    actor = ModelDatabaseActor(KEY, config)
    actor.import_(archive_of("a").encode(KEY))
    actor.import_(archive_of("b").encode(KEY))
    return actor, _Database(KEY, config, {WHOLE: Handle(actor, num_records)})


def archive_of(namespace: str, num_calibration_bytes: int = 0) -> Publish:
    outputs = {namespace: Segment.from_outputs("origin", 0, [np.ones(3, np.uint32)])}
    calibration = bytes(num_calibration_bytes)
    return Publish("archive", outputs, {namespace: calibration} if calibration else {})


def test_a_database_that_is_gone_may_come_back() -> None:
    """So the client is told to try again."""

    async def gone() -> None:
        raise RayActorError

    with pytest.raises(DatabaseGone, match="try again") as caught:
        asyncio.run(_ask(gone()))
    assert caught.value.status == 503


def test_what_an_actor_keeps_on_disk(tmp_path: Path) -> None:
    """Whether it can, and with which settings: others may be deployed than it was started with."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path / "snapshots", max_bytes=2**20)
    (tmp_path / "snapshots").touch()
    actor = ModelDatabaseActor(KEY, config)
    found = _Database(KEY, ModelDatabaseConfig(), {WHOLE: Handle(actor)})
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

    database = _Database(DatabaseKey("m", "f"), ModelDatabaseConfig(), {})
    with pytest.raises(InvalidRequest, match="impossible length"):
        asyncio.run(database.import_(chunks()))
    assert num_read == 0


def test_an_archive_of_nothing() -> None:
    """Every export says whose it is, so this is none, but perhaps one that failed."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b""

    _, model_database = database()
    with pytest.raises(InvalidRequest, match="the archive is empty"):
        asyncio.run(model_database.import_(chunks()))


@pytest.mark.parametrize("num_bytes", [MAX_CALIBRATION_BYTES, MAX_CALIBRATION_BYTES + 1])
def test_a_calibration_that_is_too_large(num_bytes: int) -> None:
    """Its record is refused, and nothing of it added."""
    actor, found = database()

    async def chunks() -> AsyncIterator[bytes]:
        yield pack_record(archive_of("new", num_bytes).encode(KEY))

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


def ask(
    method: str, path: str, num_records: int, monkeypatch: pytest.MonkeyPatch, *more: str
) -> httpx.Response:
    """The answer of a route about :func:`database`, with more namespaces."""
    actor, found = database(num_records)
    for namespace in more:
        actor.publish(archive_of(namespace).encode(KEY))

    async def opened(*_: Any, **__: Any) -> _Database:
        return found

    monkeypatch.setattr(admin, "_open", opened)
    access = read_access(AccessConfig(admin_key=SecretStr(ADMIN_KEY)))
    api = build_api(Gateway(default_config(), {}, access))
    with TestClient(api, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        return client.request(method, f"/v1/speculation/databases/hdserve-tiny{path}")


def test_a_sleeping_model_is_left_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor has all that the routes need: no replica, of which there is none, is asked."""
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    actor.import_(archive_of("a").encode(KEY))
    found = {KEY: {WHOLE: Handle(actor)}}
    monkeypatch.setattr(model_database, "get_all", lambda key, _: found[key])
    model = ModelConfig(name="m", model="m", autoscaling=AutoscalingConfig(min_replicas=0))
    access = read_access(AccessConfig(admin_key=SecretStr(ADMIN_KEY)))
    gateway = Gateway(ServeConfig(models=(model,)), {}, access)
    gateway._infos.learn(INFO)
    path = "/v1/speculation/databases/m"
    with TestClient(build_api(gateway), headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        assert client.get(path).json()["namespaces"]["a"]["num_outputs"] == 1
        archive = client.get(f"{path}/export").content
        flushed = client.delete(path, params={"namespace": "a"}).json()
        assert flushed == {"model": "m", "flushed": "a", "num_outputs": 1}
        assert client.post(f"{path}/import", content=archive).status_code == 200
    assert "a" in actor.info()["namespaces"]


@pytest.mark.parametrize("num_records", [0, 1000])
def test_an_export_of_a_database_that_is_gone(
    num_records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is an error, and no archive without an end."""
    answer = ask("GET", "/export", num_records, monkeypatch)
    if not num_records:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_gone")
        return
    assert answer.status_code == 200
    namespaces, position = set(), 0
    while position < len(answer.content):
        taken = take_record(answer.content, position)
        assert taken is not None
        body, position = taken
        namespaces |= set(Publish.decode(body, KEY.fingerprint, model=None).outputs)
    assert namespaces == {"a", "b"}


@pytest.mark.parametrize(
    ("method", "path", "known"),
    [
        ("GET", "/export?namespce=a", "only namespace is known"),
        ("DELETE", "?namespace=a&namespce=b", "only namespace is known"),
        ("GET", "?namespace=a", "none is known here"),
        ("POST", "/import?namespace=a", "none is known here"),
    ],
)
def test_an_unknown_query_parameter(
    method: str, path: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused: what was to be about one tenant would be about all of them."""
    answer = ask(method, path, 1000, monkeypatch)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert answer.json()["error"]["message"].endswith(known)


@pytest.mark.parametrize(("method", "path"), [("GET", "/export"), ("DELETE", "")])
def test_a_query_parameter_that_is_there_twice(
    method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused: it would be about one of two tenants."""
    answer = ask(method, f"{path}?namespace=a&namespace=b", 1000, monkeypatch)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "namespace")
    assert error["message"].endswith("more than once")


@pytest.mark.parametrize("namespace", ["nobody", ""])
def test_an_export_of_an_unknown_namespace(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no archive: neither an empty one nor one of all."""
    answer = ask("GET", f"/export?namespace={namespace}", 1000, monkeypatch)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "namespace_not_found")
    assert error["param"] == "namespace"


@pytest.mark.parametrize(
    ("namespace", "status"),
    [("a", 200), ("nobody", 200), ("kept / nowhere else", 200), ("a b", 400), ("a" * 65, 400)],
)
def test_names_that_can_be_forgotten(
    namespace: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that keys may have, and others that are there."""
    answer = ask("DELETE", f"?namespace={namespace}", 1000, monkeypatch, "kept / nowhere else")
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "namespace"


def test_what_was_forgotten_is_not_listed() -> None:
    """Of it, and of a namespace that never was, only the mark for replicas stays."""
    actor, found = database()
    for namespace in ("a", "nobody"):
        asyncio.run(found.flush(namespace))
    assert list(asyncio.run(found.info())["namespaces"]) == ["b"]
    poll = Poll("r", "", {}, idle={"a": 1, "nobody": 1})
    reply = Reply.decode(actor.changes_since(poll.encode(KEY)), KEY)
    assert all(reply.changes[name].is_flushed for name in ("a", "nobody"))


def test_an_export_of_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ask("GET", "/export?namespace=b", 1000, monkeypatch)
    taken = take_record(answer.content)
    assert taken is not None
    assert set(Publish.decode(taken[0], KEY.fingerprint, model=None).outputs) == {"b"}
