"""A text stands for what a tool returned that is none, and it is named."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.openai.left_out import MEDIA
from deployments.openai.protocol import ChatBody, TokenizeBody
from deployments.openai.responses_protocol import ResponsesBody
from hdserve.errors import Unsupported
from tests.deployments.bodies import CALL, USER

IMAGE = {"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:x", "detail": "auto"}
STAND_IN = "[image left out: this model reads text only]"
SHOWN = {"role": "user", "content": [{"type": "text", "text": "Attached:"}, IMAGE]}
SAID = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
CALLS = {
    "function_call": {"name": "f", "arguments": "{}"},
    "custom_tool_call": {"name": "f", "input": "x"},
}


def returning(content: Any) -> list[dict[str, Any]]:
    result = {"role": "tool", "tool_call_id": "1", "content": content}
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result, *USER]


@pytest.mark.parametrize("kind", [ChatBody, TokenizeBody])
def test_what_a_tool_of_a_chat_returned(kind: type[ChatBody | TokenizeBody]) -> None:
    """An image stays in the conversation, whose every later turn would be refused."""
    messages = returning([{"type": "text", "text": "a"}, IMAGE, IMAGE, "b"])
    body = kind.parse({"model": "m", "messages": messages})
    found = body.to_generation("r") if isinstance(body, ChatBody) else body.to_generation()
    assert found.messages[2]["content"] == f"a\n{STAND_IN}\n{STAND_IN}\nb"
    assert body.ignored == ("messages.content.image_url",)
    (error,) = body.left_out.values()
    assert error.message == "content parts of type 'image_url' are not supported"
    assert error.param == "messages"
    assert kind.parse({"model": "m", "messages": returning("a")}).ignored == ()


@pytest.mark.parametrize("kind", sorted(MEDIA))
def test_all_that_is_no_text(kind: str) -> None:
    """By its type, whatever its fields are; other types are refused there as elsewhere."""
    body = ChatBody.parse({"model": "m", "messages": returning([{"type": kind, kind: {"a": 1}}])})
    (*_, result, _) = body.to_generation("r").messages
    assert result["content"] == f"[{MEDIA[kind]} left out: this model reads text only]"
    assert body.ignored == (f"messages.content.{kind}",)
    for other in (f"{kind}s", [kind]):
        body = ChatBody.parse({"model": "m", "messages": returning([{"type": other}])})
        with pytest.raises(Unsupported, match=r"are not supported$"):
            body.to_generation("r")


@pytest.mark.parametrize("kind", [ChatBody, TokenizeBody])
def test_what_the_user_shows_behind_a_result(kind: type[ChatBody | TokenizeBody]) -> None:
    """As agents do whose results are texts alone: in each later turn it is there as well."""
    earlier = returning("a")[:-1]
    for messages, contents in (
        ([SHOWN], ["a", f"Attached:\n{STAND_IN}"]),
        ([*USER, SHOWN], ["a", "hi", f"Attached:\n{STAND_IN}"]),
        ([SYSTEM, SHOWN], ["a", "s", f"Attached:\n{STAND_IN}"]),
        ([SHOWN, SAID, *USER], ["a", f"Attached:\n{STAND_IN}", "b", "hi"]),
    ):
        body = kind.parse({"model": "m", "messages": [*earlier, *messages]})
        found = body.to_generation("r") if isinstance(body, ChatBody) else body.to_generation()
        assert [message["content"] for message in found.messages[2:]] == contents
        assert body.ignored == ("messages.content.image_url",)
        (error,) = body.left_out.values()
        assert error.message == "content parts of type 'image_url' are not supported"
        assert error.param == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [*returning("a")[:-1], SAID, SHOWN],
        [SHOWN, *returning("a")],
        [*returning("a"), {**SHOWN, "role": "system"}],
        [*returning("a"), {**SHOWN, "role": "assistant"}],
    ],
)
def test_results_of_another_turn_are_none(messages: list[dict[str, Any]]) -> None:
    """Nor does a result let others than the user show images."""
    body = ChatBody.parse({"model": "m", "messages": messages})
    with pytest.raises(Unsupported, match=r"^content parts of type 'image_url' are not supported$"):
        body.to_generation("r")
    assert body.ignored == ()


@pytest.mark.parametrize("role", ["assistant", "developer", "system", "user"])
def test_others_show_no_images(role: str) -> None:
    """An answer that takes no notice of one would be another one."""
    body = ChatBody.parse({"model": "m", "messages": [{"role": role, "content": [IMAGE]}]})
    with pytest.raises(Unsupported, match=r"^content parts of type 'image_url' are not supported$"):
        body.to_generation("r")


@pytest.mark.parametrize("call", CALLS)
def test_what_a_tool_of_a_response_returned(call: str) -> None:
    text = {"type": "input_text", "text": "a"}
    file = {"type": "input_file", "filename": "x.pdf", "file_data": "x"}
    items = [
        *USER,
        {"type": call, "call_id": "1", **CALLS[call]},
        {"type": f"{call}_output", "call_id": "1", "output": [text, INPUT_IMAGE, file]},
    ]
    body = ResponsesBody.parse({"model": "m", "input": items})
    (*_, result) = body.to_chat().to_generation("r").messages
    stand_ins = f"{STAND_IN}\n[file left out: this model reads text only]"
    assert result == {"role": "tool", "tool_call_id": "1", "content": f"a\n{stand_ins}"}
    assert body.ignored == ("input.output.input_file", "input.output.input_image")
    assert [(error.message, error.param) for error in body.left_out.values()] == [
        ("content parts of type 'input_image' are not supported", "input"),
        ("content parts of type 'input_file' are not supported", "input"),
    ]


@pytest.mark.parametrize("call", CALLS)
def test_what_the_user_shows_behind_an_output(call: str) -> None:
    output = {"type": f"{call}_output", "call_id": "1", "output": "a"}
    text = {"type": "input_text", "text": "Attached:"}
    shown = {"role": "user", "content": [text, INPUT_IMAGE]}
    earlier = [*USER, {"type": call, "call_id": "1", **CALLS[call]}, output]
    search = {"type": "web_search_call", "id": "2", "status": "completed"}
    for items, name in (([shown], ()), ([search, shown], ("input.web_search_call",))):
        body = ResponsesBody.parse({"model": "m", "input": [*earlier, *items, SAID, *USER]})
        (*_, last, _, _) = body.to_chat().to_generation("r").messages
        assert last == {"role": "user", "content": f"Attached:\n{STAND_IN}"}
        assert body.ignored == ("input.content.input_image", *name)
        error = body.left_out["input.content.input_image"]
        assert error.message == "content parts of type 'input_image' are not supported"
        assert error.param == "input"
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]}
    for items in (
        [shown],
        [shown, *earlier],
        [*earlier, SAID, shown],
        [*earlier, thought, shown],
        [*earlier, {**shown, "role": "developer"}],
    ):
        body = ResponsesBody.parse({"model": "m", "input": items})
        with pytest.raises(Unsupported, match=r"^content parts of type 'input_image' are not"):
            body.to_chat()
        assert body.ignored == ()
