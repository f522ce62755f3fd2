"""Not waiting for bodies that do not come: each keeps one of the places of a gateway."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Message, Receive

from hdserve.errors import BodyTooSlow

MAX_SILENCE_S = 30.0
"""How long a client may send nothing of a body that is waited for."""

MIN_BYTES_PER_S = 1024
"""How much of a body is to come in a second, but for :data:`MAX_SILENCE_S` in all: a client that
sends a byte now and then would have its place for days."""


def paced(receive: Receive) -> Receive:
    """Return what receives a body as ``receive`` does, and what comes after it.

    Only the time counts in which somebody waits for the body: what is done with the pieces of an
    archive may take its time, and after the last piece so may the answer.  Made for one request.

    Raises:
        BodyTooSlow: by what is returned: the client is silent, or sends too little.
    """
    left_s = MAX_SILENCE_S
    has_more = True

    async def received() -> Message:
        nonlocal left_s, has_more
        if not has_more:
            return await receive()
        start_s = time.monotonic()
        message = await _next(receive, min(left_s, MAX_SILENCE_S))
        has_more = message.get("more_body", False)
        left_s += len(message.get("body", b"")) / MIN_BYTES_PER_S - (time.monotonic() - start_s)
        return message

    return received


async def _next(receive: Receive, timeout_s: float) -> Message:
    """Return the next message.

    Raises:
        BodyTooSlow: there was none for so long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await receive()
    except TimeoutError as error:
        reason = (
            f"the request body came too slowly: nothing for {MAX_SILENCE_S:g} s, "
            f"or less than {MIN_BYTES_PER_S} bytes a second"
        )
        raise BodyTooSlow(reason) from error
