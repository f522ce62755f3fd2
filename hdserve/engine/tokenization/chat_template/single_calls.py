"""Tool calls one at a time, each followed by its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def with_single_calls(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield a conversation in which each of several calls of a message is a message of its own. The
    first one keeps the text before them."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        if len(message.get("tool_calls") or ()) < 2:
            yield message
            continue
        results = []
        while rest and rest[0].get("role") == "tool":
            results.append(rest.popleft())
        yield from _apart(message, results)


def _apart(
    message: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    calls = message["tool_calls"]
    for call, returned in zip(calls, _of_each(calls, results), strict=True):
        yield {**message, "tool_calls": [call]}
        yield from returned
        message = {"role": message["role"], "content": ""}


def _of_each(
    calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> list[list[Mapping[str, Any]]]:
    """Return the results of each call: those that name it, or, if some name none of them, in order
    of appearance."""
    last = len(calls) - 1
    places = {call.get("id"): place for place, call in enumerate(calls)}
    names = [result.get("tool_call_id") for result in results]
    are_named = len(places) == len(calls) and all(name in places for name in names)
    found: list[list[Mapping[str, Any]]] = [[] for _ in calls]
    for order, result in enumerate(results):
        place = places[names[order]] if are_named else min(order, last)
        found[place].append(result)
    return found
