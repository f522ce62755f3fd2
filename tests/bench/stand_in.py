"""A server of the OpenAI API that answers as it is told."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from deployments.metrics.samples import Report, Sample
from deployments.metrics.text import render

MODEL = "model-a"
ALIAS = "assistant"
USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 6}, "choices": []}
DRAFTS = {
    "vllm:spec_decode_num_drafts": 4,
    "vllm:spec_decode_num_draft_tokens": 20,
    "vllm:spec_decode_num_accepted_tokens": 6,
}


def chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}


class StandIn:
    """Answers a prompt by its first word; counts what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_open = self.max_num_open = 0
        self.num_answered_to_end: int | None = None
        self.num_metrics_answered = sys.maxsize
        self.num_metrics_asked = 0
        self.unreadable_metrics: set[int] = set()
        self.is_listing_endless = False
        self.fewest_tokens, self.refusing_status = 0, 400
        self.num_listings_begun = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.base_url = f"http://127.0.0.1:{self.port}"

    async def _start(self) -> int:
        api = web.Application()
        api.add_routes(
            [
                web.post("/v1/chat/completions", self._answer),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(api, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _models(self, _: web.Request) -> web.Response:
        if self.is_listing_endless:
            self.num_listings_begun += 1
            await asyncio.Event().wait()
        return web.json_response(
            {"data": [{"id": MODEL, "root": MODEL}, {"id": ALIAS, "root": MODEL}]}
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        number = self.num_metrics_asked
        self.num_metrics_asked += 1
        if number in self.unreadable_metrics:
            return web.Response(status=503)
        if self.num_metrics_asked > self.num_metrics_answered:
            await asyncio.sleep(60)
        num_answers = len(self.bodies)
        samples = [Sample(name, value * num_answers) for name, value in DRAFTS.items()]
        by_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
        for position, count in enumerate((4, 2)):
            samples.append(Sample(by_position, count * num_answers, (str(position),)))
        return web.Response(body=render({MODEL: [Report("r", tuple(samples))]}))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        kind = body["messages"][0]["content"].split()[0]
        if self.num_answered_to_end is not None and len(self.bodies) > self.num_answered_to_end:
            kind = "endless"
        most_tokens = body.get("max_completion_tokens", self.fewest_tokens)
        if most_tokens < self.fewest_tokens:
            told = {"error": {"message": f"{most_tokens} tokens are too few"}}
            return web.json_response(told, status=self.refusing_status)
        if kind == "full":
            headers = {"retry-after": "3"}
            return web.json_response({"error": {"message": "full"}}, status=429, headers=headers)
        if kind == "broken":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.num_open += 1
        self.max_num_open = max(self.max_num_open, self.num_open)
        try:
            for event in self._events(kind):
                await asyncio.sleep(0.005)
                await response.write(event)
            if kind == "endless":
                await asyncio.sleep(60)
        finally:
            self.num_open -= 1
        return response

    def _events(self, kind: str) -> Iterator[bytes]:
        first = b"data: " + json.dumps(chunk("")).encode() + b"\r\n\r\n"
        second = b"data: " + json.dumps(chunk("caf\u00e9 ")).encode() + b"\n\n"
        yield first + second[:20]
        yield second[20:]
        if kind in {"cut", "endless"}:
            return
        if kind == "failing":
            yield b'data: {"error": {"message": "the engine stopped"}}\n\n'
        else:
            yield b"data: " + json.dumps(chunk("bar", "stop")).encode() + b"\n\n"
            if kind != "uncounted":
                yield b"data: " + json.dumps(USAGE).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
