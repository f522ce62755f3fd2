"""The administrator's routes: looking into the databases, and changing them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import Field
from starlette.types import Send

from actors import model_database
from actors.shards import may_be_on_disk_alone
from actors.statistics_database import StatisticsClient
from deployments.generation import ModelInfo
from deployments.http.access import require_admin
from deployments.http.arrival import Arrival
from deployments.http.body_schema import body_schema
from deployments.http.cluster_database import OBJECT, ClusterDatabase, ask_actor
from deployments.http.json_body import read_json
from deployments.http.tracing import trace_error
from deployments.http.unread_limit import as_read
from deployments.openai.body import ClosedBody
from deployments.openai.objects import error_body
from deployments.openai.request_body import parse_body
from deployments.replica.statistics_state import choice_key
from hdserve.access import NAMESPACE, NAMESPACE_RULE
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import (
    HdserveError,
    InvalidRequest,
    ModelNotFound,
    NamespaceNotFound,
)

if TYPE_CHECKING:
    from deployments.gateway import Gateway

_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "The archive or a parameter is wrong"},
    401: {"description": "The API key is missing or wrong"},
    403: {"description": "The key is not that of the administrator"},
    404: {"description": "No such model, database or namespace"},
    503: {"description": "The database, or every replica, does not answer, or it is in use"},
}

_BODY_RESPONSES: dict[int | str, dict[str, Any]] = {
    408: {"description": "The body came too slowly"},
    413: {"description": "The body is too large"},
}
_CHOICE_RESPONSES: dict[int | str, dict[str, Any]] = {
    **_BODY_RESPONSES,
    429: {"description": "A replica still checks another statistics database"},
    504: {"description": "The body took longer than is allowed"},
}

_ARCHIVE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def add_admin_routes(api: FastAPI, gateway: Gateway) -> None:
    """Add ``/v1/speculation/databases``: list, show, flush, export and import model databases, and
    choose statistics databases."""
    router = APIRouter(
        prefix="/v1/speculation/databases",
        dependencies=[Depends(require_admin), Depends(_check_query)],
        responses=_RESPONSES,
    )
    _add_archive_routes(router, gateway)
    _add_statistics_routes(router, gateway)
    _add_database_routes(router, gateway)  # last: any path not taken before is a model's
    api.include_router(router)


def _check_query(request: Request) -> None:
    """Check that the query has only parameters of the route, each once.

    Raises:
        InvalidRequest: a parameter does not belong to the route (ignoring it would widen the
            request) or occurs twice (one of the two would be ignored).
    """
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            told = f"only {', '.join(known)} is known" if known else "none is known here"
            raise InvalidRequest(f"unknown query parameter {name[:100]!r}: {told}", name[:100])
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidRequest(f"the query parameter {name!r} occurs more than once", name)


def _add_database_routes(router: APIRouter, gateway: Gateway) -> None:
    @router.get("")
    async def databases() -> dict[str, Any]:
        """The model databases, and what they hold by namespace; for a model or database that does
        not answer, the error instead."""
        names = [model.name for model in gateway.config.models]
        found = await asyncio.gather(*(_listed(gateway, name) for name in names))
        return {"object": "list", "data": [item for item in found if item]}

    @router.get("/{model:path}")
    async def database(model: str) -> dict[str, Any]:
        """One model's database."""
        return await (await _existing(gateway, model)).info()

    @router.delete("/{model:path}")
    async def flush(model: str, namespace: str | None = None) -> dict[str, Any]:
        """Forget a namespace: in the actor, on its disk and in every replica.  ``num_outputs`` is 0
        if there was none of that name."""
        if not namespace:
            raise InvalidRequest("name the namespace to forget: ?namespace=NAME", "namespace")
        database = await _existing(gateway, model)
        may_be_of_key = NAMESPACE.fullmatch(namespace)
        if not may_be_of_key and namespace not in (await database.info())["namespaces"]:
            raise InvalidRequest(NAMESPACE_RULE, "namespace")
        num_outputs = await database.flush(namespace)
        if not gateway.config.model_database.is_enabled:
            await gateway.forget(model, namespace)  # no actor tells them
        name = gateway.model(model).name
        return {"model": name, "flushed": namespace, "num_outputs": num_outputs}


