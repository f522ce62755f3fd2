"""What the administrator's routes do with actors that are gone and names that are wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from pydantic import SecretStr
from ray.exceptions import RaySystemError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.testclient import TestClient

from actors import model_database
from actors.model_database_actor import ModelDatabaseActor
from actors.shards import WHOLE
from actors.statistics_database import StatisticsClient
from deployments.gateway import Gateway
from deployments.generation import ModelInfo
from deployments.http import admin
from deployments.http.cluster_database import ClusterDatabase, ask_actor
from deployments.http.routes import build_api
from deployments.tracing import Tracing
from hdserve.access import read_access
from hdserve.config import (
    AccessConfig,
    AutoscalingConfig,
    ModelConfig,
    ModelDatabaseConfig,
    ServeConfig,
    TelemetryConfig,
    default_config,
)
from hdserve.databases.append_log import take_record
from hdserve.databases.messages import Publish
from hdserve.errors import DatabaseGone
from tests.collector import collector
from tests.deployments.http.cluster_databases import KEY, Handle, archive_of, database
from tests.waiting import WAIT_S

EXPORT = "/v1/speculation/databases/{model:path}/export"
REQUESTS = "hdserve_http_requests"
STREAM_ERRORS = "hdserve_stream_errors"
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


DATABASE = "/v1/speculation/databases/hdserve-tiny"


def ask(
    method: str, path: str, num_records: int, monkeypatch: pytest.MonkeyPatch, *more: str
) -> httpx.Response:
    """The answer of a route about :func:`database`, with more namespaces."""
    api = build_api(gateway_of(num_records, monkeypatch, *more))
    with TestClient(api, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        return client.request(method, f"{DATABASE}{path}")


def gateway_of(num_records: int, monkeypatch: pytest.MonkeyPatch, *more: str) -> Gateway:
    actor, found = database(num_records)
    for namespace in more:
        actor.publish(archive_of(namespace).encode(KEY))

    async def opened(*_: Any) -> ClusterDatabase:
        return found

    async def described(_: ModelConfig) -> ModelInfo:
        return INFO

    access = read_access(AccessConfig(admin_key=SecretStr(ADMIN_KEY)))
    gateway = Gateway(default_config(), {}, access)
    monkeypatch.setattr(admin, "_open", opened)
    monkeypatch.setattr(gateway.infos, "now", described)
    return gateway


class Sleeping:
    """Handles of a model that has no replica, and gets none.

    Args:
        error: what asking all its replicas leads to.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error or DeploymentUnavailableError(DeploymentID("m"))

    def options(self, **_: Any) -> Sleeping:
        return self

    def broadcast(self, *_: Any) -> Sleeping:
        return self

    async def results_async(self, *, timeout_s: float) -> list[ModelInfo]:
        raise self._error


class Awake(Sleeping):
    """Handles of a model that has a replica.

    Attributes:
        told: what all of its replicas were asked to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, ...]] = []

    def broadcast(self, *call: Any) -> Sleeping:
        self.told.append(call)
        return self

    async def results_async(self, *, timeout_s: float) -> list[ModelInfo]:
        return [INFO]


def sleeping_client(
    *,
    has_databases: bool = True,
    error: Exception | None = None,
    handles: Sleeping | None = None,
    **options: Any,
) -> TestClient:
    """The administrator of a gateway with a model that has been described, and has no replica,
    unless it has other handles."""
    model = ModelConfig(name="m", model="m", autoscaling=AutoscalingConfig(min_replicas=0))
    access = read_access(AccessConfig(admin_key=SecretStr(ADMIN_KEY)))
    databases = ModelDatabaseConfig(is_enabled=has_databases)
    config = ServeConfig(models=(model,), model_database=databases)
    gateway = Gateway(config, {"m": cast(Any, handles or Sleeping(error))}, access)
    gateway.infos.learn(INFO)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    return TestClient(build_api(gateway), headers=headers, **options)


def test_a_sleeping_model_is_left_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor has all that the routes need: no replica, of which there is none, is asked."""
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    actor.import_(archive_of("a").encode(KEY))
    found = {KEY: {WHOLE: Handle(actor)}}
    monkeypatch.setattr(model_database, "get_all", lambda key, _: found[key])
    monkeypatch.setattr(model_database, "get_former", lambda *_: [])
    path = "/v1/speculation/databases/m"
    with sleeping_client() as client:
        assert client.get(path).json()["namespaces"]["a"]["num_outputs"] == 1
        archive = client.get(f"{path}/export").content
        flushed = client.delete(path, params={"namespace": "a"}).json()
        assert flushed == {"model": "m", "flushed": "a", "num_outputs": 1}
        assert client.post(f"{path}/import", content=archive).status_code == 200
    assert "a" in actor.info()["namespaces"]


