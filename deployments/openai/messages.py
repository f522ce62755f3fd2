"""The messages of a conversation, as clients send them and as chat templates take them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deployments.openai.body import Body, at_most
from deployments.openai.json_text import MAX_PARTS, num_parts, parse_json
from deployments.openai.kinds import unsupported
from deployments.openai.left_out import is_media, stand_in
from hdserve.errors import InvalidRequest, Unsupported

MAX_MESSAGES = 2048
"""The most messages of a conversation, as in the OpenAI API."""

MAX_CONTENT_PARTS = 2048
"""The most parts of a content."""

_REFUSAL = "refusal"
"""The type of a part in which an assistant refused, perhaps on another server; a template takes it
as text."""

_TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of the parts of a chat that are text: also those of the Responses API, as in vLLM."""


SENT_BACK = frozenset({"annotations", "id", "index", "logprobs", "parsed", "status"})
"""The fields that clients add when they send an answer back, to messages, parts and calls."""


class Part(Body):
    """A part of a content."""

    without_effect: ClassVar[frozenset[str]] = SENT_BACK | {"prompt_cache_breakpoint"}

    type: Any = None
    text: Any = None
    refusal: Any = None

    def unread_fields(self) -> dict[str, Any]:
        """Return the undocumented fields that are not empty; none of a part that is not text."""
        return {} if is_media(self.type) else super().unread_fields()


Parts = Annotated[tuple[Part, ...], Field(fail_fast=True), at_most(MAX_CONTENT_PARTS)]


def _with_joined_texts(content: Any) -> Any:
    """Return a content in which texts in a row are one part, which takes hundreds of bytes."""
    if not isinstance(content, list):
        return content
    found: list[Any] = []
    for is_text, items in groupby(content, lambda item: isinstance(item, str)):
        rows = [*items]
        found += [{"type": "text", "text": "\n".join(rows)}] if is_text else rows
    return found


PartsOrTexts = Annotated[Parts, BeforeValidator(_with_joined_texts), at_most(MAX_CONTENT_PARTS)]
"""The content of a chat's message, in which vLLM takes texts for parts."""


class CalledFunction(Body):
    """``function`` of a call."""

    without_effect: ClassVar[frozenset[str]] = SENT_BACK | {"parsed_arguments"}

    name: str
    arguments: str | Mapping[str, Any]


class ToolCall(Body):
    """A call the model made earlier."""

    without_effect: ClassVar[frozenset[str]] = SENT_BACK

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it: the arguments as an object, or as the text
        they are where the model was cut off in them."""
        arguments = _arguments(self.function.arguments)
        fields = {"id": self.id, "type": self.type}
        return {
            **{name: value for name, value in fields.items() if value is not None},
            "function": {"name": self.function.name, "arguments": arguments},
        }


class Message(Body):
    """One message of a conversation."""

    without_effect: ClassVar[frozenset[str]] = SENT_BACK

    role: Literal["assistant", "developer", "system", "tool", "user"]
    content: str | PartsOrTexts | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    """What the assistant thought; templates that do not show it leave it out."""

    reasoning: str | None = None
    """The name that newer versions of vLLM have for the same; templates may have either."""

    name: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None

    def for_template(self, *, has_stand_ins: bool = False) -> dict[str, Any]:
        """Return the message as chat templates take it: the content as one string, and without
        empty fields.  Undocumented fields may be the template's own.

        Args:
            has_stand_ins: whether texts stand for its media, see :func:`have_stand_ins`.

        Raises:
            Unsupported: a part of the message is neither text nor a call of a tool, nor one for
                which a text stands.
            InvalidRequest: somebody else than the assistant calls a tool.
        """
        self._check_is_whole()
        for name in ("audio", "function_call"):  # templates would not show them
            if getattr(self, name):
                raise Unsupported(f"{name} of a message is not supported", "messages")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest("tool_calls are the assistant's, not others'", "messages")
        text = joined(self.content, part_types=_TEXT_PARTS, has_stand_ins=has_stand_ins)
        fields = {
            "role": self.role,
            "content": "\n".join(filter(None, (text, self.refusal))),
            "reasoning_content": self.reasoning or self.reasoning_content,
            "reasoning": self.reasoning or None,
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
            **self.unread_fields(),
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _check_is_whole(self) -> None:
        """
        Raises:
            InvalidRequest: there is no content, which only an assistant may leave out, or no id of
                the call that a tool answers.
        """
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"a message of role {self.role!r} needs content", "messages")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequest("a message of role 'tool' needs tool_call_id", "messages")


Messages = Annotated[tuple[Message, ...], Field(max_length=MAX_MESSAGES, fail_fast=True)]
UncountedMessages = Annotated[tuple[Message, ...], Field(fail_fast=True)]
"""Those made of what was counted in another API, which can be more."""


def messages_for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return a conversation as chat templates take it, see :meth:`Message.for_template`.

    Raises:
        InvalidRequest: also where the arguments of all calls, which are JSON in texts, have more
            parts together than a body may have.
    """
    calls = [call for message in messages for call in message.tool_calls or ()]
    texts = [call.function.arguments for call in calls]
    counts = [num_parts(text.encode(errors="replace")) for text in texts if isinstance(text, str)]
    if sum(count for count in counts if count <= MAX_PARTS) > MAX_PARTS:  # more are not read
        raise InvalidRequest(
            f"arguments of calls have more than {MAX_PARTS} objects, arrays and members of them",
            "messages",
        )
    has_stand_ins = have_stand_ins(message.role for message in messages)
    return tuple(
        message.for_template(has_stand_ins=found)
        for message, found in zip(messages, has_stand_ins, strict=True)
    )


