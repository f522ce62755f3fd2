"""What a load client makes of answers that are not those of hdserve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from aiohttp import web

from hdserve.bench.openai_client import OpenAIClient
from hdserve.bench.request_record import Outcome, RequestRecord

T = TypeVar("T")

END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def answer(chunks: Sequence[Any]) -> RequestRecord:
    """What a client notes of a server that streams ``chunks``."""
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    body = "".join([*events, "data: [DONE]\n\n"]).encode()
    return asyncio.run(_of_server(200, body, lambda client: client.ask("a", "text")))


async def _of_server(status: int, body: bytes, ask: Callable[[OpenAIClient], Awaitable[T]]) -> T:
    """What ``ask`` gives of a client of a server whose only answer is ``body``."""

    async def answer_always(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="text/plain", charset="utf-8")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer_always)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with OpenAIClient(f"http://{host}:{port}", "chat", {"model": "m"}) as client:
            return await ask(client)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "chunk",
    [
        [1],
        "text",
        {"choices": [None]},
        {"choices": [{"delta": "x"}]},
        {"metrics": "x"},
        {"usage": 3},
    ],
    ids=str,
)
def test_a_chunk_of_another_shape_fails_its_request_alone(chunk: Any) -> None:
    record = answer([chunk, END])
    assert record.outcome is Outcome.FAILED
    assert record.error


def test_what_is_no_text_of_its_encoding_is_shown_all_the_same() -> None:
    """What a path holds, and why one is not read, or a request refused."""
    body = b"a\xff"
    assert asyncio.run(_of_server(200, body, lambda client: client.get_text("/x"))) == "a\ufffd"
    assert asyncio.run(_of_server(500, body, lambda client: client.fault("/x"))) == "500: a\ufffd"
    record = asyncio.run(_of_server(500, body, lambda client: client.ask("a", "text")))
    assert record.error == "500: a\ufffd"


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content", "reasoning")], ids=str)
def test_reasoning_is_text(names: Sequence[str]) -> None:
    """By the name that the server gives it, once."""
    first = {"choices": [{"delta": dict.fromkeys(names, "hm, ")}]}
    record = answer([first, {"choices": [{"delta": {"content": "yes"}}]}, END])
    assert (record.outcome, record.text) == (Outcome.COMPLETED, "hm, yes")
    assert len(record.chunk_times_s) == 2


@pytest.mark.parametrize("content", ["", None])
def test_a_role_is_no_text(content: str | None) -> None:
    """Its chunk says nothing of when the first token came."""
    role = {"choices": [{"delta": {"role": "assistant", "content": content}}]}
    record = answer([role, {"choices": [{"delta": {"content": "yes"}}]}, END])
    assert record.text == "yes"
    assert len(record.chunk_times_s) == 1


async def _ask_of(num_answers: int, last: bytes = b"") -> tuple[list[RequestRecord], int]:
    """What two requests, one after the other, come to where a connection has ``num_answers`` and is
    closed at the next request after ``last``, and how many connections there were."""
    body = f"data: {json.dumps(END)}\n\ndata: [DONE]\n\n".encode()
    answered = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        for _ in range(num_answers):
            await _read_request(reader)
            writer.write(answered)
        await _read_request(reader)
        writer.write(last)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with OpenAIClient(f"http://{host}:{port}", "chat", {"model": "m"}) as client:
            return [await client.ask(name, "text") for name in "ab"], num_connections


async def _read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(length.split(b":")[1]))


def test_a_connection_is_kept_after_an_answer() -> None:
    """Also where its end arrives after what says that it is the end."""
    records, num_connections = asyncio.run(_ask_slow_end())
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 2
    assert [record.is_connection_kept for record in records] == [False, True]
    assert num_connections == 1


async def _ask_slow_end() -> tuple[list[RequestRecord], int]:
    """What two requests come to, one after the other, and how many connections there were."""
    body = f"data: {json.dumps(END)}\n\ndata: [DONE]\n\n".encode()
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        with suppress(asyncio.IncompleteReadError):
            while True:
                await _read_request(reader)
                writer.write(head + b"%x\r\n%s\r\n" % (len(body), body))
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.write(b"0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with OpenAIClient(f"http://{host}:{port}", "chat", {"model": "m"}) as client:
            return [await client.ask(name, "text") for name in "ab"], num_connections


def test_a_kept_connection_that_was_closed_fails_no_request() -> None:
    """It is sent again over another one."""
    records, num_connections = asyncio.run(_ask_of(num_answers=1))
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 2
    assert [record.is_sent_again for record in records] == [False, True]
    assert num_connections == 2


def test_a_server_that_closes_new_connections_fails_requests() -> None:
    """Nothing is sent again: it is not that nobody used them for long."""
    records, num_connections = asyncio.run(_ask_of(num_answers=0))
    assert [record.outcome for record in records] == [Outcome.FAILED] * 2
    assert all("Server disconnected" in record.error for record in records)
    assert num_connections == 2


def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    """Also where it comes over a connection that was kept."""
    records, num_connections = asyncio.run(_ask_of(num_answers=1, last=b"HTTP/1.1 200 OK\r\n\r\n"))
    assert [record.outcome for record in records] == [Outcome.COMPLETED, Outcome.FAILED]
    assert num_connections == 1
