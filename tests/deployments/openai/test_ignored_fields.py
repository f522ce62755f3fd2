"""Fields of a request that nobody knows, or that are asked for in vain, are named."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.openai.messages import MAX_MESSAGES
from deployments.openai.protocol import ChatBody, CompletionBody, TokenizeBody
from deployments.openai.responses_protocol import ResponsesBody
from tests.deployments.bodies import CALL, USER


def test_unknown_fields_are_named() -> None:
    """A field nobody documents is taken, and reported."""
    body = ChatBody.parse({"model": "m", "messages": USER, "zebra": 1, "apple": None})
    assert body.ignored == ("apple", "zebra")
    body = ChatBody.parse({"model": "m", "messages": USER, "json": True, "copy": False})
    assert body.ignored == ("copy", "json")
    stream = {"stream": True, "stream_options": {"include_usage": True, "flavour": 1}}
    body = ChatBody.parse({"model": "m", "messages": USER, **stream})
    assert body.ignored == ("stream_options.flavour",)


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_what_is_asked_for_in_vain_is_named(body: type[ChatBody | CompletionBody]) -> None:
    """Clients send it to every server, and the answer is the same."""
    required = {"messages": USER} if body is ChatBody else {"prompt": "x"}
    parsed = body.parse({"model": "m", **required, "store": True, "service_tier": "flex", "z": 1})
    assert parsed.ignored == ("service_tier", "store", "z")
    assert parsed.unmet == {"service_tier", "store"}


@pytest.mark.parametrize(
    ("fields", "is_named"),
    [
        ({}, True),
        ({"tool_choice": "auto"}, True),
        ({"response_format": {"type": "text"}}, True),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"guided_choice": ["a", "b"]}, False),
    ],
)
def test_a_strict_function_that_calls_are_not_held_to_is_named(
    fields: dict[str, Any], is_named: bool
) -> None:
    """Calls that the model is free to make are what it writes, whatever the parameters say."""
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    body = ChatBody.parse({"model": "m", "messages": USER, "tools": tools, **fields})
    assert body.ignored == (("tools.function.strict",) if is_named else ())
    assert body.unmet == set(body.ignored)
    lax = [{"type": "function", "function": {"name": "f", "strict": False}}]
    assert ChatBody.parse({"model": "m", "messages": USER, "tools": lax, **fields}).ignored == ()


@pytest.mark.parametrize(
    ("fields", "is_named"),
    [
        ({}, True),
        ({"text": {"format": {"type": "text"}}}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "name": "f"}}, False),
        ({"text": {"format": {"type": "json_object"}}}, False),
    ],
)
def test_a_strict_function_of_a_response_is_named_as_in_a_chat(
    fields: dict[str, Any], is_named: bool
) -> None:
    """By the name it has there."""
    tools = [{"type": "function", "name": "f", "strict": True}]
    body = ResponsesBody.parse({"model": "m", "input": "hi", "tools": tools, **fields})
    assert body.ignored == (("tools.strict",) if is_named else ())


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"messages": [*USER, {"role": "user", "content": "a", "zebra": 1}]}, "messages.zebra"),
        ({"messages": [{"role": "assistant", "thinking": "a"}]}, "messages.thinking"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages.content.b",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL, CALL | {"a": 1}]}]},
            "messages.tool_calls.a",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [CALL | {"function": {**CALL["function"], "a": 1}}],
                    }
                ]
            },
            "messages.tool_calls.function.a",
        ),
        ({"prediction": {"content": "a", "b": 1}}, "prediction.b"),
        (
            {"prediction": {"content": [{"type": "text", "text": "a", "b": [0]}]}},
            "prediction.content.b",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "a": 1}]}, "tools.a"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "a": False}}]},
            "tools.function.a",
        ),
    ],
)
def test_unknown_fields_are_named_wherever_they_are(fields: dict[str, Any], ignored: str) -> None:
    """By where they are, without the number of the item."""
    body = ChatBody.parse({"model": "m", "messages": USER, **fields})
    assert body.ignored == (ignored,)
    body.to_generation("r")


def test_names_are_as_many_as_there_are_fields() -> None:
    """Not as there are messages; schemas and variables of templates have names of their own."""
    messages = [{"role": "user", "content": "a", "b": index} for index in range(MAX_MESSAGES)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"title": "t"}}}
    fields = {"tools": [tool], "response_format": form, "chat_template_kwargs": {"thinking": True}}
    body = ChatBody.parse({"model": "m", "messages": messages, **fields})
    assert body.ignored == ("messages.b",)
    body = TokenizeBody.parse({"model": "m", "messages": messages})  # type: ignore[assignment]
    assert body.ignored == ("messages.b",)


def test_what_clients_add_to_answers_they_send_back_does_not_count() -> None:
    """To messages, their parts and calls; templates do not see it either."""
    added: dict[str, Any] = {
        "annotations": [{"type": "url_citation"}],
        "id": "msg_1",
        "index": 1,
        "logprobs": {"content": [1]},
        "parsed": {"a": 1},
        "status": "completed",
    }
    part = {"type": "text", "text": "a", **added}
    function = CALL["function"] | added
    call = added | CALL | {"function": function}
    messages = [*USER, {"role": "assistant", "content": [part], "tool_calls": [call], **added}]
    body = ChatBody.parse({"model": "m", "messages": messages})
    assert body.ignored == ()
    message = body.to_generation("r").messages[-1]
    assert message.keys() == {"role", "content", "tool_calls"}
    assert message["tool_calls"][0].keys() <= {"id", "type", "function"}