def test_a_sleeping_model_is_left_asleep_without_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that an earlier configuration has left running is shown."""
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    found = dict[Any, Any]()
    monkeypatch.setattr(model_database, "get_all", lambda *_: found)
    monkeypatch.setattr(model_database, "get_former", lambda *_: [])
    path = "/v1/speculation/databases/m"
    with sleeping_client(has_databases=False) as client:
        answer = client.get(path)
        assert answer.status_code == 404
        assert "no model database" in answer.json()["error"]["message"]
        found[WHOLE] = Handle(actor)
        assert client.get(path).json()["namespaces"] == {}


@pytest.mark.parametrize("has_databases", [True, False])
def test_replicas_that_share_nothing_are_told_what_to_forget(
    monkeypatch: pytest.MonkeyPatch, has_databases: bool
) -> None:
    """They hear of nothing from an actor that an earlier configuration has left running.  Others
    hear it from there, at their next poll."""
    actor, handles = ModelDatabaseActor(KEY, ModelDatabaseConfig()), Awake()
    monkeypatch.setattr(model_database, "get_all", lambda *_: {WHOLE: Handle(actor)})
    monkeypatch.setattr(model_database, "get_former", lambda *_: [])
    path, query = "/v1/speculation/databases/m", {"namespace": "a"}
    for awake in (handles, None):
        actor.import_(archive_of("a").encode(KEY))
        with sleeping_client(has_databases=has_databases, handles=awake) as client:
            flushed = client.delete(path, params=query).json()
        assert flushed == {"model": "m", "flushed": "a", "num_outputs": 1}
    assert (("forget", "a") in handles.told) is not has_databases


@pytest.mark.parametrize("has_databases", [True, False])
def test_a_replica_that_does_not_answer_starts_no_other(has_databases: bool) -> None:
    """It may answer the next time, and tell then which database it has."""
    client = sleeping_client(has_databases=has_databases, error=TimeoutError("still busy"))
    with client:
        answer = client.get("/v1/speculation/databases/m")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_stopped"


@pytest.mark.parametrize("lookup", ["get_all", "get_former"])
def test_a_cluster_that_does_not_say_which_actors_it_has(
    monkeypatch: pytest.MonkeyPatch, lookup: str
) -> None:
    """As while its head restarts: the client is told to try again, in a list for each model."""

    def fail(*_: Any) -> Any:
        raise RaySystemError("the head restarts")

    found = {WHOLE: Handle(ModelDatabaseActor(KEY, ModelDatabaseConfig()))}
    monkeypatch.setattr(model_database, "get_all", lambda *_: found)
    monkeypatch.setattr(model_database, lookup, fail)
    path = "/v1/speculation/databases"
    with sleeping_client(raise_server_exceptions=False) as client:
        answer, listed = client.get(f"{path}/m"), client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_gone")
    assert listed.status_code == 200
    assert [item["error"]["code"] for item in listed.json()["data"]] == ["database_gone"]


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


def test_answers_are_counted_by_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those given before a route is found; what a route declares begins at 0."""
    gateway = gateway_of(1000, monkeypatch)
    api = build_api(gateway)

    def counts() -> dict[str, Any]:
        samples = [each for each in gateway.http_metrics.samples() if each.name == REQUESTS]
        return {each.labels[1]: each.value for each in samples if each.labels[0] == EXPORT}

    assert counts() == dict.fromkeys(("200", "400", "401", "403", "404", "500", "503"), 0)
    assert TestClient(api).get(f"{DATABASE}/export").status_code == 403
    assert {status: count for status, count in counts().items() if count} == {"403": 1}


