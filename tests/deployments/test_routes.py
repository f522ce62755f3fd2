"""Bodies of requests become data or errors, and what a client chose is safe to send back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from deployments.routes import _header_value, _json
from hdserve.errors import InvalidRequest


def read(body: bytes) -> Any:
    """What a request with this body is read as."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    return asyncio.run(_json(Request(scope, receive)))


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ('{"a": "é🙂"}'.encode(), {"a": "é🙂"}),
        (rb'{"a": "\ud83d\ude42"}', {"a": "🙂"}),
        (rb'{"a": "\\udead"}', {"a": r"\udead"}),
    ],
)
def test_json_is_read(body: bytes, data: Any) -> None:
    """Text in UTF-8, and in escapes that make pairs, is text."""
    assert read(body) == data


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": }',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"seed": ' + b"1" * 5000 + b"}",
        rb'{"a": "\ud83d"}',
        rb'{"\uDE42": 1}',
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    """Broken, too deep, with endless numbers or with half characters: one error, status 400."""
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        read(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a\\"[": ', b"}")])
def test_deep_bodies_are_refused(opening: bytes, closing: bytes) -> None:
    """Nesting that would break what reads a request later on is refused; brackets in texts and
    many of them side by side are no nesting."""
    assert read(opening * 100 + b"1" + closing * 100) is not None
    assert len(read(b"[" + b"[[]]," * 5000 + b'"' + b"[" * 500 + b'"]')) == 5001
    with pytest.raises(InvalidRequest, match="100 deep"):
        read(opening * 101 + b"1" + closing * 101)


def test_header_values_are_harmless() -> None:
    """Names a client made up cannot break or forge a header."""
    found = _header_value(["ok", "a\r\nset-cookie: x", "é🙂", "\x7f\x00", "\ud800", "x" * 5000])
    assert found.startswith("ok, a\\r\\nset-cookie: x, ")
    assert found.isascii()
    assert found.isprintable()
    assert len(found) == 1000
