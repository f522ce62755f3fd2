"""What a load client makes of answers that are not those of hdserve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from hdserve.bench.openai_client import OpenAIClient
from hdserve.bench.request_record import Outcome, RequestRecord

END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def answer(chunks: Sequence[Any]) -> RequestRecord:
    """What a client notes of a server that streams ``chunks``."""
    return asyncio.run(_answer(chunks))


async def _answer(chunks: Sequence[Any]) -> RequestRecord:
    async def stream(_: web.Request) -> web.Response:
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return web.Response(text="".join([*events, "data: [DONE]\n\n"]))

    application = web.Application()
    application.router.add_post("/v1/chat/completions", stream)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with OpenAIClient(f"http://{host}:{port}", "chat", {"model": "m"}) as client:
            return await client.ask("a", "text")
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


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content", "reasoning")], ids=str)
def test_reasoning_is_text(names: Sequence[str]) -> None:
    """By the name that the server gives it, once."""
    first = {"choices": [{"delta": dict.fromkeys(names, "hm, ")}]}
    record = answer([first, {"choices": [{"delta": {"content": "yes"}}]}, END])
    assert (record.outcome, record.text) == (Outcome.COMPLETED, "hm, yes")
    assert len(record.chunk_times_s) == 2
