"""Messages of a chat: what the template is given, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ParsedChatCompletionMessage,
)

from deployments.openai.messages import MAX_CONTENT_PARTS
from deployments.openai.protocol import ChatBody, Speculation, TokenizeBody
from deployments.openai.request_body import parse_body
from deployments.openai.responses_protocol import ResponsesBody
from hdserve.errors import InvalidRequest, Unsupported
from tests.deployments.bodies import CALL, USER, chat, refused


def test_many_texts_of_a_content_take_no_object_each() -> None:
    """One takes three bytes of a body, and an object hundreds; other parts stay where they are."""
    image = {"type": "image_url", "image_url": {"url": "a"}}
    content = ["a", "b", {"type": "text", "text": "c"}, *("d", "", "e") * 500, image]
    result = {"role": "tool", "tool_call_id": "1", "content": content}
    messages = (*USER, {"role": "assistant", "tool_calls": [CALL]}, result)
    body = ChatBody.parse({"model": "m", "messages": messages})
    assert len(body.messages[-1].content or ()) == 4
    (*_, found) = body.to_generation("id").messages
    asides = "\n[image left out: this model reads text only]"
    assert found["content"] == "\n".join(["a", "b", "c", *("d", "", "e") * 500]) + asides


def test_a_content_of_too_many_parts_is_refused_before_they_are_read() -> None:
    """In any API, and of whatever they are."""
    texts = [{"type": "text", "text": "a"}] * MAX_CONTENT_PARTS
    contents: tuple[list[Any], ...] = ([*texts, 1], ["a"] * (MAX_CONTENT_PARTS + 1), [{}] * 50_000)
    for content in contents:
        error = refused(ChatBody, messages=[{"role": "user", "content": content}])
        assert error.param == "messages"
        assert "an array of at most 2048 is expected" in error.message
    with pytest.raises(InvalidRequest, match="an array of at most 2048 is expected"):
        ResponsesBody.parse({"model": "m", "input": [{"role": "user", "content": [*texts, 1]}]})
    assert chat(messages=[{"role": "user", "content": texts}]).messages


@pytest.mark.parametrize("role", ["function", "ai", "System", ""])
def test_unknown_roles_are_refused(role: str) -> None:
    """A template would show them to a model that has never seen one."""
    error = refused(ChatBody, messages=[*USER, {"role": role, "name": "f", "content": "hi"}])
    assert error.param == "messages"
    for known in ("assistant", "developer", "system", "tool", "user"):
        assert repr(known) in error.message
    with pytest.raises(InvalidRequest, match=r"messages\.0\.role"):
        TokenizeBody.parse({"model": "m", "messages": [{"role": role, "content": "hi"}]})


def test_messages_for_the_template() -> None:
    """Parts of text are lines of one, other fields of a message reach the template."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = chat(
        messages=[
            {"role": "system", "content": "s", "name": "n"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None},
            {"role": "assistant"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "b", "reasoning_content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": None},
        ]
    )
    assert found.messages == (
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "b", "reasoning_content": "a"},
        {"role": "assistant", "content": "b"},
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"text": "a"},
        {"type": "x" * 5000},
    ],
)
def test_parts_that_are_no_text_are_refused(part: dict[str, Any]) -> None:
    """Images and malformed parts are refused, never dropped."""
    error = refused(ChatBody, messages=[{"role": "user", "content": [part]}])
    assert isinstance(error, Unsupported)
    assert error.param == "messages"


@pytest.mark.parametrize(
    "part",
    [
        "a",
        {"type": "text", "text": "a"},
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
    ],
)
def test_parts_that_are_text(part: Any) -> None:
    """A text alone and the parts of the Responses API, too, as with vLLM."""
    body = ChatBody.parse({"model": "m", "messages": [{"role": "user", "content": [part, "b"]}]})
    assert body.ignored == ()
    assert body.to_generation("r").messages == ({"role": "user", "content": "a\nb"},)
    error = refused(ChatBody, messages=[{"role": "user", "content": [part, 5]}])
    assert error.message == "messages.0.content.1: an object is expected"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text"},
        {"type": "text", "text": 5},
        {"type": "refusal", "text": "No."},
    ],
)
def test_parts_without_their_text_are_refused_as_such(part: dict[str, Any]) -> None:
    """Their type is one that is offered."""
    error = refused(ChatBody, messages=[{"role": "user", "content": [part]}])
    assert not isinstance(error, Unsupported)
    assert error.param == "messages"
    assert error.message == f"the text of a part of type {part['type']!r} must be a string"


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ({"role": "user", "contents": "hi"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "system"}, "content"),
        ({"role": "tool", "tool_call_id": "1"}, "content"),
        ({"role": "tool", "content": "3"}, "tool_call_id"),
    ],
)
def test_messages_that_say_nothing_are_refused(message: dict[str, Any], missing: str) -> None:
    """The field that says it was misspelt, or forgotten."""
    error = refused(ChatBody, messages=[*USER, message])
    assert error.param == "messages"
    assert error.message == f"a message of role {message['role']!r} needs {missing}"


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_what_a_template_would_leave_out_is_refused(name: str) -> None:
    """A part of the conversation is never missing from the prompt without a word."""
    message = {"role": "assistant", "content": None, name: {"name": "f", "arguments": "{}"}}
    assert isinstance(refused(ChatBody, messages=[message]), Unsupported)
    assert chat(messages=[{"role": "assistant", "content": "a", name: None}]).messages


