"""The output items of the OpenAI Responses API, and the events in which one of them comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from deployments.events import Event
from deployments.generation import TokenInfo
from deployments.openai.long_list import LongList, PackedTokens
from deployments.openai.responses_logprobs import TextTokens, in_event, in_part
from deployments.openai.responses_tools import OwnName


class _TextItem(ABC):
    """An output item whose one part is text, which comes in pieces."""

    _KIND: ClassVar[str]
    _ID_PREFIX: ClassVar[str]

    def __init__(self) -> None:
        self.id = f"{self._ID_PREFIX}_{uuid4().hex}"
        self.text = ""

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]:
        """Return the item as it is now; one in progress has no content yet."""

    def part(self) -> dict[str, Any]:
        """Return the content so far."""
        return {"type": self._KIND, "text": self.text}

    def begin(self) -> list[Event]:
        """Return the events after ``response.output_item.added``."""
        return [{"type": "response.content_part.added", **self._place(), "part": self.part()}]

    def add(self, text: str) -> Event:
        """Take the next piece."""
        self.text += text
        return self._event("delta", text)

    def end(self) -> list[Event]:
        """Return the events before ``response.output_item.done``."""
        return [
            self._event("done", self.text, key="text"),
            {"type": "response.content_part.done", **self._place(), "part": self.part()},
        ]

    def _event(self, name: str, text: str, key: str = "delta") -> Event:
        kind = f"response.{self._KIND}.{name}"
        return {"type": kind, **self._place(), key: text}

    def _content(self, status: str) -> list[dict[str, Any]]:
        return [] if status == "in_progress" else [self.part()]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "content_index": 0}


class MessageItem(_TextItem):
    """An output item of text.

    Args:
        tokens: of the answer, as far as it has come; none where nobody asked for log probabilities.
    """

    _KIND = "output_text"
    _ID_PREFIX = "msg"

    def __init__(self, tokens: TextTokens) -> None:
        super().__init__()
        self._tokens = tokens
        self._own_tokens = PackedTokens()

    def part(self) -> dict[str, Any]:
        return {**super().part(), "annotations": [], "logprobs": self._logprobs(in_part)}

    def add(self, text: str) -> Event:
        tokens = self._tokens.take(text)
        self._own_tokens.add(tokens)
        return {**super().add(text), "logprobs": [*map(in_event, tokens)]}

    def end(self) -> list[Event]:
        done, *others = super().end()
        return [{**done, "logprobs": self._logprobs(in_event)}, *others]

    def _logprobs(self, shown: Callable[[TokenInfo], dict[str, Any]]) -> Sequence[dict[str, Any]]:
        return LongList(self._own_tokens, shown) if self._own_tokens else []

    def item(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": self._content(status)}


class ReasoningItem(_TextItem):
    """An output item of what the model thought."""

    _KIND = "reasoning_text"
    _ID_PREFIX = "rs"

    def item(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "type": "reasoning", "summary": []}
        return {**head, "status": status, "content": self._content(status)}


class CallItem:
    """An output item of a function call."""

    def __init__(self, name: OwnName, call_id: str) -> None:
        self.id = f"fc_{uuid4().hex}"
        self._call_id = call_id
        self._name = name.name
        self._namespace = {} if name.namespace is None else {"namespace": name.namespace}
        self._arguments = ""

    def item(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            **self._namespace,
            "name": self._name,
            "arguments": self._arguments,
            "status": status,
        }

    def begin(self) -> list[Event]:
        """Return no events: none comes after ``response.output_item.added``."""
        return []

    def add(self, text: str) -> Event:
        """Take the next piece of the arguments."""
        self._arguments += text
        kind = "response.function_call_arguments.delta"
        return {"type": kind, "item_id": self.id, "delta": text}

    def end(self) -> list[Event]:
        """Return the events before ``response.output_item.done``."""
        kind = "response.function_call_arguments.done"
        named = {"item_id": self.id, "name": self._name}
        return [{"type": kind, **named, "arguments": self._arguments}]


Item = MessageItem | ReasoningItem | CallItem
