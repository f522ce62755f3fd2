"""The form in which a chat template takes messages that call tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that templates have for what the assistant thought."""


class CallForm(NamedTuple):
    """How messages with calls differ from those of a conversation, for a template that would refuse
    them, or drop a part of them, as they are."""

    joins_reasoning: bool = False
    """What was said before a call is the end of what was thought: gpt-oss' template takes one of
    both, in its channel of what is thought."""

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a conversation in this form."""
        return [self._of(message) if message.get("tool_calls") else message for message in messages]

    def _of(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        return _with_joined_reasoning(message) if self.joins_reasoning else message


def _with_joined_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    thoughts = {name: message.get(name) for name in _REASONING}
    joined = {
        name: f"{thought}\n{content}"
        for name, thought in thoughts.items()
        if thought and isinstance(thought, str)
    }
    return {**message, **joined, "content": ""} if content and joined else message
