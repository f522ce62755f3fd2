"""Reading the JSON body of a request."""

from __future__ import annotations

import asyncio
import json
import math
import re
from itertools import accumulate
from typing import Any

from fastapi import Request

from hdserve.errors import InvalidRequest

_MAX_INLINE_BYTES = 2**16
"""Longer bodies are read in a thread, so that the answers of others go on."""

_MAX_DEPTH = 100
_MAX_CONTAINERS = 100_000
"""A body of nothing else takes seconds to read, and the interpreter does nothing beside it."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""One without its end counts, too: what is no JSON is read once, as well."""

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


async def read_json(request: Request) -> Any:
    """The body of a request.

    Raises:
        InvalidRequest: it is no JSON in UTF-8, has too many objects and arrays or nests them too
            deeply, or has a number or text that cannot be processed.
    """
    body = await request.body()
    if len(body) <= _MAX_INLINE_BYTES:
        return parse_json(body)
    return await asyncio.to_thread(parse_json, body)


def parse_json(body: bytes) -> Any:
    """
    Raises:
        InvalidRequest: as :func:`read_json`.
    """
    brackets = _brackets(body)
    if len(brackets) > 2 * _MAX_CONTAINERS:
        reason = f"the request body has more than {_MAX_CONTAINERS} objects and arrays"
        raise InvalidRequest(reason)
    try:
        text = body.decode("utf-8-sig")
        data = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if b"\\ud" in body.lower():  # perhaps half of a surrogate pair, which is no text
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the request body is not valid JSON") from error
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > _MAX_DEPTH:
        raise InvalidRequest(f"the request body is nested more than {_MAX_DEPTH} deep")
    return data


def _brackets(body: bytes) -> bytes:
    """Those outside of texts; none where there are too few for any limit."""
    if body.count(b"[") + body.count(b"{") <= _MAX_DEPTH:
        return b""
    return _STRING.sub(b"", body).translate(None, _NO_BRACKETS)


def _finite(number: str) -> float:
    """Of a number, or of ``NaN`` and ``Infinity``, which JSON does not have."""
    value = float(number)
    if not math.isfinite(value):
        raise InvalidRequest(f"the request body has a number that is not finite: {number[:20]}")
    return value
