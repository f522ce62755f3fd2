"""A conversation in the form of the OpenAI API, converted for chat templates, for use without a
server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from hdserve.errors import InvalidRequest, Unsupported

INVALID_JSON = "INVALID_JSON"
"""The key of arguments that are no object in JSON, as Anthropic advises to wrap them."""


class ChatEnd(Enum):
    """Where the text of a conversation ends."""

    BEFORE_ANSWER = auto()
    """Where the assistant is to speak: the text ends with the beginning of its message."""

    IN_LAST_MESSAGE = auto()
    """Directly after the content of the last message, which is to be continued."""

    AFTER_LAST_MESSAGE = auto()
    """After the end of the last message, before any other begins."""

    @classmethod
    def of(cls, adds_generation_prompt: bool | None, continues_final_message: bool) -> ChatEnd:
        """Return the end that the options of transformers and vLLM mean.

        Args:
            adds_generation_prompt: ``None`` means whatever fits the other one.

        Raises:
            InvalidRequest: both are set.
        """
        if continues_final_message and adds_generation_prompt:
            name = "continue_final_message"
            raise InvalidRequest(f"{name} cannot go with add_generation_prompt: true", name)
        if continues_final_message:
            return cls.IN_LAST_MESSAGE
        return cls.AFTER_LAST_MESSAGE if adds_generation_prompt is False else cls.BEFORE_ANSWER


def check_goes_on(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that the last message has a text that can be continued.

    Raises:
        InvalidRequest: it has none, or has calls after it, which would be left out.
    """
    last = messages[-1] if messages else {}
    if last.get("tool_calls"):
        raise InvalidRequest("a message that calls tools cannot be continued", "messages")
    if not str(last.get("content") or "").strip():
        raise InvalidRequest("the last message has no text to continue", "messages")


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with contents as texts, arguments of calls as objects, and without empty
    fields, so that a prompt is the same as a server would make.

    Raises:
        Unsupported: a part of a content is not text.
        InvalidRequest: a content, or an entry of ``tool_calls``, has another form, or a content is
            missing in a role that requires one, or a role is.
    """
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None}
    if not isinstance(found.get("role"), str):
        raise InvalidRequest("a message needs a role, such as 'user' or 'assistant'", "messages")
    if "content" not in found and found["role"] != "assistant":
        raise InvalidRequest(f"a message of role {found['role']!r} needs content", "messages")
    texts = (_text(found.get("content", "")), _text(found.pop("refusal", "")))
    found["content"] = "\n".join(filter(None, texts))
    reasoning = found.pop("reasoning", "")  # the name in newer versions of vLLM
    if reasoning:
        found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = _calls(calls)
    return found


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    is_list = isinstance(content, Sequence)
    if not is_list or not all(isinstance(part, (str, Mapping)) for part in content):
        raise InvalidRequest("a content is a text or a list of parts", "messages")
    return "\n".join(map(_text_of_part, content))


def _text_of_part(part: str | Mapping[str, Any]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        reason = f"content parts of type {str(kind)[:50]!r} are not supported"
        raise Unsupported(reason, "messages")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest(f"the text of a part of type {kind!r} must be a string", "messages")
    return text


def _calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or not all(map(_is_call, calls)):
        reason = "tool_calls is a list of objects with a function, which has name and arguments"
        raise InvalidRequest(reason, "messages")
    return [_call(call) for call in calls]


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its fields in one order, as templates may show them, and no others."""
    fields = {name: call[name] for name in ("id", "type") if call.get(name) is not None}
    return {**fields, "function": _function(call["function"])}


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was called with its arguments as an object, or as the text they are if the model
    was cut off in them."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {"name": function["name"], "arguments": arguments}
