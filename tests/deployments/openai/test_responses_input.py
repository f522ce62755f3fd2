"""The items of a request of the Responses API are the messages they should be."""

from __future__ import annotations

from time import thread_time
from typing import Any, get_args

import pytest
from openai.types.responses import EasyInputMessage, ResponseFunctionToolCall, ResponseInputItem

from deployments.openai.responses_input import LEFT_OUT_ITEMS
from deployments.openai.responses_protocol import ResponsesBody
from hdserve.errors import InvalidRequest, Unsupported
from tests.deployments.bodies import response_request as request

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def test_items_of_the_openai_library_are_read() -> None:
    """With all the fields that it knows, most of which are ``null``, also the type."""
    said = EasyInputMessage(role="user", content="hi").model_dump()
    call = ResponseFunctionToolCall(**CALL).model_dump()
    assert said["type"] is None
    body = ResponsesBody.parse({"model": "m", "input": [said, call]})
    assert not body.ignored
    user, assistant = body.to_chat().to_generation("r").messages
    assert user == {"role": "user", "content": "hi"}
    assert [found["id"] for found in assistant["tool_calls"]] == ["c1"]
    for kind in ("", "frobs"):
        with pytest.raises(Unsupported, match=rf"^items of type '{kind}' are not supported$"):
            request(input=[{**said, "type": kind}])
    with pytest.raises(InvalidRequest, match=r"^input\.0\.type: 'message' is expected$"):
        request(input=[{**said, "type": 5}])


def test_what_another_server_did_is_left_out() -> None:
    """Conversations that began there go on: what came of it is in the message behind it."""
    user, said = ({"role": role, "content": role} for role in ("user", "assistant"))
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"q": 1}}
    items = [user, search, said, search, {"type": "mcp_call", "id": "1", "output": "x"}, user]
    body = ResponsesBody.parse({"model": "m", "input": items})
    assert body.ignored == ("input.mcp_call", "input.web_search_call")
    assert [str(error) for error in body.left_out.values()] == [
        "items of type 'web_search_call' are not supported",
        "items of type 'mcp_call' are not supported",
    ]
    assert request(input=items).messages == request(input=[user, said, user]).messages


def test_every_documented_item_is_read_or_left_out_or_refused() -> None:
    """By all types that the client's library has for one: what a client's own tools gave, which
    nothing else says, is never left out."""
    (union, *_) = get_args(ResponseInputItem)
    annotations = [item.__annotations__["type"] for item in get_args(union)]
    kinds = {kind for found in annotations for kind in literals(found)}
    assert len(kinds) > 25
    calls = {"function_call", "custom_tool_call"}
    read = {"message", "reasoning", *calls, *(f"{kind}_output" for kind in calls)}
    assert kinds > LEFT_OUT_ITEMS | read
    for kind in kinds - LEFT_OUT_ITEMS - read - {"item_reference"}:
        with pytest.raises(Unsupported, match=rf"^items of type '{kind}' are not supported$"):
            request(input=[{"type": kind}])


def literals(annotation: Any) -> list[str]:
    """The texts of an annotation, optional or not."""
    found = get_args(annotation)
    return [part for part in found if isinstance(part, str)] + [
        text for part in found for text in literals(part)
    ]


def test_a_reference_to_an_item_says_what_to_send() -> None:
    """Clients send it in the second turn, as they take for granted that answers are stored."""
    with pytest.raises(Unsupported, match=r"send the item itself.*store: false$") as caught:
        request(input=[{"type": "item_reference", "id": "msg_1"}])
    assert caught.value.param == "input"


