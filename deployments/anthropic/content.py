"""The contents of the messages of a request, and the messages of a chat that they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from deployments.anthropic.billing import BILLING, is_billed, without_billing
from deployments.openai.body import Body, Truth, without_nulls
from deployments.openai.kinds import named_kind, only_kinds, unsupported
from deployments.openai.left_out import MEDIA, LeftOut, Media, is_media
from deployments.openai.messages import MAX_MESSAGES
from hdserve.errors import InvalidRequest

PARAM = "messages"

LEFT_OUT_BLOCKS = frozenset(
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)
"""The types of the blocks that say what a server did itself, in conversations that began there;
what came of it is in the texts behind them."""


class TextBlock(Body):
    """Text."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """What the model thought before what follows."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """What the model of another server thought, and only that server can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A call the model made earlier."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "caller", "toolset_name"}
    )

    type: Literal["tool_use"]
    id: str
    name: str
    input: Mapping[str, Any]

    def for_chat(self) -> dict[str, Any]:
        """Return the call as a chat has it."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


Texts = Annotated[
    tuple[Annotated[TextBlock, only_kinds("content blocks", {"text"}, None)], ...],
    Field(fail_fast=True),
]
"""Blocks of text alone, of whatever parameter."""


class SearchResultBlock(Body):
    """What a search found; answers do not cite it."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["search_result"]
    title: str
    source: str
    content: Annotated[
        tuple[Annotated[TextBlock, only_kinds("content blocks", {"text"}, PARAM)], ...],
        Field(fail_fast=True),
    ]

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join((self.title, self.source, *texts_of(self.content)))

    def unread_fields(self) -> dict[str, Any]:
        """Return what is not read, and with it ``citations`` if they are asked for."""
        found = super().unread_fields()
        if found.get("citations") == {"enabled": False}:
            del found["citations"]
        return found


class ToolReferenceBlock(Body):
    """The name of a tool that was found among those of the request, all of which are shown."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """All of it."""
        return self.tool_name


# Brackets tell forms of a value from its fields where an error is told.
def _form_of_returned(block: Any) -> str:
    kind = named_kind(block)
    return "[media]" if is_media(kind) else f"[{kind or 'text'}]"


Returned = Annotated[
    tuple[
        Annotated[
            Annotated[TextBlock, Tag("[text]")]
            | Annotated[SearchResultBlock, Tag("[search_result]")]
            | Annotated[ToolReferenceBlock, Tag("[tool_reference]")]
            | Annotated[Media, Tag("[media]")],
            Discriminator(_form_of_returned),
            only_kinds(
                "content blocks", {"text", "search_result", "tool_reference", *MEDIA}, PARAM
            ),
        ],
        ...,
    ],
    Field(fail_fast=True),
]
"""What a tool returned: texts, what can be told as one, and images and the like, for which texts
stand."""


class ToolResultBlock(Body):
    """What an earlier call returned."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Returned | None = None
    is_error: Truth | None = None

    @property
    def media(self) -> list[str]:
        """The types of the blocks for which texts stand."""
        blocks = () if isinstance(self.content, str) else self.content or ()
        return [block.type for block in blocks if isinstance(block, Media)]

    def for_chat(self) -> dict[str, Any]:
        """Return the message of a chat that has it, in which the text alone says whether it is an
        error."""
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text_of(self.content)}


# An error that lists the types names one of those that are left out.
def _type_of_block(block: Any) -> Any:
    kind = named_kind(block)
    if kind in LEFT_OUT_BLOCKS:
        return "[server_tool_use]"
    if is_media(kind):
        return "[media]"
    return f"[{block.get('type')}]" if isinstance(block, Mapping) else None


InputBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[SearchResultBlock, Tag("[search_result]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[Media, Tag("[media]")]
    | Annotated[LeftOut, Tag("[server_tool_use]")],
    Discriminator(_type_of_block),
    only_kinds(
        "content blocks",
        {
            "text",
            "search_result",
            "thinking",
            "redacted_thinking",
            "tool_use",
            "tool_result",
            *LEFT_OUT_BLOCKS,
            *MEDIA,
        },
        PARAM,
    ),
]


class InputMessage(Body):
    """A message of the conversation."""

    role: Literal["assistant", "system", "user"]
    content: str | Annotated[tuple[InputBlock, ...], Field(fail_fast=True)] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: Mapping[str, Any] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """
        Raises:
            InvalidRequest: there is no content, which only the system may leave out, that says how
                to answer; or another has what is the system's.
        """
        is_configured = bool(without_nulls(self.output_config))
        is_of_system = self.role == "system"
        if self.content is None and not (is_of_system and is_configured):
            raise InvalidRequest(f"a message of role {self.role!r} needs content", PARAM)
        if not is_of_system and (is_configured or self.clear_at is not None):
            reason = "clear_at and output_config are of messages of role 'system', not of others"
            raise InvalidRequest(reason, PARAM)
        return self

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The blocks of the content; a text is one."""
        if isinstance(self.content, str):
            return (TextBlock(type="text", text=self.content),)
        return self.content or ()

    @property
    def unmet(self) -> set[str]:
        """What it says in vain: no chat template is told that a result is an error, or what effort
        one turn is worth, nobody can read what was redacted, and nobody is billed."""
        found: set[str] = set()
        if without_nulls(self.output_config):
            found.add("messages.output_config")
        if self.role == "system" and is_billed(texts_of(self.content)):
            found.add(f"system.{BILLING}")
        for block in self.blocks:
            if isinstance(block, ToolResultBlock) and block.is_error:
                found.add("messages.content.is_error")
            elif isinstance(block, RedactedThinkingBlock):
                found.add("messages.content.redacted_thinking")
        return found

    @property
    def left_out(self) -> Iterator[tuple[str, str]]:
        """The names and the types of the blocks that are left out, those of results included."""
        for block in self.blocks:
            if isinstance(block, LeftOut):
                yield f"messages.content.{block.type}", block.type
            elif isinstance(block, ToolResultBlock):
                for kind in block.media:
                    yield f"messages.content.content.{kind}", kind


def _with_media_of_tools(messages: tuple[InputMessage, ...]) -> tuple[InputMessage, ...]:
    """Return the messages if all images and the like may be left out: those of turns of the user in
    which tools have returned something, as agents send the files that were read behind the results.

    Raises:
        Unsupported: others are shown.
    """
    has_results = False
    for message in messages:
        returned = any(isinstance(block, ToolResultBlock) for block in message.blocks)
        has_results = message.role != "assistant" and (has_results or returned)
        for block in message.blocks:
            if isinstance(block, Media) and not (has_results and message.role == "user"):
                raise unsupported("content blocks", block.type, PARAM)
    return messages


InputMessages = Annotated[
    tuple[InputMessage, ...],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_with_media_of_tools),
]


def texts_of(content: str | Iterable[Body] | None) -> list[str]:
    """Return the texts of a content: of each block that has one, its own."""
    if content is None or isinstance(content, str):
        return [content or ""]
    told = (TextBlock, SearchResultBlock, ToolReferenceBlock, Media)
    return [block.text for block in content if isinstance(block, told)]


def text_of(content: str | Iterable[Body] | None) -> str:
    """Return the text of a content, with a line break between two blocks."""
    return "\n".join(texts_of(content))


def system_text(content: str | Iterable[Body] | None) -> str:
    """Return the text of a content of the system, as the model is told it."""
    return "\n".join(without_billing(texts_of(content)))


def chat_messages(messages: Sequence[InputMessage]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that a conversation is: those of one role that follow each other
    are one, and results of tools stand by themselves, before what is said after them.  Those
    without content are none, nor are those of the system that were for an earlier turn alone.

    Raises:
        InvalidRequest: a message has what those of its role cannot say.
    """
    for role, same in groupby(_told(messages), key=attrgetter("role")):
        blocks = [block for message in same for block in message.blocks]
        if role == "assistant":
            yield _of_assistant(blocks)
        else:
            yield from _of_others(role, blocks)


def _told(messages: Sequence[InputMessage]) -> Iterator[InputMessage]:
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    last = max(users, default=0)
    for index, message in enumerate(messages):
        is_cleared = message.clear_at == "next_user_message" and index < last
        if message.content is not None and not is_cleared:
            yield message


def _of_others(role: str, blocks: Iterable[Any]) -> Iterator[dict[str, Any]]:
    said = system_text if role == "system" else text_of
    texts: list[TextBlock | SearchResultBlock | Media] = []
    has_results = False
    for block in blocks:
        if isinstance(block, (TextBlock, SearchResultBlock, Media)):
            texts.append(block)
        elif isinstance(block, ToolResultBlock) and role == "user":
            if texts:
                yield {"role": role, "content": said(texts)}
                texts = []
            has_results = True
            yield block.for_chat()
        elif not isinstance(block, LeftOut):
            raise InvalidRequest(f"role {role!r} has no block of type {block.type!r}", PARAM)
    if texts or not has_results:
        yield {"role": role, "content": said(texts)}


def _of_assistant(blocks: Iterable[Any]) -> dict[str, Any]:
    """Return a message with what was thought, said and called, however they took turns."""
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(block.for_chat())
        elif not isinstance(block, (RedactedThinkingBlock, LeftOut)):
            raise InvalidRequest(f"role 'assistant' has no block of type {block.type!r}", PARAM)
    found = {
        "role": "assistant",
        "content": text_of(texts) if texts else None,
        "reasoning_content": "\n".join(thoughts),
        "tool_calls": calls,
    }
    return {name: value for name, value in found.items() if value}
