"""The messages of a conversation, as clients send them and as chat templates take them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from deployments.body import Body
from deployments.json_body import parse_json
from hdserve.errors import InvalidRequest, Unsupported

MAX_MESSAGES = 2048
"""Of a conversation, as many as the OpenAI API takes."""

_UNSUPPORTED_FIELDS = ("audio", "function_call")
"""What chat templates do not show, so that it would be missing from the prompt without a word."""

_REFUSAL = "refusal"
"""A part of what another server's assistant wrote; to a template it is text."""

Parts = Annotated[tuple[Mapping[str, Any], ...], Field(fail_fast=True)]


class Message(Body):
    """One message of a conversation."""

    role: str = Field(max_length=64)
    content: str | Parts | None = None
    reasoning_content: str | None = None
    """What the assistant thought; templates that do not show it leave it out."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: the content as one string, arguments of calls as objects, or
        as the string they are where the model was cut off in them.

        Raises:
            Unsupported: a part of the message is neither text nor a call of a tool.
            InvalidRequest: a call has no function or no arguments.
        """
        for name in _UNSUPPORTED_FIELDS:
            if (self.model_extra or {}).get(name):
                raise Unsupported(f"{name} of a message is not supported", "messages")
        fields = {**self.model_dump(exclude={"content"}), "content": joined(self.content)}
        if self.reasoning_content is None:
            del fields["reasoning_content"]
        if fields.get("tool_calls"):
            fields["tool_calls"] = _with_parsed_arguments(fields["tool_calls"])
        return fields


Messages = Annotated[tuple[Message, ...], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def joined(
    content: str | Iterable[Mapping[str, Any]] | None,
    param: str = "messages",
    part_types: Collection[str] = ("text",),
) -> str:
    """The text of a content.

    Args:
        param: the parameter the client gave it in.
        part_types: those of the parts that are text.

    Raises:
        Unsupported: a part of it is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_text(part, param, part_types) for part in content)


def _with_parsed_arguments(calls: Any) -> list[dict[str, Any]]:
    try:
        return [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": _arguments(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    except (TypeError, KeyError) as error:
        reason = "tool_calls must hold functions with a name and arguments, a text or an object"
        raise InvalidRequest(reason, "messages") from error


def _arguments(data: Any) -> dict[str, Any] | str:
    """An object, if the text is one; some clients write no arguments as no text."""
    if isinstance(data, dict):
        return data
    if not isinstance(data, str):
        raise TypeError("neither a text nor an object")
    try:
        value = parse_json((data or "{}").encode())
    except (InvalidRequest, UnicodeEncodeError):
        return data
    return value if isinstance(value, dict) else data


def _text(part: Mapping[str, Any], param: str, part_types: Collection[str]) -> str:
    kind = part.get("type")
    text = part.get(kind if kind == _REFUSAL else "text")
    if kind not in (*part_types, _REFUSAL) or not isinstance(text, str):
        reason = f"content parts of type {str(kind)[:50]!r} are not supported"
        raise Unsupported(reason, param)
    return text
