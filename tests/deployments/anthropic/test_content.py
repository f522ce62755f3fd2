"""Conversations go on without what the model cannot be told of them, which is named."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types.beta import BetaContentBlock, BetaSystemMessageParam
from anthropic.types.tool_result_block_param import Content

from deployments.anthropic.content import LEFT_OUT_BLOCKS, InputMessage
from deployments.anthropic.protocol import CountTokensBody, MessagesBody
from hdserve.errors import InvalidRequest, Unsupported

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "b"}
REMINDER = {"role": "system", "content": "s", "clear_at": "next_user_message"}
EFFORT = {"role": "system", "output_config": {"effort": "low"}}
CALLING = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "x"},
    "cache_control": {"type": "ephemeral"},
}
DOCUMENT = {"type": "document", "title": "t", "source": {"type": "url", "url": "x"}}
TEXT = {"type": "text", "text": "a"}
TAB = {"tab_id": "1", "title": "t", "url": "https://t.org", "active": True}
CACHED = {"cache_control": {"type": "ephemeral"}}
FOUND = {"type": "search_result", "title": "t", "source": "s", "content": [TEXT, TEXT], **CACHED}
RETURNED = {
    "text": (TEXT, "a"),
    "search_result": (FOUND, "t\ns\na\na"),
    "tool_reference": ({"type": "tool_reference", "tool_name": "f", **CACHED}, "f"),
    "image": (IMAGE, "[image left out: this model reads text only]"),
    "document": (DOCUMENT, "[document left out: this model reads text only]"),
    "browser_state": (
        {"type": "browser_state", "tabs": [TAB], **CACHED},
        "[browser state left out: this model reads text only]",
    ),
}
"""What a tool may return, by its type, and what the model is told of it."""


def body(*messages: dict[str, Any]) -> MessagesBody:
    return MessagesBody.parse({"model": "m", "max_tokens": 9, "messages": messages})


def told(*messages: dict[str, Any]) -> tuple[Any, ...]:
    """What the template is given of a conversation."""
    return tuple(body(*messages).to_chat().to_generation("r").messages)


def returning(content: Any) -> list[dict[str, Any]]:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    return [
        USER,
        {"role": "assistant", "content": [CALLING]},
        {"role": "user", "content": [result]},
    ]


def test_a_text_stands_for_an_image_that_a_tool_returned() -> None:
    """It stays in the conversation, whose every later turn would be refused."""
    messages = returning([TEXT, IMAGE, DOCUMENT, TEXT])
    result = told(*messages)[-1]
    assert result == {
        "role": "tool",
        "tool_call_id": "t1",
        "content": "a\n[image left out: this model reads text only]\n"
        "[document left out: this model reads text only]\na",
    }
    found = body(*messages)
    assert found.ignored == ("messages.content.content.document", "messages.content.content.image")
    for kind, error in zip(("image", "document"), found.left_out.values(), strict=True):
        assert error.message == f"content blocks of type '{kind}' are not supported"
        assert error.param == "messages"
    assert body(*returning([TEXT])).ignored == body(*returning("a")).ignored == ()


def test_every_block_of_a_result_is_known() -> None:
    """By all types that the client's library has for one."""
    kinds = {kind for each in get_args(Content) for kind in get_args(get_type_hints(each)["type"])}
    assert kinds == RETURNED.keys()


@pytest.mark.parametrize("kind", RETURNED)
def test_what_the_model_is_told_of_a_result(kind: str) -> None:
    """All of it, or that it is left out, which is named."""
    block, text = RETURNED[kind]
    messages = returning([TEXT, block])
    assert told(*messages)[-1]["content"] == f"a\n{text}"
    is_left_out = kind in {"image", "document", "browser_state"}
    assert body(*messages).ignored == (f"messages.content.content.{kind}",) * is_left_out


def test_what_a_search_found_is_said_as_text() -> None:
    """Answers do not cite it, which is named where citations are asked for."""
    for enabled, names in ((False, ()), (True, ("messages.content.citations",))):
        block = {**FOUND, "citations": {"enabled": enabled}}
        message = {"role": "user", "content": [TEXT, block, TEXT]}
        assert told(message) == ({"role": "user", "content": "a\nt\ns\na\na\na"},)
        assert body(message).ignored == names


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        ([{"type": "frobs"}], Unsupported, r"^content blocks of type 'frobs' are not supported$"),
        ([{"type": 5}], InvalidRequest, r"^messages\.2\.content\.0\.content\.0\.type: 'text' is"),
        ([TEXT, "a"], InvalidRequest, r"^messages\.2\.content\.0\.content\.1: an object is"),
        ([{"type": "text"}], InvalidRequest, r"content\.0\.text: is missing$"),
        ([{"type": "tool_reference"}], InvalidRequest, r"content\.0\.tool_name: is missing$"),
        ([{**FOUND, "content": [IMAGE]}], Unsupported, r"^content blocks of type 'image' are not"),
    ],
)
def test_what_a_tool_cannot_return(content: Any, kind: type[InvalidRequest], reason: str) -> None:
    with pytest.raises(kind, match=reason) as caught:
        body(*returning(content))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("kind", ["image", "document", "browser_state"])
