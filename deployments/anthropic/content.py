"""The contents of the messages of a request, and the messages of a chat that they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from deployments.openai.body import Body, Truth
from deployments.openai.messages import MAX_MESSAGES
from hdserve.errors import InvalidRequest

PARAM = "messages"


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


class ToolUseBlock(Body):
    """A call the model made earlier."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "caller"})

    type: Literal["tool_use"]
    id: str
    name: str
    input: Mapping[str, Any]

    def for_chat(self) -> dict[str, Any]:
        """Return the call as a chat has it."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


Texts = Annotated[tuple[TextBlock, ...], Field(fail_fast=True)]


class ToolResultBlock(Body):
    """What an earlier call returned."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Texts | None = None
    is_error: Truth | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the message of a chat that has it, in which the text alone says whether it is an
        error."""
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text_of(self.content)}


# Brackets tell forms of a value from its fields where an error is told.
def _type_of_block(block: Any) -> Any:
    return f"[{block.get('type')}]" if isinstance(block, Mapping) else None


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    Discriminator(_type_of_block),
]


class InputMessage(Body):
    """A message of the conversation."""

    role: Literal["assistant", "system", "user"]
    content: str | Annotated[tuple[Block, ...], Field(fail_fast=True)]

    def for_chat(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of a chat that it is: results of tools come before what is said after
        them.

        Raises:
            InvalidRequest: it has what those who write such messages cannot say.
        """
        blocks = (
            (TextBlock(type="text", text=self.content),)
            if isinstance(self.content, str)
            else self.content
        )
        if self.role == "assistant":
            yield _of_assistant(blocks)
            return
        texts: list[TextBlock] = []
        for block in blocks:
            if isinstance(block, TextBlock):
                texts.append(block)
            elif isinstance(block, ToolResultBlock) and self.role == "user":
                if texts:
                    yield {"role": self.role, "content": text_of(texts)}
                    texts = []
                yield block.for_chat()
            else:
                reason = f"a message of role {self.role!r} has no block of type {block.type!r}"
                raise InvalidRequest(reason, PARAM)
        if texts or not blocks:
            yield {"role": self.role, "content": text_of(texts)}


InputMessages = Annotated[
    tuple[InputMessage, ...], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


def text_of(content: str | Iterable[TextBlock] | None) -> str:
    """Return the text of a content, with a line break between two blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


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
        else:
            raise InvalidRequest(f"an assistant has no block of type {block.type!r}", PARAM)
    found = {
        "role": "assistant",
        "content": text_of(texts) if texts else None,
        "reasoning_content": "\n".join(thoughts),
        "tool_calls": calls,
    }
    return {name: value for name, value in found.items() if value}
