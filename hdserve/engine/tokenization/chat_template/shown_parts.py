"""Which parts of a conversation a chat template shows, and in which form, found out by rendering
one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hdserve.engine.tokenization.chat_template.call_form import CallForm

_CALL_MARK, _RESULT_MARK, _TEXT_MARK = "zqcallzq", "zqresultzq", "zqtextzq"
_OTHER_CALL_MARK, _OTHER_RESULT_MARK = "zqothercallzq", "zqotherresultzq"
_MARKS = (_CALL_MARK, _RESULT_MARK, _TEXT_MARK, _OTHER_CALL_MARK, _OTHER_RESULT_MARK)
_CALL_ID, _OTHER_CALL_ID = "probe1234", "probe5678"
"""Some templates take ids of nine characters only."""

_LONG_ID = "call_0123456789abcdef"


def _call(call_id: str, arguments: Mapping[str, str] | str) -> Mapping[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _result(call_id: str, mark: str) -> Mapping[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": mark}


_USER: Mapping[str, Any] = {"role": "user", "content": "probe"}
_FIRST = _call(_CALL_ID, {"text": _CALL_MARK})
_CALL: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_FIRST]}
_RESULT = _result(_CALL_ID, _RESULT_MARK)
_OTHER = _call(_OTHER_CALL_ID, {"text": _OTHER_CALL_MARK})

_CALLING = (_USER, _CALL)
_CUT_OFF = (_USER, {**_CALL, "tool_calls": [_call(_CALL_ID, f'{{"text": "{_CALL_MARK}')]})
_SAYING = (_USER, {**_CALL, "content": _TEXT_MARK})
_GOING_ON = (*_CALLING, _RESULT, {**_USER, "content": _TEXT_MARK})
_THINKING = (_USER, {**_CALL, "content": "probe", "reasoning_content": "probe"})
_CALLING_TWICE = (
    _USER,
    {**_CALL, "tool_calls": [_FIRST, _OTHER]},
    _RESULT,
    _result(_OTHER_CALL_ID, _OTHER_RESULT_MARK),
)
_LONG_IDS = (
    _USER,
    {**_CALL, "tool_calls": [_call(_LONG_ID, {"text": _CALL_MARK})]},
    _result(_LONG_ID, _RESULT_MARK),
)

_FORMS = (
    CallForm(),
    CallForm(has_text_arguments=True),
    CallForm(silence_is_none=True),
    CallForm(has_text_arguments=True, silence_is_none=True),
)

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[CallForm, Messages], str]


class ShownParts(NamedTuple):
    """What a template does not drop without a word; it may refuse it."""

    tool_calls: bool
    tool_results: bool
    form: CallForm
    """The first in which nothing more is dropped or refused than in others."""


def shown_parts(render: Render) -> ShownParts:
    """
    Args:
        render: the text a template makes of messages in a form.
    """
    form = _form(render)
    return ShownParts(
        _shows(render, form, _CALLING, _CALL_MARK),
        _shows(render, form, (*_CALLING, _RESULT), _RESULT_MARK),
        form,
    )


def _form(render: Render) -> CallForm:
    shown = (form for form in _FORMS if _CALL_MARK in _marks(render, form, _CALLING))
    form = next(shown, None)
    if form is None:
        return CallForm()
    form = _improved(render, form, _CUT_OFF, wraps_texts=True)
    if form.silence_is_none:
        form = _improved(render, form, _SAYING, says_apart=True)
    form = _improved(render, form, _THINKING, joins_reasoning=True)
    form = _improved(render, form, _CALLING_TWICE, has_single_calls=True)
    form = _improved(render, form, _GOING_ON, joins_results=True)
    return _improved(render, form, _LONG_IDS, has_short_ids=True)


def _improved(render: Render, form: CallForm, messages: Messages, **change: bool) -> CallForm:
    """Return ``form`` with a change, if that shows what it does not, and all that it does."""
    shown = _marks(render, form, messages)
    if shown == _marks_in(str(messages)):
        return form
    changed = form._replace(**change)
    return changed if shown < _marks(render, changed, messages) else form


def _marks(render: Render, form: CallForm, messages: Messages) -> set[str]:
    try:
        text = render(form, messages)
    except Exception:  # it refuses them
        return set()
    return _marks_in(text)


def _marks_in(text: str) -> set[str]:
    return {mark for mark in _MARKS if mark in text}


def _shows(render: Render, form: CallForm, messages: Messages, mark: str) -> bool:
    try:
        return mark in render(form, messages)
    except Exception:  # it will say so of a client's messages, too
        return True