def test_a_text_stands_for_what_is_shown_beside_a_result(kind: str) -> None:
    """As agents show the files that a tool has read: in the same message, or in a later one of the
    same turn."""
    block, text = RETURNED[kind]
    *earlier, result = returning("a")
    beside = {"role": "user", "content": [*result["content"], block]}
    system, behind = {"role": "system", "content": "s"}, {"role": "user", "content": [block, TEXT]}
    for messages, contents in (
        ([beside], ["a", text]),
        ([result, USER, behind], ["a", f"hi\n{text}\na"]),
        ([result, system, behind], ["a", "s", f"{text}\na"]),
        ([beside, {"role": "assistant", "content": "b"}, USER], ["a", text, "b", "hi"]),
    ):
        conversation = (*earlier, *messages)
        assert [message["content"] for message in told(*conversation)[2:]] == contents
        found = body(*conversation)
        assert found.ignored == (f"messages.content.{kind}",)
        (error,) = found.left_out.values()
        assert error.message == f"content blocks of type '{kind}' are not supported"
        assert error.param == "messages"


@pytest.mark.parametrize("block", [IMAGE, DOCUMENT])
def test_what_a_user_shows_is_refused(block: dict[str, Any]) -> None:
    """An answer that takes no notice of it would be another one.  Results of an earlier turn do not
    change that, nor do those of the same turn for what only a user can show."""
    shown = {"role": "user", "content": [TEXT, block]}
    said = {"role": "assistant", "content": "b"}
    for messages in (
        [shown],
        [*returning("a"), said, shown],
        [shown, *returning("a")],
        [*returning("a"), {**shown, "role": "system"}],
        [*returning("a"), {**shown, "role": "assistant"}, USER],
    ):
        with pytest.raises(Unsupported, match=f"type '{block['type']}' are not supported$"):
            body(*messages)


@pytest.mark.parametrize("kind", sorted(LEFT_OUT_BLOCKS))
def test_what_another_server_did_is_left_out(kind: str) -> None:
    """Conversations that began there go on: what came of it is in the texts behind it."""
    block = {"type": kind, "id": "s1", "tool_use_id": "s1", "content": [{"type": "x"}], "input": {}}
    for blocks in ([block, TEXT], [TEXT, block], [block, TEXT, block]):
        messages = [USER, {"role": "assistant", "content": blocks}, USER]
        assert [message["content"] for message in told(*messages)] == ["hi", "a", "hi"]
        found = body(*messages)
        assert found.ignored == (f"messages.content.{kind}",)
        (error,) = found.left_out.values()
        assert error.message == f"content blocks of type '{kind}' are not supported"
        assert error.param == "messages"
    assert told(USER, {"role": "assistant", "content": [block]}) == (USER,)


def test_every_block_of_an_answer_is_known() -> None:
    """By all types that the client's library has for one; what holds the conversation itself, or a
    file of it, is refused."""
    (union, *_) = get_args(BetaContentBlock)
    kinds = {
        kind
        for block in get_args(union)
        for kind in get_args(block.model_fields["type"].annotation)
    }
    read = {"text", "thinking", "redacted_thinking", "tool_use"}
    assert kinds == read | LEFT_OUT_BLOCKS | {"compaction", "container_upload"}


def test_every_field_of_a_message_of_the_system_is_known() -> None:
    assert InputMessage.model_fields.keys() == get_type_hints(BetaSystemMessageParam).keys()


@pytest.mark.parametrize("kind", [MessagesBody, CountTokensBody])
@pytest.mark.parametrize(
    ("messages", "contents"),
    [
        ([USER, REMINDER], ["hi", "s"]),
        ([USER, REMINDER, SAID], ["hi", "s", "b"]),
        ([REMINDER], ["s"]),
        ([USER, REMINDER, SAID, USER, REMINDER], ["hi", "b", "hi", "s"]),
        ([USER, REMINDER, USER], ["hi\nhi"]),
        ([*returning("a")[:1], REMINDER, *returning("a")[1:]], ["hi", "", "a"]),
        ([USER, {**REMINDER, "clear_at": "never"}, SAID, USER], ["hi", "s", "b", "hi"]),
        ([USER, {**REMINDER, "clear_at": None}, SAID, USER], ["hi", "s", "b", "hi"]),
    ],
)
def test_what_the_system_says_for_one_turn(
    messages: list[dict[str, Any]], contents: list[str], kind: type[CountTokensBody]
) -> None:
    """Is not shown once the user has said more, be it the result of a tool."""
    found = kind.parse({"model": "m", "max_tokens": 9, "messages": messages})
    shown = found.to_chat().to_generation("r").messages
    assert [message.get("content") for message in shown] == contents
    assert "messages.clear_at" not in found.ignored


def test_the_effort_of_one_turn_is_named() -> None:
    """No template is told of it; a message that says nothing else is none."""
    for message in (EFFORT, {**EFFORT, "content": None}):
        assert told(USER, message, SAID, USER) == told(USER, SAID, USER)
        assert body(USER, message).ignored == ("messages.output_config",)
    message = {**EFFORT, "content": "s"}
    assert [each["content"] for each in told(USER, message)] == ["hi", "s"]
    assert body(USER, message).ignored == ("messages.output_config",)
    assert body(USER, {**message, "output_config": {}}).ignored == ()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user"}, r"^a message of role 'user' needs content$"),
        ({"role": "system"}, r"^a message of role 'system' needs content$"),
        ({"role": "system", "output_config": {}}, r"^a message of role 'system' needs content$"),
        ({**EFFORT, "role": "user"}, r"^a message of role 'user' needs content$"),
        ({**USER, "output_config": {"effort": "low"}}, r"^clear_at and output_config are of"),
        ({**USER, "clear_at": "never"}, r"^clear_at and output_config are of messages of role"),
        ({**REMINDER, "clear_at": "soon"}, r"^messages\.0\.clear_at: "),
        (EFFORT, r"^no message has content$"),
    ],
)
def test_what_only_the_system_can_say(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        body(message).to_chat()
    assert caught.value.param == "messages"
