"""The ``input`` of the OpenAI Responses API: its items, and the messages of a chat they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from deployments.openai.body import Body
from deployments.openai.kinds import named_kind, only_kinds
from deployments.openai.left_out import LeftOut
from deployments.openai.messages import MAX_MESSAGES, Parts, have_stand_ins, joined, media_of
from deployments.openai.responses_tools import full_name
from hdserve.errors import InvalidRequest, Unsupported

_READ_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)

LEFT_OUT_ITEMS = frozenset(
    {
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    }
)
"""The types of the items that say what a server did itself, in conversations that began there; what
came of it is in the messages behind them."""

_TEXT_PARTS = ("input_text", "output_text")
_REASONING_PARTS = ("reasoning_text", "summary_text")


class InputMessage(Body):
    """A message of the conversation."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"id", "phase", "status"})

    type: Literal["message"] | None = None
    role: Literal["assistant", "developer", "system", "user"]
    content: str | Parts


class InputReasoning(Body):
    """What the model thought before the message or the call that follows."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"id", "status"})
    role: ClassVar[str] = "assistant"

    type: Literal["reasoning"]
    summary: Parts = ()
    content: Parts | None = None
    encrypted_content: str | None = None

    def text(self) -> str:
        """Return what it says in full, else its summary; what is encrypted only the server can read
        that wrote it."""
        return joined(self.content or self.summary, "input", _REASONING_PARTS)


class _Call(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset({"caller", "id", "status"})
    role: ClassVar[str] = "assistant"

    call_id: str
    name: str
    namespace: str | None = None


class InputCall(_Call):
    """A call the model made earlier."""

    type: Literal["function_call"]
    arguments: str


class InputCustomCall(_Call):
    """A call of a tool that takes a text, made by the model of another server: here it is one of a
    function with one parameter, as agents offer such a tool to models that know functions alone."""

    type: Literal["custom_tool_call"]
    input: str

    @property
    def arguments(self) -> Mapping[str, str]:
        """The arguments of the function."""
        return {"input": self.input}


class InputCallOutput(Body):
    """What an earlier call of a tool returned.  Without an id it is that of the one call, of the
    name if there is one, whose output has not come."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"caller", "id", "status"})
    role: ClassVar[str] = "tool"

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    output: str | Parts


# Brackets tell forms of a value from its fields where an error is told.
def _type_of_item(item: Any) -> Any:
    kind = named_kind(item) or "message"  # which need not say what it is
    if kind in LEFT_OUT_ITEMS:
        return "[left out]"
    return f"[{kind}]" if isinstance(item, Mapping) else None


