"""Reading the JSON body of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from deployments.off_loop import OffLoop
from deployments.openai.json_text import parse_json
from hdserve.errors import InvalidRequest, Unsupported

_MAX_INLINE_BYTES = 2**16
"""Longer bodies are read in a thread, so that other answers continue: 64 KiB take 20 ms."""

T = TypeVar("T")

_ENCODING_HEADER = "content-encoding"
_UPGRADE_HEADER = "upgrade"


async def read_json(
    request: Request, off_loop: OffLoop, make: Callable[[Any], T] = lambda value: value
) -> T:
    """Return what ``make`` makes of the value of a request's JSON body.

    Args:
        off_loop: parses long bodies and makes something of them, in one go: of the longest bodies,
            one value at a time is in memory.

    Raises:
        Unsupported: it is compressed.
        InvalidRequest: it is lost, or is not JSON that :func:`parse_json` accepts.
    """
    encoding = request.headers.get(_ENCODING_HEADER, "")
    if encoding.strip().lower() not in ("", "identity"):
        reason = f"{_ENCODING_HEADER} {encoding[:20]!r} is not supported"
        raise Unsupported(reason, _ENCODING_HEADER)
    body = await request.body()
    upgrade = request.headers.get(_UPGRADE_HEADER)
    if upgrade and not body:  # the HTTP server reads no body after such a header
        reason = (
            f"the body is lost with {_UPGRADE_HEADER} {upgrade[:20]!r}; use HTTP/1.1 without it"
        )
        raise InvalidRequest(reason, _UPGRADE_HEADER)
    return await off_loop_by_body(request, off_loop, lambda: make(parse_json(body)))


async def off_loop_by_body(
    request: Request,
    off_loop: OffLoop,
    function: Callable[..., T],
    *arguments: Any,
    max_inline_bytes: int = _MAX_INLINE_BYTES,
) -> T:
    """Return the result of ``function``, which looks at an entire body; it runs in a thread if the
    body is longer than ``max_inline_bytes``."""
    num_bytes = len(await request.body())
    if num_bytes <= max_inline_bytes:
        return function(*arguments)
    return await off_loop(num_bytes, function, *arguments)
