"""The blocks of an answer, which come in pieces."""

from __future__ import annotations

import json
from typing import Any, Protocol


class Block(Protocol):
    """A block of an answer."""

    def begun(self) -> dict[str, Any]:
        """Return the block as it begins."""

    def add(self, text: str) -> dict[str, Any]:
        """Take the next piece, and return it as a stream has it."""

    def whole(self) -> dict[str, Any]:
        """Return the block with all its pieces."""


class TextBlock:
    """Text."""

    def __init__(self) -> None:
        self._text = ""

    def begun(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def add(self, text: str) -> dict[str, Any]:
        self._text += text
        return {"type": "text_delta", "text": text}

    def whole(self) -> dict[str, Any]:
        return {"type": "text", "text": self._text}


class ThinkingBlock:
    """What the model thought; nothing is signed, as every server may read it."""

    def __init__(self) -> None:
        self._text = ""

    def begun(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def add(self, text: str) -> dict[str, Any]:
        self._text += text
        return {"type": "thinking_delta", "thinking": text}

    def whole(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": self._text, "signature": ""}


class ToolUseBlock:
    """A call of a tool."""

    def __init__(self, name: str, call_id: str) -> None:
        self._head = {"type": "tool_use", "id": call_id, "name": name}
        self._arguments = ""

    def begun(self) -> dict[str, Any]:
        return {**self._head, "input": {}}

    def add(self, text: str) -> dict[str, Any]:
        self._arguments += text
        return {"type": "input_json_delta", "partial_json": text}

    def whole(self) -> dict[str, Any]:
        """Return the call; without arguments, where the answer was cut off in them."""
        try:
            found = json.loads(self._arguments)
        except ValueError:
            found = None
        return {**self._head, "input": found if isinstance(found, dict) else {}}
