"""Which parts of a conversation a chat template shows, found out by rendering one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_CALL_MARK, _RESULT_MARK = "zqcallzq", "zqresultzq"
_CALL_ID = "probe1234"
"""Some templates take ids of nine characters only."""

_CALLING: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "probe"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": _CALL_ID,
                "type": "function",
                "function": {"name": "probe", "arguments": {"text": _CALL_MARK}},
            }
        ],
    },
)
_RESULT: Mapping[str, Any] = {
    "role": "tool",
    "tool_call_id": _CALL_ID,
    "name": "probe",
    "content": _RESULT_MARK,
}

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


class ShownParts(NamedTuple):
    """What a template does not drop without a word; it may refuse it."""

    tool_calls: bool
    tool_results: bool


def shown_parts(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> ShownParts:
    """
    Args:
        render: the text a template makes of messages.
    """
    return ShownParts(
        _shows(render, _CALLING, _CALL_MARK), _shows(render, (*_CALLING, _RESULT), _RESULT_MARK)
    )


def _shows(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
    mark: str,
) -> bool:
    try:
        return mark in render(messages)
    except Exception:  # it will say so of a client's messages, too
        return True
