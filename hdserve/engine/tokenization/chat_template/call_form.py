"""The form in which a chat template takes messages that call tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from hdserve.conversation import INVALID_JSON

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that templates have for what the assistant thought."""

_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


class CallForm(NamedTuple):
    """How messages with calls differ from those of a conversation, for a template that would refuse
    them, or drop a part of them, as they are."""

    has_text_arguments: bool = False
    """Arguments are the JSON of an object: DeepSeek's templates put marks around a text."""

    wraps_texts: bool = False
    """Arguments that are a text, because the model was cut off in them, are the one value of an
    object: the templates of Qwen3-Coder and GLM go through those of an object."""

    silence_is_none: bool = False
    """A content is ``None`` where nothing was said: only then do the templates of DeepSeek-V3 and
    R1 look for calls."""

    says_apart: bool = False
    """What was said before a call is a message by itself."""

    joins_reasoning: bool = False
    """What was said before a call is the end of what was thought: gpt-oss' template takes one of
    both, in its channel of what is thought."""

    has_single_calls: bool = False
    """Each call is a message by itself, before its result: templates of Llama 3 refuse several
    calls, and gpt-oss' drops all but the first."""

    joins_results: bool = False
    """What the user says right behind a result is its end: Mistral's templates refuse a message of
    the user there, since the assistant has not answered the last one."""

    has_short_ids: bool = False
    """Ids of calls have nine letters and digits: Mistral's templates refuse those that come from
    most other servers."""

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a conversation in this form."""
        if self.has_short_ids:
            messages = [_with_short_ids(message) for message in messages]
        arranged = with_single_calls if self.has_single_calls else _with_ordered_results
        messages = list(arranged(messages))
        if self.joins_results:
            messages = _with_joined_results(messages)
        return [found for message in messages for found in self._of(message)]

    def _of(self, message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if message.get("tool_calls"):
            if self.wraps_texts:
                message = _with_calls(message, _with_wrapped_text)
            if self.has_text_arguments:
                message = _with_calls(message, _with_text_arguments)
            if self.joins_reasoning:
                message = _with_joined_reasoning(message)
            if self.says_apart and message.get("content"):
                yield {name: value for name, value in message.items() if name != "tool_calls"}
                message = {name: message[name] for name in ("role", "tool_calls")}
            if self.silence_is_none and not message.get("content"):
                message = {**message, "content": None}
        yield message


def with_single_calls(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield a conversation in which each of several calls of a message is a message of its own. The
    first one keeps the text before them."""
    for message, results in _with_results(messages):
        if results:
            yield from _apart(message, results)
        else:
            yield message


def _with_ordered_results(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield a conversation in which the results of several calls, which may come in any order, are
    in the order of the calls: most templates show no ids."""
    for message, results in _with_results(messages):
        yield message
        yield from chain.from_iterable(results)


def _with_results(
    messages: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], list[list[Mapping[str, Any]]]]]:
    """Yield each message, and if it has several calls, the results of each of them, which are
    directly behind it."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message, []
            continue
        results = []
        while rest and rest[0].get("role") == "tool":
            results.append(rest.popleft())
        yield message, _of_each(calls, results)


def _apart(
    message: Mapping[str, Any], results: Sequence[Sequence[Mapping[str, Any]]]
) -> Iterator[Mapping[str, Any]]:
    for call, returned in zip(message["tool_calls"], results, strict=True):
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


def _with_joined_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        if message.get("role") == "user" and last.get("role") == "tool":
            found[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            found.append(message)
    return found


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("tool_calls"):
        message = _with_calls(message, lambda call: _with_short_id(call, "id"))
    return _with_short_id(message, "tool_call_id")


def _with_short_id(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a call, or a result, whose id under this name is short: the same for the same id."""
    call_id = part.get(name)
    if not isinstance(call_id, str) or _SHORT_ID.fullmatch(call_id):
        return part
    short = hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]
    return {**part, name: short}


def _with_calls(
    message: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Mapping[str, Any]:
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def _with_wrapped_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        return call
    return {**call, "function": {**call["function"], "arguments": {INVALID_JSON: arguments}}}


def _with_text_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, Mapping):  # the text of a call that was cut off
        return call
    text = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _with_joined_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    thoughts = {name: message.get(name) for name in REASONING}
    joined = {
        name: f"{thought}\n{content}"
        for name, thought in thoughts.items()
        if thought and isinstance(thought, str)
    }
    return {**message, **joined, "content": ""} if content and joined else message