def _add_archive_routes(router: APIRouter, gateway: Gateway) -> None:
    @router.get(
        "/{model:path}/export",
        response_class=StreamingResponse,
        responses={200: {"content": _ARCHIVE, "description": "An archive"}},
    )
    async def export(
        model: str, request: Request, namespace: str | None = None
    ) -> StreamingResponse:
        """The whole database, or a namespace, as an archive of ``hdserve database``."""
        database = await _existing(gateway, model)
        namespaces = list((await database.info())["namespaces"])
        if namespace is not None:
            if namespace not in namespaces:
                raise NamespaceNotFound(f"there is no namespace {namespace[:100]!r}", "namespace")
            namespaces = [namespace]
        records = database.export(namespaces)

        def note_error(error: Exception) -> None:
            unexpected = HTTPStatus.INTERNAL_SERVER_ERROR
            status = error.status if isinstance(error, HdserveError) else unexpected
            gateway.http_metrics.stream_failed(request.scope["route"].path, status)
            trace_error(request, error)

        found = _beginning_with(await anext(records), records, note_error)
        return _Archive(found, media_type="application/octet-stream")

    @router.post(
        "/{model:path}/import",
        responses=_BODY_RESPONSES,
        openapi_extra={"requestBody": {"required": True, "content": _ARCHIVE}},
    )
    async def import_(model: str, request: Request) -> dict[str, int]:
        """Add what an archive holds and the database lacks; calibration only if there is none."""
        database = await _existing(gateway, model)
        return {"num_new_outputs": await database.import_(request.stream())}


def _add_statistics_routes(router: APIRouter, gateway: Gateway) -> None:
    @router.get("/{model:path}/statistics")
    async def statistics(model: str) -> dict[str, Any]:
        """The statistics database that each replica drafts from."""
        replicas = [state._asdict() for state in await gateway.statistics(model)]
        return {"model": gateway.model(model).name, "replicas": replicas}

    @router.post(
        "/{model:path}/statistics",
        responses=_CHOICE_RESPONSES,
        openapi_extra=body_schema(StatisticsBody),
    )
    async def choose_statistics(model: str, request: Request) -> dict[str, str]:
        """Make all replicas draft from the database in a directory below ``statistics_root``."""
        body = parse_body(
            StatisticsBody,
            await Arrival(gateway, request).deadline.wait(read_json(request, gateway.off_loop)),
        )
        await gateway.check_statistics(model, body.directory)
        config = gateway.model(model)
        info = await gateway.infos.ask(config)
        key = choice_key(config, info.tokenizer_fingerprint)
        client = StatisticsClient(gateway.config.model_database.resources)
        choosing = gateway.off_loop.waiting(client.choose, key, body.directory)
        await ask_actor(choosing, who="the statistics actor")
        return {"model": config.name, "directory": body.directory}


class StatisticsBody(ClosedBody):
    """Which statistics database to draft from: a directory below ``statistics_root``."""

    directory: str = Field(min_length=1, max_length=1000)


class _Archive(StreamingResponse):
    """Records, without their end where next to nothing is read for long: the connection is closed
    then."""

    async def stream_response(self, send: Send) -> None:
        """Send the records."""
        with suppress(TimeoutError):
            await super().stream_response(as_read(send))


async def _beginning_with(
    first: bytes, rest: AsyncGenerator[bytes], note_error: Callable[[Exception], None]
) -> AsyncIterator[bytes]:
    """Yield what was awaited first, so that an error before it has its own status, and the rest.

    Args:
        note_error: is told of an error behind it.
    """
    async with aclosing(rest):
        yield first
        try:
            async for record in rest:
                yield record
        except Exception as error:
            note_error(error)
            raise


async def _open(gateway: Gateway, info: ModelInfo) -> ClusterDatabase | None:
    """Return the database of a model, if it has one.

    Raises:
        DatabaseGone: the cluster does not say which actors it has.
    """
    key = DatabaseKey(info.name, info.tokenizer_fingerprint)
    config = gateway.config.model_database
    off_loop = gateway.off_loop
    found = await ask_actor(off_loop.waiting(model_database.get_all, key, config.num_shards))
    if not found and not may_be_on_disk_alone(config):
        return None
    former = await ask_actor(off_loop.waiting(model_database.get_former, key, config.num_shards))
    return ClusterDatabase(key, config, found, former, off_loop)


async def _existing(gateway: Gateway, model: str) -> ClusterDatabase:
    """Return the database of a model; a replica is only started if nothing else tells which
    database it is, and models have one.

    Raises:
        ModelNotFound: there is no such model, or it has no model database.
        EngineStopped: a replica that exists, or was started, has not answered.
    """
    config = gateway.model(model)
    info = await gateway.infos.now(config)
    database = None if info is None else await _open(gateway, info)
    if database is None and config.may_sleep and gateway.config.model_database.is_enabled:
        database = await _open(gateway, await gateway.infos.ask(config))
    if database is None:
        raise ModelNotFound(f"{model[:100]!r} has no model database", "model")
    return database


async def _listed(gateway: Gateway, model: str) -> dict[str, Any] | None:
    """Return the list entry of a model, if it has a database: one that does not answer does not
    affect the others, and one without a replica stays without."""
    try:
        found = await _open(gateway, await gateway.infos.without_waking(gateway.model(model)))
        return await found.info() if found else None
    except HdserveError as error:
        return {"id": model, "object": OBJECT, **error_body(error)}
