"""The form in which a chat template takes what is said, found out by rendering a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

_MARK = "zqcontentzq"
_PROBE: Messages = ({"role": "user", "content": _MARK},)


def with_parts(messages: Messages) -> list[Mapping[str, Any]]:
    """Return a conversation in which each text is a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def needs_parts(render: Callable[[Messages], str]) -> bool:
    """Whether a template drops or refuses a content that is a text, and shows a list of parts:
    that of Llama Guard 3 1B goes through the parts, which a text has none of.

    Args:
        render: the text a template makes of messages.
    """
    return not _shows(render, _PROBE) and _shows(render, with_parts(_PROBE))


def _shows(render: Callable[[Messages], str], messages: Messages) -> bool:
    try:
        return _MARK in render(messages).lower()
    except Exception:  # it refuses them
        return False
