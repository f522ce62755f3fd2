"""A wrong body is told where it is wrong, in the words of JSON."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from deployments.anthropic.protocol import MessagesBody
from deployments.openai.protocol import ChatBody, CompletionBody, TokenizeBody
from deployments.openai.request_body import OfferedBody
from deployments.openai.responses_protocol import ResponsesBody
from hdserve.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}
CHAT = {"messages": [USER]}

WRONG: list[tuple[type[OfferedBody], dict[str, Any], str]] = [
    (ChatBody, {"messages": "hi"}, "messages: an array is expected"),
    (ChatBody, {"messages": []}, "messages: an array of at least 1 is expected"),
    (ChatBody, {"messages": [USER] * 2049}, "messages: an array of at most 2048 is expected"),
    (ChatBody, {"messages": ["hi"]}, "messages.0: an object is expected"),
    (ChatBody, {"messages": [{"content": "hi"}]}, "messages.0.role: is missing"),
    (
        ChatBody,
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content: a string or an array is expected",
    ),
    (
        ChatBody,
        {"messages": [{"role": "user", "content": [5]}]},
        "messages.0.content.0: an object is expected",
    ),
    (ChatBody, {**CHAT, "n": 0}, "n: at least 1 is expected"),
    (ChatBody, {**CHAT, "n": "two"}, "n: an integer is expected"),
    (ChatBody, {**CHAT, "seed": 1.5}, "seed: an integer is expected"),
    (ChatBody, {**CHAT, "temperature": "hot"}, "temperature: a number is expected"),
    (ChatBody, {**CHAT, "stream": "maybe"}, "stream: true or false is expected"),
    (ChatBody, {**CHAT, "stop": 5}, "stop: a string or an array is expected"),
    (ChatBody, {**CHAT, "stop": ["a", 5]}, "stop.1: a string is expected"),
    (ChatBody, {**CHAT, "logit_bias": {"a": 1}}, "logit_bias.a: an integer is expected"),
    (ChatBody, {**CHAT, "logit_bias": {"5": True}}, "logit_bias.5: a number is expected"),
    (
        ChatBody,
        {**CHAT, "logit_bias": {f"{index}": 1 for index in range(1025)}},
        "logit_bias: an object of at most 1024 members is expected",
    ),
    (
        ChatBody,
        {**CHAT, "structured_outputs": {"disable_fallback": False, "a": None, "b": 1, "c": 2}},
        "structured_outputs.b: is unknown",
    ),
    (
        ResponsesBody,
        {"input": "hi", "metadata": {f"{index}": 1 for index in range(1025)}},
        "metadata: an object of at most 1024 members is expected",
    ),
    (ChatBody, {**CHAT, "logit_bias": {"5": "3"}}, "logit_bias.5: a number is expected"),
    (
        ChatBody,
        {**CHAT, "stream": True, "stream_options": {"include_usage": "false"}},
        "stream_options.include_usage: true or false is expected",
    ),
    (
        ChatBody,
        {**CHAT, "speculation": {"enabled": "no"}},
        "speculation.enabled: true or false is expected",
    ),
    (
        ChatBody,
        {**CHAT, "speculation": {"max_draft_tokens": "5"}},
        "speculation.max_draft_tokens: an integer is expected",
    ),
    (
        ChatBody,
        {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "strict": "true"}}]},
        "tools.0.function.strict: true or false is expected",
    ),
    (ChatBody, {**CHAT, "speculation": {"on": 1}}, "speculation.on: is unknown"),
    (ChatBody, {**CHAT, "tool_choice": {"type": "function"}}, "tool_choice.function: is missing"),
    (
        ChatBody,
        {**CHAT, "tool_choice": "any"},
        "tool_choice: 'none', 'auto' or 'required' or an object is expected",
    ),
    (
        ChatBody,
        {**CHAT, "tool_choice": {"type": "allowed_tools"}},
        "tool_choice.allowed_tools: is missing",
    ),
    (
        ChatBody,
        {
            **CHAT,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "a", "tools": [5]}},
        },
        "tool_choice.allowed_tools.tools.0: an object is expected",
    ),
    (
        ChatBody,
        {**CHAT, "response_format": {"type": "xml"}},
        "response_format.type: 'text', 'json_object' or 'json_schema' is expected",
    ),
    (ChatBody, {**CHAT, "guided_json": 5}, "guided_json: an object or a string is expected"),
    (CompletionBody, {"prompt": 5}, "prompt: a string or an array is expected"),
    (CompletionBody, {"prompt": ["a", [5]]}, "prompt.1: a string is expected"),
    (CompletionBody, {"prompt": [5, "a"]}, "prompt.1: an integer is expected"),
    (CompletionBody, {"prompt": [[5], "a"]}, "prompt.1: an array is expected"),
    (ResponsesBody, {"input": ["a"]}, "input.0: an object is expected"),
    (
        ResponsesBody,
        {"input": [{"type": 5, "id": "a"}]},
        "input.0.type: 'message' is expected",
    ),
    (ResponsesBody, {"input": None}, "input: a string or an array is expected"),
    (ResponsesBody, {"input": 5}, "input: a string or an array is expected"),
    (ResponsesBody, {"input": []}, "input: a string or an array of at least 1 is expected"),
    (
        ResponsesBody,
        {"input": [{"role": "user", "content": 5}]},
        "input.0.content: a string or an array is expected",
    ),
    (
        ResponsesBody,
        {"input": [USER, {"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input.1.call_id: is missing",
    ),
    (
        ResponsesBody,
        {"input": "hi", "tools": [{"type": "function", "name": "a b"}]},
        "tools.0.name: a string that matches ^[a-zA-Z0-9_.-]{1,128}$ is expected",
    ),
    (
        ResponsesBody,
        {"input": "hi", "tools": [{"type": 5, "name": "f"}]},
        "tools.0.type: 'function' is expected",
    ),
    (
        ResponsesBody,
        {"input": "hi", "tool_choice": {"name": "f"}},
        "tool_choice.type: is missing",
    ),
]


@pytest.mark.parametrize(("body", "fields", "message"), WRONG)
def test_where_and_what(body: type[OfferedBody], fields: dict[str, Any], message: str) -> None:
    """Of a value with several forms, where the closest one was left."""
    with pytest.raises(InvalidRequest) as caught:
        body.parse({"model": "m", **fields})
    assert caught.value.message == message
    assert caught.value.param == message.split(":", 1)[0].split(".", 1)[0]


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ChatBody, CHAT),
        (CompletionBody, {"prompt": "hi"}),
        (TokenizeBody, {"prompt": "hi"}),
        (ResponsesBody, {"input": "hi"}),
        (MessagesBody, {**CHAT, "max_tokens": 5}),
    ],
)
def test_nothing_is_read_as_a_value_of_another_kind(
    body: type[OfferedBody], fields: dict[str, Any]
) -> None:
    """No text as a number, or as true or false, and ``true`` not as 1."""
    base = {"model": "m", **fields}
    assert body.parse(base)
    taken = set()
    for name in body.model_fields:
        for value in ("1", "true", True):
            with suppress(InvalidRequest):
                found = body.parse({**base, name: value})
                assert type(getattr(found, name)) is type(value), name
                taken.add(type(value))
    assert taken == {str, bool}
