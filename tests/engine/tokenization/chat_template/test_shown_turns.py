"""Which turns a template shows is found out with few renderings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from hdserve.engine.tokenization.chat_template.turn_form import TurnForm, turn_form

MAX_RENDERED = 24

SPEAKERS = ("user", "assistant")

Messages = Sequence[Mapping[str, Any]]


def found_out(template: Callable[[Messages], str], *, has_tools: bool = False) -> TurnForm:
    num_rendered = 0

    def render(form: TurnForm, messages: Messages) -> str:
        nonlocal num_rendered
        num_rendered += 1
        return template(form.of(messages))

    form = turn_form(render, has_tools=has_tools)
    assert num_rendered <= MAX_RENDERED
    return form


def roles(messages: Messages) -> list[str]:
    return [message["role"] for message in messages]


def showing(messages: Messages, is_shown: Callable[[int, str], bool]) -> str:
    """Return the messages that are shown by their places and roles."""
    return str([m for place, m in enumerate(messages) if is_shown(place, m["role"])])


def alternating(messages: Messages) -> str:
    if any(one == other != "system" for one, other in pairwise(roles(messages))):
        raise ValueError
    return str(messages)


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("template", [str, lambda messages: ""])
def test_templates_that_show_everything_or_nothing(
    template: Callable[[Messages], str], has_tools: bool
) -> None:
    assert found_out(template, has_tools=has_tools) == TurnForm()


def test_a_template_that_refuses_neighbours() -> None:
    assert found_out(alternating) == TurnForm(joins_neighbours=True)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_template_that_refuses_neighbours_of_one_role(role: str) -> None:
    def template(messages: Messages) -> str:
        if any(one == other == role for one, other in pairwise(roles(messages))):
            raise ValueError
        return str(messages)

    assert found_out(template) == TurnForm(joins_neighbours=True)


def test_a_template_that_shows_the_first_message_of_the_system() -> None:
    def template(messages: Messages) -> str:
        return showing(messages, lambda place, role: place == 0 or role in SPEAKERS)

    assert found_out(template) == TurnForm(joins_systems=True, late_are_users=True)


def test_a_template_that_shows_system_messages_at_the_beginning() -> None:
    def template(messages: Messages) -> str:
        return showing(messages, lambda place, role: place < 3 or role in SPEAKERS)

    assert found_out(template) == TurnForm(late_are_users=True)


def test_a_template_that_shows_no_system_message() -> None:
    def template(messages: Messages) -> str:
        return showing(messages, lambda place, role: role in SPEAKERS)

    assert found_out(template) == TurnForm(first_are_users=True, late_are_users=True)


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_template_that_shows_system_messages_to_a_user_who_speaks_last(has_tools: bool) -> None:
    """With tools the last one is a result."""

    def template(messages: Messages) -> str:
        is_shown = messages[-1]["role"] != "assistant"
        return showing(messages, lambda place, role: is_shown or role in SPEAKERS)

    assert found_out(template, has_tools=has_tools) == TurnForm(first_are_users=has_tools)


def test_a_form_that_hides_something_else_is_not_taken() -> None:
    """Two messages of one role are refused, and two texts of one message as well."""

    def template(messages: Messages) -> str:
        if any("\n\n" in message["content"] for message in messages):
            raise ValueError
        return alternating(messages)

    assert found_out(template) == TurnForm()
