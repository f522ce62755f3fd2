"""What a template shows is found out with few renderings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from hdserve.engine.tokenization.chat_template.call_form import CallForm
from hdserve.engine.tokenization.chat_template.shown_parts import ShownParts, shown_parts

MAX_RENDERED = 12


def found_out(*refused: str) -> ShownParts:
    """What is found out of a template that shows everything but refuses messages with all of these
    fields."""
    num_rendered = 0

    def render(form: CallForm, conversation: Sequence[Mapping[str, Any]]) -> str:
        nonlocal num_rendered
        messages = form.of(conversation)
        num_rendered += 1
        if refused and any(all(map(message.get, refused)) for message in messages):
            raise ValueError
        return str(messages)

    found = shown_parts(render)
    assert num_rendered <= MAX_RENDERED
    return found


def test_a_template_that_shows_everything() -> None:
    """It is given a conversation as it is, and so is one that would refuse it in any form."""
    assert found_out() == ShownParts(tool_calls=True, tool_results=True, form=CallForm())
    assert found_out("role") == found_out()


def test_a_template_that_takes_no_content_beside_what_was_thought() -> None:
    assert found_out("content", "reasoning_content").form == CallForm(joins_reasoning=True)
    assert found_out("content", "tool_calls", "reasoning_content").form == CallForm(
        joins_reasoning=True
    )
    assert found_out("reasoning_content").form == CallForm()


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("is_none", [False, True])
def test_a_template_that_shows_calls_in_one_form(is_text: bool, is_none: bool) -> None:
    """It is given that one; what was said is apart where calls are shown beside nothing only."""

    def render(form: CallForm, conversation: Sequence[Mapping[str, Any]]) -> str:
        messages = form.of(conversation)
        shown = []
        for message in messages:
            content, calls = message.get("content"), message.get("tool_calls", ())
            are_texts = [isinstance(call["function"]["arguments"], str) for call in calls]
            is_shown = all(has_text is is_text for has_text in are_texts)
            if is_shown and (content is None) is (is_none and bool(calls)):
                shown.append(str(message))
            else:
                shown.append(content or "")
        return "".join(shown)

    form = CallForm(
        has_text_arguments=is_text,
        wraps_texts=not is_text,
        silence_is_none=is_none,
        says_apart=is_none,
    )
    assert shown_parts(render) == ShownParts(tool_calls=True, tool_results=True, form=form)


def test_a_template_that_shows_calls_beside_any_text() -> None:
    """What was said stays in its message."""

    def render(form: CallForm, conversation: Sequence[Mapping[str, Any]]) -> str:
        messages = form.of(conversation)
        if any(message["content"] == "" for message in messages):
            raise ValueError
        return str(messages)

    assert shown_parts(render).form == CallForm(silence_is_none=True)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_template_that_shows_the_first_call(refuses: bool) -> None:
    """Of several, or none of them."""

    def render(form: CallForm, conversation: Sequence[Mapping[str, Any]]) -> str:
        shown = []
        for message in form.of(conversation):
            calls = message.get("tool_calls", [])
            if refuses and len(calls) > 1:
                raise ValueError
            shown.append(f"{message['content']}{calls[:1]}")
        return "".join(shown)

    assert shown_parts(render).form == CallForm(has_single_calls=True)


def test_a_template_that_refuses_a_user_behind_results() -> None:
    def render(form: CallForm, conversation: Sequence[Mapping[str, Any]]) -> str:
        messages = form.of(conversation)
        roles = [message["role"] for message in messages]
        if ("tool", "user") in pairwise(roles):
            raise ValueError
        return str(messages)

    assert shown_parts(render).form == CallForm(joins_results=True)


def test_a_template_that_shows_nothing() -> None:
    found = shown_parts(lambda form, messages: "")
    assert found == ShownParts(tool_calls=False, tool_results=False, form=CallForm())