def test_names_of_fields_are_bounded() -> None:
    """Those that are told, too."""
    with pytest.raises(InvalidRequest) as caught:
        parse_body(Speculation, {"x" * 10_000: 1, "\ud800": 1})
    assert len(str(caught.value.param)) <= 100
    assert len(caught.value.message) <= 300


def echoes() -> Iterator[dict[str, Any]]:
    """Messages of assistants as clients append them to a conversation."""
    tool_call = ChatCompletionMessageFunctionToolCall.model_validate(CALL)
    yield ChatCompletionMessage(role="assistant", content="a").model_dump()
    yield ChatCompletionMessage(role="assistant", content="a", annotations=[]).model_dump()
    yield ChatCompletionMessage(role="assistant", tool_calls=[tool_call]).model_dump()
    yield (
        ParsedChatCompletionMessage[Any]
        .model_validate(
            {
                "role": "assistant",
                "content": '{"a": 1}',
                "parsed": {"a": 1},
                "tool_calls": [
                    CALL
                    | {"index": 0, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}
                ],
            }
        )
        .model_dump()
    )
    answer = {"role": "assistant", "content": "a"}
    yield answer | {"reasoning": None, "reasoning_content": None, "tool_calls": []}  # of vLLM
    yield answer | {"provider_specific_fields": {"refusal": None}, "images": []}  # of litellm
    url = {"url": "u", "title": "t", "start_index": 0, "end_index": 1}
    yield answer | {"annotations": [{"type": "url_citation", "url_citation": url}]}


@pytest.mark.parametrize("message", list(echoes()))
def test_answers_can_be_sent_back(message: dict[str, Any]) -> None:
    """With all the fields a library knows; templates see those that say something."""
    body = ChatBody.parse({"model": "m", "messages": [message]})
    assert body.ignored == ()
    (found,) = body.to_generation("r").messages
    assert set(found) <= {"role", "content", "tool_calls"}
    for call in found.get("tool_calls", ()):
        assert set(call) == {"id", "type", "function"}
        assert set(call["function"]) == {"name", "arguments"}


def test_a_refusal_is_what_the_assistant_said() -> None:
    """Beside a content, as its last line, or in it."""
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    for message, text in (
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Well.", "refusal": "No."}, "Well.\nNo."),
        ({"content": "Well.", "refusal": ""}, "Well."),
        ({"content": parts}, "Well.\nNo."),
    ):
        found = chat(messages=[{"role": "assistant", **message}]).messages
        assert found == ({"role": "assistant", "content": text},)


def test_reasoning_has_two_names() -> None:
    """That of newer versions of vLLM is given to templates that know the other one, too."""
    said = {"role": "assistant", "content": "a"}
    both = {"reasoning": "b", "reasoning_content": "b"}
    for sent in ({"reasoning": "b"}, both, {"reasoning": "b", "reasoning_content": None}):
        body = ChatBody.parse({"model": "m", "messages": [said | sent]})
        assert body.ignored == ()
        assert body.to_generation("r").messages == (said | both,)
    only = {"reasoning": "", "reasoning_content": "b"}
    assert chat(messages=[said | only]).messages == (said | {"reasoning_content": "b"},)
    assert chat(messages=[said | {"reasoning": ""}]).messages == (said,)


def test_the_assistant_calls_tools() -> None:
    """Templates do not look for calls elsewhere."""
    message = {"role": "user", "content": "a", "tool_calls": [CALL]}
    assert refused(ChatBody, messages=[message]).param == "messages"
    assert chat(messages=[message | {"tool_calls": None}]).messages


def test_templates_may_have_fields_of_their_own() -> None:
    """A field of a message that nobody documents reaches them all the same."""
    message = {"role": "assistant", "content": "a", "thinking": "b"}
    assert chat(messages=[message]).messages == (message,)


def test_arguments_of_calls_are_bounded_together() -> None:
    """Each is a JSON of its own; one with too many parts is not read, and is the text it is."""

    def calling(*numbers: int) -> list[dict[str, Any]]:
        texts = ['{"a": [' + ",".join(["[]"] * number) + "]}" for number in numbers]
        calls = [CALL | {"function": {"name": "f", "arguments": text}} for text in texts]
        return [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls]

    message = chat(messages=calling(49_000)).messages[0]
    assert len(message["tool_calls"][0]["function"]["arguments"]["a"]) == 49_000
    assert refused(ChatBody, messages=calling(25_000, 25_000)).param == "messages"
    message = chat(messages=calling(51_000, 49_000)).messages[0]
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"a": [[],')