@pytest.mark.parametrize(
    ("error", "num_failures"),
    [
        (None, 0),
        (DatabaseGone("it was restarted"), 1),
        (RuntimeError("a mistake"), 1),
        (asyncio.CancelledError(), 0),
    ],
    ids=["whole", "gone", "unexpected", "hung up"],
)
def test_an_export_that_breaks_off_is_counted(
    error: BaseException | None, num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status says nothing of it."""

    async def export(*_: Any) -> AsyncGenerator[bytes]:
        yield b"a record"
        if error is not None:
            raise error

    def failures() -> list[Any]:
        samples = [each for each in gateway.http_metrics.samples() if each.name == STREAM_ERRORS]
        return [each.value for each in samples if each.labels == (EXPORT,)]

    monkeypatch.setattr(ClusterDatabase, "export", export)
    gateway, trace_id = gateway_of(1000, monkeypatch), "a" * 32
    headers = {
        "authorization": f"Bearer {ADMIN_KEY}",
        "traceparent": f"00-{trace_id}-{'b' * 16}-01",
    }
    with collector() as sink:
        gateway.tracing = Tracing(TelemetryConfig(endpoint=sink.endpoint), "tested")
        api = build_api(gateway)
        with TestClient(api, headers=headers, raise_server_exceptions=False) as client:
            assert failures() == [0]
            answer = client.get(f"{DATABASE}/export")
        gateway.tracing.close()
        (span,) = sink.wait(1, trace_id)
    assert (answer.status_code, answer.content) == (200, b"a record")
    assert failures() == [num_failures]
    assert span.attributes.get("error.type") == (type(error).__name__ if num_failures else None)


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


def test_an_export_of_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ask("GET", "/export?namespace=b", 1000, monkeypatch)
    taken = take_record(answer.content)
    assert taken is not None
    assert set(Publish.decode(taken[0], KEY.fingerprint, model=None).outputs) == {"b"}


@pytest.mark.parametrize(
    ("home", "waits", "method", "path"),
    [
        (model_database, "get_all", "GET", ""),
        (model_database, "get_former", "GET", ""),
        (model_database, "get_or_create", "GET", ""),
        (StatisticsClient, "choose", "POST", "/statistics"),
    ],
)
def test_requests_do_not_wait_for_what_the_administrator_waits_for(
    home: Any, waits: str, method: str, path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the cluster does not answer: what is done in threads for long bodies is done."""
    is_waiting, has_ended = threading.Event(), threading.Event()

    def wait(*_: Any) -> Any:
        is_waiting.set()
        has_ended.wait()
        raise RaySystemError("the head is gone")

    async def described(*_: Any) -> ModelInfo:
        return INFO

    for name in ("get_all", "get_former"):
        monkeypatch.setattr(model_database, name, lambda *_: {})
    monkeypatch.setattr(home, waits, wait)
    databases = ModelDatabaseConfig(num_shards=2, snapshot_dir=tmp_path)
    config = ServeConfig(models=(ModelConfig(name="m", model="m"),), model_database=databases)
    gateway = Gateway(config, {}, read_access(AccessConfig(admin_key=SecretStr(ADMIN_KEY))))
    for name in ("ask", "now"):
        monkeypatch.setattr(gateway.infos, name, described)
    monkeypatch.setattr(gateway, "check_statistics", described)
    api = build_api(gateway)

    async def asked() -> int:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://hdserve", headers=headers
        ) as client:
            url, body = f"/v1/speculation/databases/m{path}", {"directory": "anywhere"}
            asking = [asyncio.create_task(client.request(method, url, json=body)) for _ in range(8)]
            try:
                while not is_waiting.is_set():
                    await asyncio.sleep(0.01)
                request = {"model": "other", "prompt": "a" * 2**17}
                async with asyncio.timeout(WAIT_S):
                    return (await client.post("/v1/completions", json=request)).status_code
            finally:
                has_ended.set()
                await asyncio.gather(*asking)

    assert asyncio.run(asked()) == 404


def test_a_choice_that_the_cluster_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended = threading.Event()

    async def described(*_: Any) -> ModelInfo:
        return INFO

    gateway = gateway_of(0, monkeypatch)
    monkeypatch.setattr(admin, "ask_actor", partial(ask_actor, timeout_s=0.1))
    monkeypatch.setattr(StatisticsClient, "choose", lambda *_: has_ended.wait(WAIT_S))
    monkeypatch.setattr(gateway.infos, "ask", described)
    monkeypatch.setattr(gateway, "check_statistics", described)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with TestClient(build_api(gateway), headers=headers) as client:
        answer = client.post(f"{DATABASE}/statistics", json={"directory": "anywhere"})
    has_ended.set()
    assert answer.status_code == 503
    assert "the statistics actor has not answered" in answer.json()["error"]["message"]
