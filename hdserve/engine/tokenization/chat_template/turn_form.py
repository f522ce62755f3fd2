"""The form in which a chat template shows most turns of conversations, found out by rendering
some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from hdserve.engine.tokenization.chat_template.call_form import REASONING

_SYSTEM = ("developer", "system")
_SPEAKERS = ("user", "assistant")
"""In the order in which all templates take them."""

_TEXTS = ("content", *REASONING)

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
_ALONE: _Conversations = (("system",),)


class TurnForm(NamedTuple):
    """How turns differ from those of a conversation, for a template that would refuse them, or drop
    some, as they are."""

    joins_neighbours: bool = False
    """Texts of the user in a row are one message, and so are those of the assistant: the templates
    of Gemma and Mistral refuse two."""

    joins_systems: bool = False
    """System messages at the beginning are one: gpt-oss' template shows the first alone, Qwen3.5's
    refuses others."""

    first_are_users: bool = False
    """System messages at the beginning are the user's: Gemma 2's template refuses any, and Mistral
    Nemo's drops them from conversations that end with a result."""

    late_are_users: bool = False
    """System messages that come later are the user's, each in its place, so that what was there
    before them stays the beginning of the prompt."""

    needs_user: bool = False
    """Where no message is the user's, the last system message at the beginning is: Qwen3.5's
    template refuses conversations without the user."""

    def of(
        self, messages: Sequence[Mapping[str, Any]], shown: Collection[str] = ()
    ) -> list[Mapping[str, Any]]:
        """Return a conversation in this form.

        Args:
            shown: fields besides role and texts in which messages that become one are equal.
        """
        num_first = _num_first(messages)
        first, late = list(messages[:num_first]), list(messages[num_first:])
        if self.needs_user and first and not self._has_user(late):
            late = [*_as_users([first.pop()]), *late]
        if self.joins_systems and len(first) > 1:
            first = [_joined(first)]
        if self.first_are_users:
            first = _as_users(first)
        if self.late_are_users:
            late = _as_users(late)
        turns = [*first, *late]
        return _with_joined_neighbours(turns, shown) if self.joins_neighbours else turns

    def _has_user(self, late: Iterable[Mapping[str, Any]]) -> bool:
        users = ("user", *_SYSTEM) if self.late_are_users else ("user",)
        return any(message.get("role") in users for message in late)


def may_differ(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are turns that not all templates take: others than the user's and the
    assistant's, one after the other."""
    roles = [message.get("role") for message in messages]
    has_system = any(role in _SYSTEM for role in roles)
    return has_system or any(one == other for one, other in pairwise(roles))


Messages = Sequence[Mapping[str, Any]]
Render = Callable[[TurnForm, Messages], str]


def turn_form(render: Render, *, has_tools: bool) -> TurnForm:
    """Return the first form in which no more turns are dropped or refused than in others.

    Args:
        render: the text a template makes of messages in a form.
    """
    first = (*_FIRST, *_ANSWERED) if has_tools else _FIRST
    form = _improved(render, TurnForm(), _NEIGHBOURS, joins_neighbours=True)
    form = _improved(render, form, first, joins_systems=True)
    form = _improved(render, form, first, first_are_users=True)
    form = _improved(render, form, _LATE, late_are_users=True)
    return _improved(render, form, _ALONE, needs_user=True)


def shown_fields(render: Render, messages: Messages) -> set[str]:
    """Return the fields of messages, besides role, texts and calls, that change what a template
    makes of a user's turn or the assistant's; all, if it refuses them, or does not tell which."""
    names = {name for message in messages for name in message}
    names -= {"role", "tool_calls", *_TEXTS}
    if not names:
        return set()
    marks = {name: f"zqfield{place}zq" for place, name in enumerate(sorted(names))}
    try:
        plain, marked = (_probe(render, fields) for fields in ({}, marks))
        found = {name for name, mark in marks.items() if mark in marked.lower()}
        others = {name: mark for name, mark in marks.items() if name not in found}
        return found if _probe(render, others) == plain else names
    except Exception:  # it says nothing of them
        return names


def _probe(render: Render, fields: Mapping[str, str]) -> str:
    """Return a conversation whose messages have these fields as well."""
    probe = [{"role": role, "content": "probe", **fields} for role in _SPEAKERS]
    return render(TurnForm(), [*probe, {"role": "user", "content": "probe"}])


def _num_first(messages: Sequence[Mapping[str, Any]]) -> int:
    others = (i for i, message in enumerate(messages) if message.get("role") not in _SYSTEM)
    return next(others, len(messages))


def _as_users(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {**message, "role": "user"} if message.get("role") in _SYSTEM else message
        for message in messages
    ]


def _with_joined_neighbours(
    messages: Iterable[Mapping[str, Any]], shown: Collection[str]
) -> list[Mapping[str, Any]]:
    speaker = partial(_speaker, shown=shown)
    return [_joined(list(run)) for _, run in groupby(messages, key=speaker)]


def _speaker(message: Mapping[str, Any], shown: Iterable[str]) -> object:
    """Return what is equal for messages that can be one: all that is shown besides their texts."""
    texts = [message.get(name) or "" for name in _TEXTS]
    are_texts = all(isinstance(text, str) for text in texts)
    if message.get("role") not in _SPEAKERS or message.get("tool_calls") or not are_texts:
        return object()
    return [message.get(name) for name in ("role", *shown)]


def _joined(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(messages) == 1:
        return messages[0]
    joined = {
        name: "\n\n".join(message[name] for message in messages if message.get(name))
        for name in _TEXTS
        if any(name in message for message in messages)
    }
    return {**messages[0], **joined}


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
