"""Reading the JSON body of a request."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import Request

from hdserve.errors import InvalidRequest

_MAX_DEPTH = 100
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


async def read_json(request: Request) -> Any:
    """The body of a request.

    Raises:
        InvalidRequest: it is no JSON, is nested too deeply, or has a number or text that cannot
            be processed.
    """
    return parse_json(await request.body())


def parse_json(body: bytes) -> Any:
    """
    Raises:
        InvalidRequest: as :func:`read_json`.
    """
    try:
        data = json.loads(body)
        if b"\\ud" in body.lower():  # perhaps half of a surrogate pair, which is no text
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the request body is not valid JSON") from error
    if _is_deep(body):
        raise InvalidRequest(f"the request body is nested more than {_MAX_DEPTH} deep")
    return data


def _is_deep(body: bytes) -> bool:
    """Whether valid JSON is nested deeper than what recursive readers of a request bear."""
    if body.count(b"[") + body.count(b"{") <= _MAX_DEPTH:
        return False
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKETS)
    for _ in range(_MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return bool(brackets)
