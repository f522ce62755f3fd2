"""What is counted of answers, by a clock of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from deployments.http.keep_alive import COMMENT, PING
from deployments.http.metrics import HttpMetrics, MeasuredRequests
from deployments.metrics.samples import HistogramValue


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("waited_s", [0.0, 7.0])
@pytest.mark.parametrize("sign", [COMMENT, PING])
def test_signs_of_life_are_no_first_byte(
    monkeypatch: pytest.MonkeyPatch, sign: bytes, waited_s: float
) -> None:
    """As nothing of the answer is in them.  What a request waited before counts."""
    clock = Clock()
    monkeypatch.setattr("deployments.http.metrics.time", clock)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body, after_s in ((sign, 15.0), (sign, 15.0), (b"data: {}\n\n", 2.0), (sign, 15.0)):
            clock.now_s += after_s
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def nothing(*_: Any) -> Any:
        return None

    metrics = HttpMetrics()
    state = {"arrived_s": clock.now_s - waited_s} if waited_s else {}
    scope = {"type": "http", "state": state}
    asyncio.run(MeasuredRequests(app, metrics)(scope, nothing, nothing))
    values = {item.name: item.value for item in metrics.samples()}
    sums = [
        value.total if isinstance(value, HistogramValue) else value
        for value in (
            values["hdserve_http_first_byte_seconds"],
            values["hdserve_http_request_seconds"],
        )
    ]
    assert sums == [32.0 + waited_s, 47.0 + waited_s]
