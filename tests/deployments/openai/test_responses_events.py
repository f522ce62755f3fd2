"""Responses and their events, as the types of the real client read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from deployments.events import Event, named_event
from deployments.generation import Delta, Summary
from deployments.openai.objects import error_body
from deployments.openai.responses_events import ResponseEvents, usage
from deployments.openai.responses_protocol import ResponsesBody
from deployments.parsers.tool_parsers import HermesToolParser
from hdserve.core import DraftCounts
from hdserve.errors import EngineStopped, InvalidRequest, Overloaded, PromptTooLong, RequestTimeout

SUMMARY = Summary(7, 11, DraftCounts(), "abc", num_reused_tokens=3)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def answered(written: str, *, reason: str = "stop", size: int = 7, **fields: Any) -> list[Event]:
    """The events of what the model wrote, which comes in pieces of ``size`` characters."""
    body = ResponsesBody.parse({"model": "m", "input": "hi", "tools": [TOOL], **fields})
    made = ResponseEvents(body, "r", HermesToolParser)
    found: list[Event] = []
    pieces = [written[start : start + size] for start in range(0, len(written), size)] or [""]
    for index, piece in enumerate(pieces):
        end = reason if index == len(pieces) - 1 else None
        delta = Delta(0, 0, piece, (1,), (0,), None, end, temperature=0.6, top_p=0.9)
        found += made.add(delta)
    return found + made.end(SUMMARY)


def response(events: list[Event]) -> Response:
    return Response.model_validate(events[-1]["response"])


def kinds(events: list[Event]) -> list[str]:
    """The types of the events, a run of deltas as one."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for kind, before in zip(found, ["", *found], strict=False) if kind != before]