def test_items_are_messages() -> None:
    """Parts are lines of one text; calls belong to the message of the assistant before them."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        CALL,
        CALL | {"call_id": "c2", "id": "fc_2", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "43"}],
        },
        CALL | {"call_id": "c3"},
    ]
    found = request(input=items).messages
    assert [(message["role"], message["content"]) for message in found] == [
        ("developer", "Be brief."),
        ("user", "a\nb"),
        ("assistant", "Well."),
        ("tool", "42"),
        ("tool", "43"),
        ("assistant", ""),
    ]
    assert [call["id"] for call in found[2]["tool_calls"]] == ["c1", "c2"]
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [message.get("tool_call_id") for message in found[3:]] == ["c1", "c2", None]
    assert [call["id"] for call in found[5]["tool_calls"]] == ["c3"]


def thought(text: str) -> dict[str, Any]:
    """An item of what the model thought."""
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts}


def test_what_is_said_behind_a_call_is_in_its_message() -> None:
    """Or thought, so that results follow what called, and behind them another message begins."""

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    again, other = CALL | {"call_id": "c2"}, result | {"call_id": "c2", "output": "43"}
    for items, contents, thoughts in (
        ([CALL, said("a"), result], ["a", "42"], []),
        (
            [said("a"), CALL, said("b"), CALL | {"call_id": "c2"}, said("c"), result],
            ["a\nb\nc", "42"],
            [],
        ),
        ([CALL, said(""), result, said("b")], ["", "42", "b"], []),
        ([said("a"), said("b"), CALL, result], ["a", "b", "42"], []),
        ([thought("x"), said("a"), thought("y"), CALL, result], ["a", "42"], ["x\ny"]),
        ([said("a"), thought("y"), CALL, result], ["a", "42"], ["y"]),
        ([thought("x"), CALL, thought("y"), again, result, other], ["", "42", "43"], ["x\ny"]),
        ([CALL, thought("x"), said("a"), again, result, other], ["a", "42", "43"], ["x"]),
        ([CALL, thought("x"), thought("y"), result, said("b")], ["", "42", "b"], ["x\ny"]),
        ([CALL, thought("x"), said("a"), thought("y"), result], ["a", "42"], ["x\ny"]),
        (
            [thought("x"), CALL, result, thought("y"), again, other],
            ["", "42", "", "43"],
            ["x", "y"],
        ),
        ([CALL, result, thought("x"), said("a")], ["", "42", "a"], ["x"]),
    ):
        found = request(input=[{"role": "user", "content": "hi"}, *items]).messages[1:]
        assert [message["content"] for message in found] == contents
        assert [m["reasoning_content"] for m in found if "reasoning_content" in m] == thoughts
        calling = found[[message["role"] for message in found].index("tool") - 1]
        assert calling["tool_calls"][0]["id"] == "c1"


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"role": "assistant", "content": "x" * 2000}, "content"),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 2000}]},
            "reasoning_content",
        ),
    ],
)
def test_many_texts_of_a_message_are_copied_once(item: dict[str, Any], name: str) -> None:
    """Not each time that another one follows."""
    first = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}
    body = ResponsesBody.parse({"model": "m", "input": [first, CALL, *[item] * 2000]})
    before = thread_time()
    (*_, last) = body._messages()
    assert thread_time() - before < 0.15
    assert len(last[name]) >= 4_000_000


def test_reasoning_belongs_to_what_follows() -> None:
    """A message or calls of the assistant; what only another server can read is left out."""
    user, said = ({"role": role, "content": role} for role in ("user", "assistant"))
    items = [user, thought("a"), said, CALL, user, thought("b"), CALL, thought("c"), user]
    found = request(input=items).messages
    assert [
        (message["content"], message.get("reasoning_content"), len(message.get("tool_calls", ())))
        for message in found
    ] == [
        ("user", None, 0),
        ("assistant", "a", 1),
        ("user", None, 0),
        ("", "b", 1),
        ("", "c", 0),
        ("user", None, 0),
    ]
    parts = [{"type": "summary_text", "text": "in short"}]
    short = {"type": "reasoning", "summary": parts, "encrypted_content": ""}
    nothing = {"type": "reasoning", "summary": []}
    (_, answer, _) = request(input=[user, thought("a"), short, nothing, said, user]).messages
    assert (answer["content"], answer["reasoning_content"]) == ("assistant", "a\nin short")
    assert request(input=[nothing, user]).messages == request(input=[user]).messages
    for encrypted, same in ((nothing, nothing), (short, {**short, "encrypted_content": None})):
        items = [user, {**encrypted, "encrypted_content": "x"}, said, user]
        assert request(input=items).messages == request(input=[user, same, said, user]).messages
        body = ResponsesBody.parse({"model": "m", "input": items})
        assert body.ignored == ("input.encrypted_content",)
        (error,) = body.left_out.values()
        assert (error.message, error.param) == ("encrypted reasoning is not supported", "input")


def test_calls_of_tools_that_take_a_text() -> None:
    """Are those of functions with one parameter, as a model that knows functions alone has them."""
    user = {"role": "user", "content": "hi"}
    call = {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c1"}
    items = [
        user,
        {**call, "name": "apply_patch", "input": "*** Begin Patch\n"},
        {"type": "custom_tool_call_output", "id": "o1", "call_id": "c1", "output": "Done."},
        {**call, "call_id": "c2", "namespace": "ns", "name": "f", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": ""},
        user,
    ]
    body = ResponsesBody.parse({"model": "m", "input": items})
    assert body.ignored == ()
    functions = {
        "c1": ("apply_patch", {"input": "*** Begin Patch\n"}),
        "c2": ("ns__f", {"input": ""}),
    }
    found = request(input=items).messages
    assert [message["role"] for message in found] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "user",
    ]
    for message in found[1:4:2]:
        (called,) = message["tool_calls"]
        name, arguments = functions[called["id"]]
        assert called["function"] == {"name": name, "arguments": arguments}
    assert [(found[place]["tool_call_id"], found[place]["content"]) for place in (2, 4)] == [
        ("c1", "Done."),
        ("c2", ""),
    ]
    with pytest.raises(InvalidRequest, match=r"^input\.0\.input: is missing$"):
        request(input=[{**call, "name": "f"}])


CALLS = [CALL, CALL | {"call_id": "c2", "name": "ns__g"}, CALL | {"call_id": "c3", "name": "g"}]
OUTPUT = {"type": "function_call_output", "call_id": None, "output": "42"}


@pytest.mark.parametrize(
    ("items", "call_ids"),
    [
        ([CALL, OUTPUT], ["c1"]),
        ([CALL, {"type": "function_call_output", "output": "42"}], ["c1"]),
        ([*CALLS, OUTPUT | {"name": "g"}, OUTPUT | {"name": "f", "namespace": None}], ["c3", "c1"]),
        ([*CALLS, OUTPUT | {"name": "g", "namespace": "ns"}], ["c2"]),
        ([*CALLS[:2], OUTPUT | {"call_id": "c1"}, OUTPUT], ["c1", "c2"]),
        ([CALLS[0], OUTPUT, CALLS[1], OUTPUT], ["c1", "c2"]),
        ([*CALLS, OUTPUT | {"call_id": "c9", "name": "f"}], ["c9"]),
    ],
)
def test_an_output_without_an_id_is_that_of_the_one_open_call(
    items: list[Any], call_ids: list[str]
) -> None:
    """Of its name, if it has one; an id is as it is."""
    found = request(input=items).messages
    assert [m["tool_call_id"] for m in found if m["role"] == "tool"] == call_ids
    assert ResponsesBody.parse({"model": "m", "input": items}).ignored == ()


@pytest.mark.parametrize(
    ("items", "number"),
    [
        ([OUTPUT], 0),
        ([OUTPUT, CALL], 0),
        ([CALL, OUTPUT, OUTPUT], 0),
        ([CALL, OUTPUT | {"name": "g"}], 0),
        ([*CALLS, OUTPUT], 3),
        ([CALL, CALL | {"call_id": "c2"}, OUTPUT | {"name": "f"}], 2),
    ],
)
def test_an_output_without_an_id_that_may_be_anyones_is_refused(
    items: list[Any], number: int
) -> None:
    """A guess might give the model the result of another call."""
    with pytest.raises(InvalidRequest, match=rf"here there are {number} such calls$") as caught:
        request(input=items)
    assert caught.value.param == "input"
