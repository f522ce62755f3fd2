"""Messages and their events, as the types of the real client read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from deployments.anthropic.blocks import SIGNATURE
from deployments.anthropic.message_events import MessageEvents
from deployments.anthropic.objects import error_body
from deployments.anthropic.protocol import MessagesBody
from deployments.events import Event
from deployments.generation import Delta, Summary
from deployments.parsers.tool_parsers import HermesToolParser
from hdserve.conversation import INVALID_JSON
from hdserve.core import DraftCounts
from hdserve.errors import (
    BodyTooLarge,
    EngineStopped,
    HdserveError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthorized,
)

SUMMARY = Summary(7, 11, DraftCounts(), "abc", num_reused_tokens=3)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
EVENTS: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


REQUEST_ID = "r"


def builder(**fields: Any) -> MessageEvents:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "max_tokens": 100, "messages": messages, **fields}
    return MessageEvents(MessagesBody.parse(body), REQUEST_ID, HermesToolParser)


def deltas(written: str, *, size: int = 7, **last: Any) -> list[Delta]:
    """What the model wrote, in pieces of ``size`` characters, the last of which ends it."""
    pieces = [written[start : start + size] for start in range(0, len(written), size)] or [""]
    found = [Delta(0, 0, piece, (1,), (0,), None, None, num_prompt_tokens=7) for piece in pieces]
    return [*found[:-1], found[-1]._replace(**{"finish_reason": "stop", **last})]


def streamed(given: list[Delta], **fields: Any) -> list[Event]:
    made = builder(**fields)
    return [event for delta in given for event in made.add(delta)] + made.end(SUMMARY)


def whole(given: list[Delta], **fields: Any) -> Message:
    made = builder(**fields)
    for delta in given:
        made.collect(delta)
    return Message.model_validate(made.whole(SUMMARY))


def kinds(events: list[Event]) -> list[str]:
    """The types of the events, a run of deltas as one."""
    found = [event["type"] for event in events]
    return [kind for kind, before in zip(found, ["", *found], strict=False) if kind != before]


BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_message_comes_block_by_block(size: int) -> None:
    """What is thought, said and called, in the order in which it was written."""
    given = [
        Delta(0, 0, "", (1,), (0,), None, None, reasoning="Well", num_prompt_tokens=7),
        *deltas(f"So: {CALL}{OTHER}", size=size),
    ]
    events = streamed(given)
    for event in events:
        EVENTS.validate_python(event)
    assert kinds(events) == ["message_start", *4 * BLOCK, "message_delta", "message_stop"]
    assert [event["index"] for event in events if event["type"] == BLOCK[0]] == [0, 1, 2, 3]
    start = events[0]["message"]
    assert (start["content"], start["usage"]["input_tokens"]) == ([], 7)
    message = whole(given)
    thought, text, call, other = message.content
    assert thought.type == "thinking"
    assert thought.thinking == "Well"
    assert text.type == "text"
    assert text.text.strip() == "So:"
    assert call.type == other.type == "tool_use"
    assert (call.name, call.input, other.name, other.input) == ("f", {"a": "é"}, "g", {})
    assert message.stop_reason == "tool_use"
    pieces = [event["delta"] for event in events if event["type"] == BLOCK[1]]
    assert "".join(piece.get("text", "") for piece in pieces) == text.text


def test_blocks_have_no_line_break_that_separates_texts() -> None:
    """As a parser puts it between two of a kind; sent back, each is a line again."""
    given = [
        Delta(0, 0, "Wait.", (1,), (0,), None, None, reasoning="Hm.", num_prompt_tokens=7),
        *deltas(CALL, finish_reason=None),
        Delta(0, 0, "\nDone.\n\nBye.", (1,), (0,), None, "stop", reasoning="\nWell."),
    ]
    message = whole(given)
    shown = [getattr(block, block.type, None) for block in message.content]
    assert shown == ["Hm.", "Wait.", None, "Well.", "Done.\n\nBye."]
    pieces = [event["delta"] for event in streamed(given) if event["type"] == BLOCK[1]]
    for kind in ("thinking", "text"):
        said = "".join(piece.get(kind, "") for piece in pieces)
        assert said == "".join(getattr(block, kind, "") for block in message.content)
    sent_back = message.model_dump(include={"role", "content"})
    result = {"type": "tool_result", "tool_use_id": sent_back["content"][2]["id"], "content": "42"}
    turns = [{"role": "user", "content": "hi"}, sent_back, {"role": "user", "content": [result]}]
    body = builder(messages=turns)._body
    (_, answer, _) = body.to_chat().to_generation("r").messages
    assert answer["reasoning_content"] == "Hm.\nWell."
    assert answer["content"] == "Wait.\nDone.\n\nBye."


def test_what_was_thought_has_a_signature() -> None:
    """Without one clients take it for cut off, and do not send it back, where nobody misses it."""
    thought = Delta(0, 0, "", (1,), (0,), None, None, reasoning="Well", num_prompt_tokens=7)
    for given in ([thought, *deltas("So.")], [thought, *deltas("")]):
        blocks = [event for event in streamed(given) if event.get("index") == 0]
        for event in blocks:
            EVENTS.validate_python(event)
        begun, *pieces, signed, stopped = blocks
        assert begun["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
        assert [piece["delta"]["type"] for piece in pieces] == ["thinking_delta"]
        assert signed["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
        assert stopped["type"] == "content_block_stop"
        message = whole(given)
        assert message.content[0].model_dump() == {
            "type": "thinking",
            "thinking": "Well",
            "signature": SIGNATURE,
        }
        assert SIGNATURE
    sent_back = message.model_dump(include={"role", "content"})
    body = builder(messages=[{"role": "user", "content": "hi"}, sent_back])._body
    assert body.ignored == ()


def test_a_message_of_nothing() -> None:
    events = streamed(deltas(""))
    assert kinds(events) == ["message_start", "message_delta", "message_stop"]
    assert whole(deltas("")).content == []


@pytest.mark.parametrize(
    ("last", "fields", "reason", "sequence"),
    [
        ({}, {}, "end_turn", None),
        ({"stop_reason": "\n\n"}, {}, "stop_sequence", "\n\n"),
        ({"stop_reason": 7}, {}, "end_turn", None),
        ({"finish_reason": "length"}, {"max_tokens": 3}, "max_tokens", None),
        ({"finish_reason": "length"}, {"max_tokens": 4}, "model_context_window_exceeded", None),
    ],
)
def test_why_a_message_ended(
    last: dict[str, Any], fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    """Whole and streamed alike."""
    given = deltas("one two three", size=5, **last)
    assert len(given) == 3
    message = whole(given, **fields)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    (ended,) = [e for e in streamed(given, **fields) if e["type"] == "message_delta"]
    assert ended["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_call_that_was_cut_off_is_none_to_make() -> None:
    """It has the arguments that there are, as the client makes them of a stream."""
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": '
    for last, reason in (({"finish_reason": "length"}, "max_tokens"), ({}, "end_turn")):
        given = deltas(written, **last)
        message = whole(given, max_tokens=1)
        (call,) = message.content
        assert call.type == "tool_use"
        assert call.input == {"a": 1}
        assert message.stop_reason == reason
        assert streamed_input(given) == '{"a": 1, "b": '


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": e28345307}',
        '{"a": 1e28345307}',
        '{"a": -1e999}',
        '{"a": NaN}',
        '{"a": "\\ud83d"}',
        '{"a": ' + 2000 * "[" + 2000 * "]" + "}",
    ],
)
def test_arguments_that_are_no_object(arguments: str) -> None:
    """A model may write anything; nobody loses the answer because of it."""
    given = deltas(
        f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>', size=500
    )
    message = whole(given)
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.input == {INVALID_JSON: arguments}
    json.dumps(call.input, allow_nan=False)
    assert streamed_input(given) == arguments


def streamed_input(given: list[Delta]) -> str:
    deltas = [event["delta"] for event in streamed(given) if event["type"] == BLOCK[1]]
    return "".join(delta["partial_json"] for delta in deltas)


def test_one_call_is_enough_where_the_request_says_so() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    message = whole(deltas(CALL + OTHER), tools=[tool], tool_choice=choice)
    assert [block.name for block in message.content if block.type == "tool_use"] == ["f"]


def test_the_usage_of_a_message() -> None:
    """What was cached is no input; all counts are there at the end of a stream, too."""
    usage = whole(deltas("a")).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (4, 3)
    assert (usage.cache_creation_input_tokens, usage.output_tokens) == (0, 11)
    summary = SUMMARY._replace(num_reasoning_tokens=5)
    made = builder()
    made.add(deltas("a")[0])
    ended, _ = made.end(summary)[-2:]
    assert ended["usage"]["output_tokens_details"] == {"thinking_tokens": 5}
    assert ended["usage"]["input_tokens"] == 4


def test_the_usage_at_the_beginning() -> None:
    """Is that at the end, but for what was generated."""
    (first,) = deltas("a")
    begun, *_, ended, _ = streamed([first._replace(num_reused_tokens=3)])
    wanted = {**ended["usage"], "output_tokens": 0}
    assert begun["message"]["usage"] == wanted


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("a"), "invalid_request_error"),
        (Unauthorized("a"), "authentication_error"),
        (ModelNotFound("a"), "not_found_error"),
        (BodyTooLarge("a"), "request_too_large"),
        (Overloaded("a"), "rate_limit_error"),
        (EngineStopped("a"), "overloaded_error"),
        (HdserveError("a"), "api_error"),
    ],
)
def test_errors_have_the_types_of_the_api(error: HdserveError, kind: str) -> None:
    told = error_body(error, REQUEST_ID)
    assert told["type"] == "error"
    assert told["request_id"] == REQUEST_ID
    assert told["error"] == {"type": kind, "message": error.message}
    assert builder().fail(error) == [told]
