"""What the gateway does with replicas that fail, against deployments that run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio
from grpc.aio import AioRpcError, Metadata
from ray import serve

from deployments.deadline import Deadline
from deployments.gateway import _RETRY_PAUSES_S, Gateway
from deployments.generation import (
    HEARTBEAT,
    Delta,
    GenerationRequest,
    ModelInfo,
    Records,
    Summary,
)
from deployments.model_servers import translated
from deployments.parsers.tool_parser import ToolParser
from deployments.parsers.tool_parsers import HermesToolParser, MistralToolParser
from deployments.replica.heartbeat import AnswersCalls
from deployments.replica.model_server import MAX_LEAVING_S
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig
from hdserve.core import DraftCounts
from hdserve.errors import BodyTooLarge, EngineGone, EngineStopped, GrammarsOverloaded, Overloaded

CONFIG = ServeConfig(models=(ModelConfig(name="m", model="m", aliases=("alias",)),))
DELTA = Delta(0, 0, "text", (1,), (0,), None, "stop")
SUMMARY = Summary(1, 1, DraftCounts(), "replica")


class Failing:
    """Raises ``error`` for the first ``num_failures`` requests, after ``num_deltas`` deltas."""

    def __init__(self, error: Exception, num_failures: int, num_deltas: int) -> None:
        self._error = error
        self._num_failures = num_failures
        self._num_deltas = num_deltas
        self._num_requests = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        self._num_requests += 1
        if self._num_requests > self._num_failures:
            yield (DELTA, SUMMARY)
            return
        for _ in range(self._num_deltas):
            yield (DELTA,)
        raise self._error


def generate(*arguments: Any) -> list[Records]:
    application = serve.deployment(Failing).bind(*arguments)
    handle: Any = serve.run(application, name="failing", _local_testing_mode=True)
    gateway = Gateway(CONFIG, {"m": handle})

    async def records() -> list[Records]:
        return [item async for item in gateway.generate("m", GenerationRequest("id"), Deadline())]

    return asyncio.run(records())


class Beating:
    """Shows that it is there, and refuses the first request after that."""

    def __init__(self) -> None:
        self._num_requests = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        assert request.heartbeat_s is not None
        assert 2 * request.heartbeat_s < CONFIG.gateway.max_replica_silence_s
        self._num_requests += 1
        yield HEARTBEAT
        if self._num_requests == 1:
            raise Overloaded
        yield (DELTA,)
        yield HEARTBEAT
        yield (SUMMARY,)


class Silent:
    """Says nothing any more after ``num_deltas`` deltas."""

    def __init__(self, num_deltas: int) -> None:
        self._num_deltas = num_deltas

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        for _ in range(self._num_deltas):
            yield (DELTA,)
        await asyncio.sleep(3600)


class Shrinking(AnswersCalls):
    """Describes replicas of which each has less room than the one before."""

    def __init__(self) -> None:
        self._max_model_len = 4096

    async def describe(self) -> ModelInfo:
        self._max_model_len //= 2
        room = self._max_model_len
        return ModelInfo("m", room, "float32", "cpu", False, False, 1, 1, 1, 0, 0, 0, (), "f")

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        yield (DELTA,)
        yield (SUMMARY,)


def test_heartbeats_are_no_part_of_an_answer() -> None:
    """Nobody sees them, and a request of which nothing else has come is still tried again."""
    application = serve.deployment(Beating).bind()
    handle: Any = serve.run(application, name="beating", _local_testing_mode=True)
    gateway = Gateway(CONFIG, {"m": handle})

    async def records() -> list[Records]:
        return [item async for item in gateway.generate("m", GenerationRequest("id"), Deadline())]

    assert asyncio.run(records()) == [(DELTA,), (SUMMARY,)]


@pytest.mark.parametrize("num_deltas", [0, 1])
def test_a_silent_replica_is_not_waited_for(num_deltas: int) -> None:
    """The client is told, and the counter, once; what it got before it keeps."""
    application = serve.deployment(Silent).bind(num_deltas)
    handle: Any = serve.run(application, name="silent", _local_testing_mode=True)
    limits = GatewayConfig(max_replica_silence_s=1)
    gateway = Gateway(ServeConfig(models=CONFIG.models, gateway=limits), {"m": handle})

    found: list[Records] = []

    async def read() -> None:
        async for item in gateway.generate("m", GenerationRequest("id"), Deadline()):
            found.append(item)

    with pytest.raises(EngineStopped, match=r"1 s \(gateway.max_replica_silence_s\)"):
        asyncio.run(read())
    assert found == [(DELTA,)] * num_deltas
    counts = {sample.name: sample.value for sample in gateway.http_metrics.samples()}
    assert counts["hdserve_replica_silences"] == 1
    assert counts["hdserve_request_timeouts"] == 0


@pytest.mark.parametrize(
    ("replica", "num_timeouts"),
    [
        (serve.deployment(Failing).bind(EngineGone("gone"), 0, 0), 0),
        (serve.deployment(Silent).bind(1), 1),
    ],
)
def test_an_answer_that_was_given_in_full_is_no_timeout(replica: Any, num_timeouts: int) -> None:
    """Though its reader comes back for more after its time."""
    handle: Any = serve.run(replica, name="timed", _local_testing_mode=True)
    gateway = Gateway(CONFIG, {"m": handle})

    async def read() -> None:
        found = gateway.generate("m", GenerationRequest("id"), Deadline(0.5))
        assert await anext(found)
        await asyncio.sleep(0.6)
        await found.aclose()

    asyncio.run(read())
    counts = {sample.name: sample.value for sample in gateway.http_metrics.samples()}
    assert counts["hdserve_request_timeouts"] == num_timeouts


def test_the_list_of_models_knows_what_a_replica_said_last() -> None:
    """Also when it said so to another who asked."""
    application = serve.deployment(Shrinking).bind()
    handle: Any = serve.run(application, name="shrinking", _local_testing_mode=True)
    gateway = Gateway(CONFIG, {"m": handle})

    async def lengths() -> list[int]:
        infos, models = gateway.infos, gateway.config.models
        found = [(await infos.context_lengths(models))["m"] for _ in range(2)]
        await infos.ask(gateway.model("alias"))
        return [*found, (await infos.context_lengths(models))["m"]]

    assert asyncio.run(lengths()) == [2048, 2048, 1024]


def test_a_replica_that_answers_is_asked_what_it_is() -> None:
    """If its model was described before: that replica may have been another one."""
    application = serve.deployment(Shrinking).bind()
    handle: Any = serve.run(application, name="renewed", _local_testing_mode=True)
    gateway = Gateway(CONFIG, {"m": handle})
    model = gateway.model("m")

    async def answer() -> None:
        generated = gateway.generate("m", GenerationRequest("id"), Deadline())
        assert [item async for item in generated] == [(DELTA,), (SUMMARY,)]

    async def run() -> None:
        await answer()
        assert (await gateway.infos.within(model, Deadline())).max_model_len == 2048
        await answer()
        while (await gateway.infos.within(model, Deadline())).max_model_len == 2048:
            await asyncio.sleep(0.01)
        assert (await gateway.infos.within(model, Deadline())).max_model_len == 1024

    asyncio.run(asyncio.wait_for(run(), 60))


class Describing(AnswersCalls):
    """Says which parser reads its calls, once."""

    def __init__(self) -> None:
        self._is_asked = False

    async def describe(self) -> ModelInfo:
        assert not self._is_asked
        self._is_asked = True
        known = ("m", 1, "float32", "cpu", False, False, 1, 1, 1, 0, 0, 0, (), "f")
        return ModelInfo(*known, tool_parser="mistral")


@pytest.mark.parametrize(
    ("name", "has_tools", "parser"),
    [
        ("auto", True, MistralToolParser),
        ("auto", False, None),
        ("hermes", True, HermesToolParser),
        (None, True, None),
    ],
)
def test_a_replica_is_asked_once_what_reads_its_calls(
    name: Any, has_tools: bool, parser: type[ToolParser] | None
) -> None:
    """Where the configuration does not say it, and there are tools."""
    application = serve.deployment(Describing).bind()
    handle: Any = serve.run(application, name="describing", _local_testing_mode=True)
    config = ServeConfig(models=(ModelConfig(name="m", model="m", tool_parser=name),))
    gateway = Gateway(config, {"m": handle})

    async def parsers() -> list[type[ToolParser] | None]:
        return [await gateway.tool_parser("m", Deadline(), has_tools=has_tools) for _ in range(2)]

    assert asyncio.run(parsers()) == [parser, parser]


def test_a_replica_whose_engine_is_gone_costs_no_request() -> None:
    """It had begun with nothing, so another try is harmless."""
    assert generate(EngineGone("gone"), 2, 0) == [(DELTA, SUMMARY)]


def test_what_a_full_replica_refuses_is_tried_once_more() -> None:
    """Another may have room; if not, the client hears of it at once."""
    assert generate(Overloaded("full"), 1, 0) == [(DELTA, SUMMARY)]
    with pytest.raises(Overloaded, match="full"):
        generate(Overloaded("full"), 2, 0)


def test_nobody_is_refused_for_the_grammars_of_others() -> None:
    """A request whose own has to wait is tried once more; the next one is asked for at once."""
    application = serve.deployment(Failing).bind(GrammarsOverloaded("many"), 2, 0)
    handle: Any = serve.run(application, name="failing", _local_testing_mode=True)
    gateway = Gateway(CONFIG, {"m": handle})

    async def ask() -> list[Records]:
        return [item async for item in gateway.generate("m", GenerationRequest("id"), Deadline())]

    async def ask_twice() -> list[Records]:
        with pytest.raises(GrammarsOverloaded, match="many"):
            await ask()
        return await ask()

    assert asyncio.run(ask_twice()) == [(DELTA, SUMMARY)]


def test_a_request_that_an_engine_failed_with_is_not_tried_again() -> None:
    """It may be why."""
    with pytest.raises(EngineStopped, match="broken") as raised:
        generate(EngineStopped("broken"), 1, 0)
    assert not isinstance(raised.value, EngineGone)
    with pytest.raises(EngineStopped, match="broken"):
        generate(EngineStopped("broken"), 1, 1)


@pytest.mark.parametrize("error", [EngineGone("gone"), Overloaded("full")])
def test_nothing_of_an_answer_comes_twice(error: Exception) -> None:
    """Once some of it is on its way, the request is not tried again, whatever the replica says."""
    with pytest.raises(type(error)):
        generate(error, 1, 1)


@pytest.mark.parametrize(
    ("code", "details", "status"),
    [
        (StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 8)", 413),
        (StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 8)", 413),
        (StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", 429),
        (StatusCode.RESOURCE_EXHAUSTED, None, 429),
        (StatusCode.UNAVAILABLE, None, 503),
    ],
)
def test_a_message_that_is_too_large_is_the_clients_error(
    code: StatusCode, details: str | None, status: int
) -> None:
    """Another replica could not take it either; of anything else clients are told to try again."""
    error = AioRpcError(code, Metadata(), Metadata(), details)
    assert translated(error).status == status


class Echo(grpc.GenericRpcHandler):
    """Answers with what it is sent."""

    def service(self, _call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def echo(request: bytes, _context: Any) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


@pytest.mark.parametrize("is_large_for", ["the server", "the client"])
def test_what_grpc_says_of_a_large_message(is_large_for: str) -> None:
    """By its words it is known."""
    limit = [("grpc.max_receive_message_length", 100)]

    async def ask() -> Exception:
        server = aio.server(options=limit if is_large_for == "the server" else ())
        server.add_generic_rpc_handlers((Echo(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        options = limit if is_large_for == "the client" else ()
        try:
            async with aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                with pytest.raises(AioRpcError) as raised:
                    await channel.unary_unary("/a/b")(bytes(200))
        finally:
            await server.stop(None)
        return raised.value

    assert isinstance(translated(asyncio.run(ask())), BodyTooLarge)


def test_a_request_is_tried_for_longer_than_a_failed_replica_stays() -> None:
    """So that none fails while there is another replica, or a new one is on its way."""
    assert sum(_RETRY_PAUSES_S) > MAX_LEAVING_S


def test_a_model_without_a_working_replica_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all tries, the pauses between which are shorter here."""
    monkeypatch.setattr("deployments.gateway._RETRY_PAUSES_S", (0.01, 0.02))
    with pytest.raises(EngineGone, match="gone"):
        generate(EngineGone("gone"), 1000, 0)
