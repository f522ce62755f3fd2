"""Answers in JSON that may be large: written without holding up other requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from deployments.deadline import Deadline
from deployments.events import Event, named_event
from deployments.http.whole_answer import WholeAnswer
from deployments.off_loop import MAX_INLINE_SIZE, OffLoop
from deployments.openai.long_list import LongList

_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list
)
_EVENT_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=list)
"""Its lines have no line separator of Unicode, at which some clients split them."""

_MAX_ITEMS = 64
"""The encoder blocks all other threads, so longer lists are passed to it this many items at a time:
about 10 ms if each is a token with 20 alternatives."""

_DEPTH = 6
"""The levels from an event down to the lists that may be long: ``response``, ``output``, an item,
``content``, a part, and ``logprobs``; other answers have fewer."""


async def json_answer(
    off_loop: OffLoop,
    size: int,
    make: Callable[[], Any],
    deadline: Deadline,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> WholeAnswer:
    """Return the result of ``make`` as an answer; a large one is made and written off the loop.

    Args:
        size: how many token ids and log probabilities it has, about 4 us each, and text counted by
            the same time.
    """
    if size <= MAX_INLINE_SIZE:
        body = _ENCODER.encode(make()).encode()
    else:
        body = await off_loop(size, _written, make)
    return WholeAnswer(body, deadline, headers)


def _written(make: Callable[[], Any]) -> bytes:
    return b"".join(json_pieces(make()))


def long_event(event: Event) -> bytes:
    """Write an event that also contains its name, and may have long lists."""
    try:
        return named_event(event)
    except TypeError:  # which the encoder of ordinary events does not know
        data = b"".join(json_pieces(event, encoder=_EVENT_ENCODER))
        return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"


def json_pieces(
    value: Any, depth: int = _DEPTH, encoder: json.JSONEncoder = _ENCODER
) -> Iterator[bytes]:
    """Yield ``value`` as JSON, in pieces that are each written quickly.

    Args:
        depth: down to which level there may be long lists.
        encoder: of the pieces.
    """

    def encoded(part: Any) -> bytes:
        return encoder.encode(part).encode()

    def member(name: str, item: Any) -> Iterator[bytes]:
        yield encoded(name) + b":"
        yield from json_pieces(item, depth - 1, encoder)

    if isinstance(value, (list, LongList)) and len(value) > _MAX_ITEMS:
        starts = range(0, len(value), _MAX_ITEMS)
        items = (encoded(value[start : start + _MAX_ITEMS])[1:-1] for start in starts)
        yield from _between(b"[", ((item,) for item in items), b"]")
    elif depth and isinstance(value, list):
        parts = (json_pieces(item, depth - 1, encoder) for item in value)
        yield from _between(b"[", parts, b"]")
    elif depth and isinstance(value, dict):
        members = (member(name, item) for name, item in value.items())
        yield from _between(b"{", members, b"}")
    else:
        yield encoded(value)


def _between(start: bytes, parts: Iterable[Iterable[bytes]], end: bytes) -> Iterator[bytes]:
    yield start
    for index, part in enumerate(parts):
        if index:
            yield b","
        yield from part
    yield end
