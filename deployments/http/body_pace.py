"""Giving up on bodies that do not arrive: each occupies a slot of a gateway."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Message, Receive

from hdserve.errors import BodyTooSlow

MAX_SILENCE_S = 30.0
"""How long a client may send nothing while its body is being waited for."""

MIN_BYTES_PER_S = 1024
"""How much of a body must arrive per second, after an allowance of :data:`MAX_SILENCE_S` in all: a
client that sends a byte now and then would keep its slot for days."""


def paced(receive: Receive) -> Receive:
    """Return a ``receive`` that limits how long a body may take; later messages are not limited.

    Only waiting for the body counts: handling the pieces of an archive may take long, and so may
    the answer after the last piece.  Make one for each request.

    Raises:
        BodyTooSlow: (by the returned function) the client is silent, or sends too slowly.
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
        BodyTooSlow: none arrived in this time.
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
