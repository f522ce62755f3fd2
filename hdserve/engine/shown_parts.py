"""Which parts of a conversation a chat template shows, and in which form, found out by rendering
one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hdserve.engine.call_form import CallForm

_CALL_MARK, _RESULT_MARK = _MARKS = "zqcallzq", "zqresultzq"
_CALL_ID = "probe1234"
"""Some templates take ids of nine characters only."""

_USER: Mapping[str, Any] = {"role": "user", "content": "probe"}
_CALL: Mapping[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": _CALL_ID,
            "type": "function",
            "function": {"name": "probe", "arguments": {"text": _CALL_MARK}},
        }
    ],
}
_RESULT: Mapping[str, Any] = {
    "role": "tool",
    "tool_call_id": _CALL_ID,
    "name": "probe",
    "content": _RESULT_MARK,
}
_CALLING = (_USER, _CALL)
_THINKING = (_USER, {**_CALL, "content": "probe", "reasoning_content": "probe"})

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}

Render = Callable[[Sequence[Mapping[str, Any]]], str]


class ShownParts(NamedTuple):
    """What a template does not drop without a word; it may refuse it."""

    tool_calls: bool
    tool_results: bool
    form: CallForm
    """The first in which nothing more is dropped or refused than in others."""


def shown_parts(render: Render) -> ShownParts:
    """
    Args:
        render: the text a template makes of messages.
    """
    form = CallForm()
    return ShownParts(
        _shows(render, form.of(_CALLING), _CALL_MARK),
        _shows(render, form.of((*_CALLING, _RESULT)), _RESULT_MARK),
        _improved(render, form, _THINKING, joins_reasoning=True),
    )


def _improved(
    render: Render, form: CallForm, messages: Sequence[Mapping[str, Any]], **change: bool
) -> CallForm:
    """Return ``form`` with a change, if that shows what it does not, and all that it does."""
    changed = form._replace(**change)
    shown = _marks(render, form.of(messages))
    return changed if shown < _marks(render, changed.of(messages)) else form


def _marks(render: Render, messages: Sequence[Mapping[str, Any]]) -> set[str]:
    try:
        text = render(messages)
    except Exception:  # it refuses them
        return set()
    return {mark for mark in _MARKS if mark in text}


def _shows(render: Render, messages: Sequence[Mapping[str, Any]], mark: str) -> bool:
    try:
        return mark in render(messages)
    except Exception:  # it will say so of a client's messages, too
        return True
