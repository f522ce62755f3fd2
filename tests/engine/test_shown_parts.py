"""What a template shows is found out with few renderings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdserve.engine.call_form import CallForm
from hdserve.engine.shown_parts import ShownParts, shown_parts

MAX_RENDERED = 12


def found_out(*refused: str) -> ShownParts:
    """What is found out of a template that shows everything but refuses messages with all of these
    fields."""
    num_rendered = 0

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        nonlocal num_rendered
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


def test_a_template_that_shows_nothing() -> None:
    found = shown_parts(lambda messages: "")
    assert found == ShownParts(tool_calls=False, tool_results=False, form=CallForm())
