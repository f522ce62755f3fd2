"""The form in which a chat template shows most turns of conversations, found out by rendering
some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdserve.engine.tokenization.chat_template.turn_form import TurnForm

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[TurnForm, Messages], str]

_Conversations = tuple[tuple[str, ...], ...]
"""The roles of each one's messages."""

_NEIGHBOURS: _Conversations = (
    ("user", "user", "assistant", "user"),
    ("user", "assistant", "assistant", "user"),
)
_FIRST: _Conversations = (("system", "system", "developer", "user"), ("developer", "user"))
_ANSWERED: _Conversations = (("system", "user", "assistant"),)
"""As with tools, whose results are the end of most conversations: Mistral Nemo's template shows a
system message in the last one only, if that is the user's."""

_LATE: _Conversations = (
    ("system", "user", "assistant", "system", "user"),
    ("user", "assistant", "developer", "user"),
    ("user", "system"),
)


def turn_form(render: Render, *, has_tools: bool) -> TurnForm:
    """Return the first form in which no more turns are dropped or refused than in others.

    Args:
        render: the text a template makes of messages in a form.
    """
    first = (*_FIRST, *_ANSWERED) if has_tools else _FIRST
    form = _improved(render, TurnForm(), _NEIGHBOURS, joins_neighbours=True)
    form = _improved(render, form, first, joins_systems=True)
    form = _improved(render, form, first, first_are_users=True)
    return _improved(render, form, _LATE, late_are_users=True)


def _improved(
    render: Render, form: TurnForm, conversations: _Conversations, **change: bool
) -> TurnForm:
    """Return ``form`` with a change, if that shows what it does not, and all that it does."""
    shown = _shown(render, form, conversations)
    if len(shown) == sum(map(len, conversations)):
        return form
    changed = form._replace(**change)
    return changed if shown < _shown(render, changed, conversations) else form


def _shown(
    render: Render, form: TurnForm, conversations: _Conversations
) -> set[tuple[tuple[str, ...], int]]:
    return {(roles, place) for roles in conversations for place in _places(render, form, roles)}


def _places(render: Render, form: TurnForm, roles: Sequence[str]) -> list[int]:
    marks = [f"zqturn{place}zq" for place in range(len(roles))]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        text = render(form, messages)
    except Exception:  # it refuses them
        return []
    return [place for place, mark in enumerate(marks) if mark in text]
