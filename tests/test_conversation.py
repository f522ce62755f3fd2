"""Conversations in the form of the OpenAI API, where no server reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.openai.messages import Message, messages_for_template
from hdserve.conversation import for_template
from hdserve.errors import InvalidRequest, Unsupported

USER = {"role": "user", "content": "Is it warm in Rome?"}
FUNCTION = {"name": "find", "arguments": "{}"}


def calling(arguments: Any) -> dict[str, Any]:
    """A message with a call, as OpenAI's client for Python gives it back."""
    function = {"arguments": arguments, "name": "find", "parsed_arguments": None}
    call = {"function": function, "id": "c", "type": "function", "index": 0}
    return {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": None,
        "tool_calls": [call],
    }


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ],
        [{"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}],
        [{"role": "assistant", "content": [{"type": "output_text", "text": "b"}]}],
        [{"role": "developer", "content": "Be brief.", "name": "a"}, USER],
        [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Why?"}, USER],
        [USER, {"role": "assistant", "content": "Yes.", "reasoning": "Why?"}, USER],
        [USER, {"role": "assistant", "content": None, "refusal": "No.", "audio": None}, USER],
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
        [USER, {"role": "assistant", "content": "Well.", "refusal": "No."}, USER],
        [USER, {"role": "assistant", "content": "", "tool_calls": []}, USER],
        [USER, {"role": "assistant"}, USER],
        [USER, calling('{"city": "Rome"}')],
        [USER, calling({"city": "Rome"})],
        [USER, calling("")],
        [USER, {"role": "assistant", "tool_calls": [{"function": FUNCTION, "id": None}]}],
        [USER, calling('{"city": "Ro')],
        [USER, calling("[1]")],
        [USER, calling("[" * 100_000)],
        [
            USER,
            calling("{}"),
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "warm"}]},
        ],
    ],
)
def test_a_template_gets_what_a_server_gives_it(messages: list[dict[str, Any]]) -> None:
    served = messages_for_template([Message.model_validate(message) for message in messages])
    found = for_template(messages)
    assert found == list(served)
    shown = [[message.get("tool_calls") for message in side] for side in (found, served)]
    assert json.dumps(shown[0]) == json.dumps(shown[1])  # templates may show keys in their order


def test_what_was_given_stays_as_it_is() -> None:
    message = calling("{}")
    for_template([message])
    assert message == calling("{}")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user"}, "a message of role 'user' needs content"),
        ({"content": "a"}, "a message needs a role, such as 'user' or 'assistant'"),
        ({"role": 5, "content": "a"}, "a message needs a role, such as 'user' or 'assistant'"),
        ({"role": "user", "content": None}, "a message of role 'user' needs content"),
        ({"role": "user", "content": 5}, "a content is a text or a list of parts"),
        ({"role": "user", "content": ["a", 5]}, "a content is a text or a list of parts"),
        ({"role": "user", "content": {"type": "text"}}, "a content is a text or a list of parts"),
        ({"role": "user", "content": [{"type": "text"}]}, "of type 'text' must be a string"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls is a list of objects"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls is a list of objects"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "tool_calls is a list of objects"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls is a list of obj"),
    ],
)
def test_what_cannot_be_read_is_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        for_template([message])
    assert caught.value.param == "messages"


def test_parts_that_are_no_text_are_refused_by_their_type() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
    with pytest.raises(Unsupported, match="parts of type 'image_url' are not supported"):
        for_template([{"role": "user", "content": [image]}])