def _itself(item: Any) -> Any:
    """
    Raises:
        Unsupported: it stands for another one, which is elsewhere.
    """
    if named_kind(item) == "item_reference":
        raise Unsupported(
            "items are not stored here, so none can be referred to: send the item itself, as "
            "clients do that are told store: false",
            "input",
        )
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputReasoning, Tag("[reasoning]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputCallOutput, Tag("[function_call_output]")]
    | Annotated[InputCustomCall, Tag("[custom_tool_call]")]
    | Annotated[InputCallOutput, Tag("[custom_tool_call_output]")]
    | Annotated[LeftOut, Tag("[left out]")],
    Discriminator(_type_of_item),
    only_kinds("items", {*_READ_ITEMS, *LEFT_OUT_ITEMS}, "input"),
    BeforeValidator(_itself),
]
InputItems = Annotated[
    tuple[InputItem, ...], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
Input = str | InputItems
ReadItem = InputMessage | InputReasoning | InputCall | InputCustomCall | InputCallOutput
"""An item that is not left out."""


def media_left_out(items: Sequence[ReadItem]) -> Iterator[tuple[str, str]]:
    """Yield the names and the types of the media for which texts stand."""
    for item in compress(items, have_stand_ins(item.role for item in items)):
        name = "output" if isinstance(item, InputCallOutput) else "content"
        for kind in media_of(getattr(item, name)):
            yield f"input.{name}.{kind}", kind


def messages_of(items: Sequence[ReadItem]) -> list[Any]:
    """Return the messages of a chat: reasoning belongs to the message of the assistant behind it,
    calls to the one before them, with what was thought between, and so does what is said or thought
    behind them, since results follow the message that calls.  Only what is thought behind them last
    of all, before somebody else speaks, is a message of its own.

    Raises:
        InvalidRequest: it is not clear which call an output is that of.
        Unsupported: a part is not text.
    """
    found: list[dict[str, Any]] = []
    unanswered: dict[str, str] = {}
    shown = zip(items, have_stand_ins(item.role for item in items), strict=True)
    for item, has_stand_ins in shown:
        if _goes_with_calls(item):
            _join_last_thought(found, calls=isinstance(item, _Call))
        if isinstance(item, InputMessage):
            text = joined(item.content, "input", _TEXT_PARTS, has_stand_ins=has_stand_ins)
            if item.role == "assistant" and found and _goes_on(found[-1]):
                found[-1]["content"].append(text)
            else:
                found.append({"role": item.role, "content": [text]})
        elif isinstance(item, InputReasoning):
            thought = item.text()
            if found and _is_reasoning(found[-1]):
                found[-1]["reasoning_content"].append(thought)
            elif thought:
                found.append({"role": "assistant", "content": [], "reasoning_content": [thought]})
        elif isinstance(item, InputCallOutput):
            text = joined(item.output, "input", _TEXT_PARTS, has_stand_ins=has_stand_ins)
            call_id = _call_id(item, unanswered)
            unanswered.pop(call_id, None)
            found.append({"role": "tool", "tool_call_id": call_id, "content": [text]})
        else:
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": []})
            name = full_name(item.namespace, item.name)
            unanswered[item.call_id] = name
            function = {"name": name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
    return [_with_texts(message) for message in found]


def _call_id(item: InputCallOutput, unanswered: Mapping[str, str]) -> str:
    """Return the id of the call whose output an item is.

    Args:
        unanswered: by the ids of the calls before it whose outputs have not come, their names.

    Raises:
        InvalidRequest: it has no id, and there is not just one call that it may be the output of.
    """
    if item.call_id is not None:
        return item.call_id
    name = None if item.name is None else full_name(item.namespace, item.name)
    found = [call_id for call_id, called in unanswered.items() if name in {None, called}]
    if len(found) != 1:
        raise InvalidRequest(
            "input: an output without call_id is that of the one call before it, of its name if it "
            f"has one, that has no output yet; here there are {len(found)} such calls",
            "input",
        )
    return found[0]


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose texts are joined, once for all of them."""
    texts, thoughts = message["content"], message.get("reasoning_content")
    content = "\n".join(filter(None, texts)) if texts else None
    reasoning = {} if thoughts is None else {"reasoning_content": "\n".join(filter(None, thoughts))}
    return {**message, "content": content, **reasoning}


def _goes_with_calls(item: Body) -> bool:
    """Whether an item behind a call and a thought shows that the thought came before the result."""
    if isinstance(item, InputMessage):
        return item.role == "assistant"
    return not isinstance(item, InputReasoning)


def _join_last_thought(found: list[dict[str, Any]], *, calls: bool) -> None:
    """Move what was thought last into the message before it, if that one calls.

    Args:
        calls: whether a call follows, which is then one of any message of the assistant.
    """
    if len(found) < 2 or not _is_reasoning(found[-1]):
        return
    if found[-2].get("tool_calls") or (calls and found[-2]["role"] == "assistant"):
        thought = found.pop()["reasoning_content"]
        found[-1].setdefault("reasoning_content", []).extend(thought)


def _goes_on(message: Mapping[str, Any]) -> bool:
    """Whether what the assistant says next is in the same message; results of its calls would be
    behind it."""
    return bool(message.get("tool_calls")) or _is_reasoning(message)


def _is_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether nothing was said or called yet after it."""
    return (
        "reasoning_content" in message and not message["content"] and not message.get("tool_calls")
    )
