"""The blocks of an answer, which come in pieces."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic_core import from_json

from hdserve.conversation import INVALID_JSON

SIGNATURE = "unsigned"
"""The signature of what was thought, which every server may read: clients take what has none for
cut off, and do not send it back."""


class TextOrThinking:
    """What the model said, or thought."""

    def __init__(self, kind: Literal["text", "thinking"]) -> None:
        self.kind = kind
        self._text = ""

    def begun(self) -> dict[str, Any]:
        """Return the block as it begins."""
        return self._with("", "")

    def add(self, text: str) -> dict[str, Any]:
        """Take the next piece, and return it as a stream has it."""
        self._text += text
        return {"type": f"{self.kind}_delta", self.kind: text}

    def end(self) -> dict[str, Any] | None:
        """Return what a stream has behind the last piece: the signature of what was thought."""
        is_thought = self.kind == "thinking"
        return {"type": "signature_delta", "signature": SIGNATURE} if is_thought else None

    def whole(self) -> dict[str, Any]:
        """Return the block with all its pieces."""
        return self._with(self._text, SIGNATURE)

    def _with(self, text: str, signature: str) -> dict[str, Any]:
        signed = {"signature": signature} if self.kind == "thinking" else {}
        return {"type": self.kind, self.kind: text, **signed}


class ToolUse:
    """A call of a tool."""

    def __init__(self, name: str, call_id: str) -> None:
        self._head = {"type": "tool_use", "id": call_id, "name": name}
        self._arguments = ""

    def begun(self) -> dict[str, Any]:
        """Return the call without its arguments."""
        return {**self._head, "input": {}}

    def add(self, text: str) -> dict[str, Any]:
        """Take the next piece of the arguments, and return it as a stream has it."""
        self._arguments += text
        return {"type": "input_json_delta", "partial_json": text}

    def whole(self) -> dict[str, Any]:
        """Return the call, with the arguments it has where the answer was cut off in them, as the
        client reads those of a stream."""
        return {**self._head, "input": _object_of(self._arguments)}


Block = TextOrThinking | ToolUse


def _object_of(written: str) -> dict[str, Any]:
    try:
        found = from_json(written or "{}", allow_inf_nan=False, allow_partial=True)
        json.dumps(found, allow_nan=False)  # a number may be too large for one
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: written}
