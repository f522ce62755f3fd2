"""Bodies in pieces, each of which is sent only once its client has read nearly all before it."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.types import Message

_PIECE_BYTES = 2**16


def body_messages(body: bytes, *, is_last: bool = True) -> Iterator[Message]:
    """Yield ``body`` as messages; also an empty one.

    Args:
        is_last: whether the answer ends with it.
    """
    for start in range(0, len(body) or 1, _PIECE_BYTES):
        end = start + _PIECE_BYTES
        has_more = end < len(body) or not is_last
        yield {"type": "http.response.body", "body": body[start:end], "more_body": has_more}