MESSAGE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
FUNCTION = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_message(size: int) -> None:
    """Its text comes in pieces, then whole, between the events the client waits for."""
    events = answered("Well, here it is.", size=size)
    assert kinds(events) == ["created", "in_progress", *MESSAGE, "completed"]
    pieces = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(pieces) == "Well, here it is."
    found = response(events)
    assert found.output_text == "Well, here it is."
    assert (found.id, found.status, found.incomplete_details) == ("resp_r", "completed", None)
    assert found.output[0].id == events[2]["item"]["id"]
    assert events[-2]["item"] == events[-1]["response"]["output"][0]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_have_the_names_that_the_client_has(size: int) -> None:
    """A function of a namespace is called by both; other names are as the model wrote them."""
    group = {"type": "namespace", "name": "n", "description": "d", "tools": [TOOL]}
    written = CALL.replace('"f"', '"n__f"') + CALL + OTHER
    search = {"type": "web_search"}
    events = answered(written, size=size, tools=[group, search, TOOL])
    for event in events:
        EVENTS.validate_python(event)
    found = response(events)
    calls = [item for item in found.output if item.type == "function_call"]
    assert [(call.namespace, call.name) for call in calls] == [("n", "f"), (None, "f"), (None, "g")]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("namespace") for item in added] == ["n", None, None]
    assert ["namespace" in item for item in added] == [True, False, False]
    assert [tool.type for tool in found.tools] == ["namespace", "function"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_items_come_in_the_order_of_the_text(size: int) -> None:
    """A message, calls, and a message behind them; what streams is what is whole."""
    events = answered(f"Wait. {CALL}\n{OTHER} Done.", size=size)
    assert kinds(events) == [
        *("created", "in_progress", *MESSAGE, *FUNCTION, *FUNCTION, *MESSAGE, "completed")
    ]
    output = response(events).output
    assert [item.type for item in output] == [
        *("message", "function_call", "function_call", "message")
    ]
    calls = [item for item in output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("f", {"a": "é"}),
        ("g", {}),
    ]
    assert len({call.call_id for call in calls}) == 2
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        assert own[-1]["item"] == item
        pieces = "".join(event["delta"] for event in own if "delta" in event)
        assert pieces == item.get("arguments", "") + "".join(
            part["text"] for part in item.get("content", ())
        )


@pytest.mark.parametrize("text", ["", "Well.", f"Wait. {CALL}"])
def test_the_client_reads_every_event(text: str) -> None:
    """Each by its type, numbered from 0 without a gap."""
    events = answered(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
        name, data, *_ = named_event(event).decode().split("\n")
        assert name == f"event: {event['type']}"
        assert json.loads(data.removeprefix("data: ")) == event


REASONING = [
    "output_item.added",
    "content_part.added",
    "reasoning_text.delta",
    "reasoning_text.done",
    "content_part.done",
    "output_item.done",
]


def reasoned(*deltas: tuple[str, str], reason: str = "stop") -> list[Event]:
    """The events of pieces of reasoning and text."""
    made = ResponseEvents(ResponsesBody.parse({"model": "m", "input": "hi"}), "r", HermesToolParser)
    found: list[Event] = []
    for index, (reasoning, text) in enumerate(deltas):
        end = reason if index == len(deltas) - 1 else None
        found += made.add(Delta(0, 0, text, (1,), (0,), None, end, reasoning=reasoning))
    return found + made.end(SUMMARY._replace(num_reasoning_tokens=5))


def test_reasoning_is_an_item_of_its_own() -> None:
    """Before the message, with events that the client knows."""
    events = reasoned(("Two", ""), (" and two.", "Fo"), ("", f"ur. {CALL}"))
    assert kinds(events) == [
        *("created", "in_progress", *REASONING, *MESSAGE, *FUNCTION, "completed")
    ]
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    found = response(events)
    thought, message, call = found.output
    assert (thought.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert [part.text for part in thought.content or ()] == ["Two and two."]
    assert (thought.summary, thought.status) == ([], "completed")
    assert found.output_text == "Four."
    assert found.usage is not None
    assert found.usage.output_tokens_details.reasoning_tokens == 5
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert deltas == ["Two", " and two."]


@pytest.mark.parametrize(("reason", "status"), [("length", "incomplete"), ("stop", "completed")])
def test_nothing_but_reasoning(reason: str, status: str) -> None:
    """An answer that ends in it has no message."""
    events = reasoned(("Two", ""), reason=reason)
    (thought,) = response(events).output
    assert thought.type == "reasoning"
    assert thought.status == response(events).status == status


def test_an_answer_without_text_has_an_empty_message() -> None:
    found = response(answered(""))
    assert len(found.output) == 1
    assert found.output_text == ""


@pytest.mark.parametrize(
    ("text", "reason", "status"),
    [
        ("Well, here", "length", "incomplete"),
        (CALL[:45], "length", "incomplete"),
        (CALL[:45], "stop", "completed"),
    ],
)
def test_what_is_cut_off(text: str, reason: str, status: str) -> None:
    """By ``max_output_tokens`` the response and its item are incomplete, by a stop token in its
    arguments the call alone."""
    events = answered(text, reason=reason)
    found = response(events)
    assert (events[-1]["type"], found.status) == (f"response.{status}", status)
    assert events[-2]["item"]["status"] == "incomplete"
    details = found.incomplete_details
    assert (details.reason if details else None) == (
        "max_output_tokens" if status == "incomplete" else None
    )
    assert (found.completed_at is None) == (status == "incomplete")


def test_one_call_where_there_may_not_be_several() -> None:
    """Those after the first are dropped."""
    found = response(answered(f"{CALL}\n{OTHER}", parallel_tool_calls=False))
    assert [item.type for item in found.output] == ["function_call"]
    assert not found.parallel_tool_calls


def test_a_response_says_what_was_sampled_with() -> None:
    """From its first event on, also where the request leaves it to the model."""
    events = answered("Well.")
    for event in (events[0], events[-1]):
        assert (event["response"]["temperature"], event["response"]["top_p"]) == (0.6, 0.9)


def test_a_response_says_what_was_asked_for() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    found = response(
        answered(
            "{}",
            instructions="Be brief.",
            max_output_tokens=9,
            metadata={"a": "b"},
            user="u",
            text={"format": form},
            tool_choice={"type": "function", "name": "f"},
        )
    )
    assert (found.instructions, found.max_output_tokens) == ("Be brief.", 9)
    assert (found.metadata, found.user) == ({"a": "b"}, "u")
    assert found.text is not None
    assert found.text.format is not None
    assert found.text.format.to_dict() == form
    assert [tool.to_dict()["name"] for tool in found.tools] == ["f"]
    assert not isinstance(found.tool_choice, str)
    assert found.tool_choice.to_dict() == {"type": "function", "name": "f"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    tool_choice = response(answered("", tool_choice=choice)).tool_choice
    assert not isinstance(tool_choice, str)
    assert tool_choice.to_dict() == choice
    assert response(answered("", text={"verbosity": "low"})).to_dict()["text"] == {
        "format": {"type": "text"},
        "verbosity": "low",
    }
    for text in (None, {}, {"format": None, "verbosity": "medium"}):
        form = response(answered("{}", text=text)).to_dict()["text"]["format"]
        assert form == {"type": "text"}


def test_the_usage() -> None:
    found = response(answered("Well.")).usage
    assert found is not None
    assert found.to_dict() == usage(SUMMARY)
    assert (found.input_tokens, found.output_tokens, found.total_tokens) == (7, 11, 18)
    assert found.input_tokens_details.cached_tokens == 3
    assert found.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("error", "code", "param", "reason"),
    [
        (EngineStopped("the engine stopped"), "engine_stopped", None, "server_error"),
        (RequestTimeout("too late"), "request_timeout", None, "server_error"),
        (InvalidRequest("wrong", "input"), "invalid_value", "input", "invalid_prompt"),
        (Overloaded("full"), "overloaded", None, "rate_limit_exceeded"),
    ],
)
def test_an_error_in_mid_stream(error: Any, code: str, param: str | None, reason: str) -> None:
    """Is told in every way that clients look for one, and the response that failed comes last."""
    made = ResponseEvents(ResponsesBody.parse({"model": "m", "input": "hi"}), "r", HermesToolParser)
    num_before = len(made.add(Delta(0, 0, f"{CALL} Well", (1,), (0,), None, None)))
    told, failed = made.fail(error)
    event = EVENTS.validate_python(told)
    assert event.type == "error"
    assert (event.code, event.message, event.param) == (code, error.message, param)
    assert event.sequence_number == num_before
    assert told["error"] == error_body(error)["error"]
    last = EVENTS.validate_python(failed)
    assert last.type == "response.failed"
    assert last.sequence_number == num_before + 1
    assert (last.response.id, last.response.status) == ("resp_r", "failed")
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == (reason, error.message)
    assert [item.type for item in last.response.output] == ["function_call"]
    assert (last.response.completed_at, last.response.usage) == (None, None)
    assert "error" not in failed  # by which a client would end before it has read it


def test_a_full_context_is_told_by_its_own_code() -> None:
    """As OpenAI sends it, though its library has no such code."""
    made = ResponseEvents(ResponsesBody.parse({"model": "m", "input": "hi"}), "r", None)
    *_, failed = made.fail(PromptTooLong("too long", "input"))
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"


def test_an_error_before_anything_else() -> None:
    """A response begins first, as clients read no other event before that, with what its request
    says of sampling."""
    body = ResponsesBody.parse({"model": "m", "input": "hi", "top_p": 0.5})
    events = ResponseEvents(body, "r", None).fail(EngineStopped("the engine stopped"))
    created, begun, error, failed = (EVENTS.validate_python(event) for event in events)
    assert created.type == "response.created"
    assert (created.response.temperature, created.response.top_p) == (None, 0.5)
    assert (begun.type, error.type) == ("response.in_progress", "error")
    assert failed.type == "response.failed"
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