def left_out_of(messages: Sequence[Message]) -> dict[str, Unsupported]:
    """Return the media for which texts stand: by their names, the errors by which strict requests
    are refused."""
    has_stand_ins = have_stand_ins(message.role for message in messages)
    return {
        f"messages.content.{kind}": unsupported("content parts", kind, "messages")
        for message in compress(messages, has_stand_ins)
        for kind in media_of(message.content)
    }


def have_stand_ins(roles: Iterable[str]) -> Iterator[bool]:
    """Yield for each message, by its role, whether texts stand for its media: for those that tools
    returned, and those of the user behind them, as agents send the files that were read."""
    has_results = False
    for role in roles:
        has_results = role == "tool" or (has_results and role != "assistant")
        yield has_results and role in {"tool", "user"}


def media_of(content: str | Iterable[Part] | None) -> list[str]:
    """Return the types of the media in a content."""
    parts = () if content is None or isinstance(content, str) else content
    return [part.type for part in parts if is_media(part.type)]


def joined(
    content: str | Iterable[Part] | None,
    param: str = "messages",
    part_types: Collection[str] = ("text",),
    separator: str = "\n",
    *,
    has_stand_ins: bool = False,
) -> str:
    """Return the text of a content.

    Args:
        param: the parameter the client gave it in.
        part_types: those of the parts that are text.
        separator: what stands between parts.
        has_stand_ins: whether texts stand for its media.

    Raises:
        Unsupported: a part of it is not text.
        InvalidRequest: a part has none.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return separator.join(
        stand_in(part.type)
        if has_stand_ins and is_media(part.type)
        else _text(part, param, part_types)
        for part in content
    )


def _arguments(data: str | Mapping[str, Any]) -> Mapping[str, Any] | str:
    """Return the object that a text spells, or the text; some clients write no arguments as no
    text."""
    if not isinstance(data, str):
        return data
    try:
        value = parse_json((data or "{}").encode())
    except (InvalidRequest, UnicodeEncodeError):
        return data
    return value if isinstance(value, dict) else data


def _text(part: Part, param: str, part_types: Collection[str]) -> str:
    if part.type not in (*part_types, _REFUSAL):
        raise unsupported("content parts", str(part.type), param)
    text = part.refusal if part.type == _REFUSAL else part.text
    if not isinstance(text, str):
        raise InvalidRequest(f"the text of a part of type {part.type!r} must be a string", param)
    return text
