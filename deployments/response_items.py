"""The output items of the OpenAI Responses API, and the events in which one of them comes."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

Event = dict[str, Any]


class MessageItem:
    """An output item of text."""

    def __init__(self) -> None:
        self.id = f"msg_{uuid4().hex}"
        self.text = ""

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        head = {"id": self.id, "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": content}

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def begin(self) -> list[Event]:
        """What follows its being added."""
        return [{"type": "response.content_part.added", **self._place(), "part": self.part()}]

    def add(self, text: str) -> Event:
        self.text += text
        delta = {"delta": text, "logprobs": []}
        return {"type": "response.output_text.delta", **self._place(), **delta}

    def end(self) -> list[Event]:
        """What comes before its being done."""
        whole = {"text": self.text, "logprobs": []}
        return [
            {"type": "response.output_text.done", **self._place(), **whole},
            {"type": "response.content_part.done", **self._place(), "part": self.part()},
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "content_index": 0}


class ReasoningItem:
    """An output item of what the model thought."""

    def __init__(self) -> None:
        self.id = f"rs_{uuid4().hex}"
        self.text = ""

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        head = {"id": self.id, "type": "reasoning", "summary": []}
        return {**head, "status": status, "content": content}

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def begin(self) -> list[Event]:
        """What follows its being added."""
        return [{"type": "response.content_part.added", **self._place(), "part": self.part()}]

    def add(self, text: str) -> Event:
        self.text += text
        return {"type": "response.reasoning_text.delta", **self._place(), "delta": text}

    def end(self) -> list[Event]:
        """What comes before its being done."""
        return [
            {"type": "response.reasoning_text.done", **self._place(), "text": self.text},
            {"type": "response.content_part.done", **self._place(), "part": self.part()},
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "content_index": 0}


class CallItem:
    """An output item of a function call."""

    def __init__(self, name: str) -> None:
        self.id = f"fc_{uuid4().hex}"
        self._call_id = f"call_{uuid4().hex[:24]}"
        self._name = name
        self._arguments = ""

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
            "status": status,
        }

    def begin(self) -> list[Event]:
        return []

    def add(self, text: str) -> Event:
        self._arguments += text
        kind = "response.function_call_arguments.delta"
        return {"type": kind, "item_id": self.id, "delta": text}

    def end(self) -> list[Event]:
        kind = "response.function_call_arguments.done"
        named = {"item_id": self.id, "name": self._name}
        return [{"type": kind, **named, "arguments": self._arguments}]


Item = MessageItem | ReasoningItem | CallItem
