"""What Claude Code tells Anthropic in the text of the system is no part of the conversation."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.anthropic.protocol import CountTokensBody, MessagesBody
from deployments.generation import GenerationRequest
from deployments.session import session_id

NAMED = "system.x-anthropic-billing-header"


def billing(cch: str) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.36.a1b; cc_entrypoint=cli; cch={cch};"


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def body(**fields: Any) -> MessagesBody:
    messages = [{"role": "user", "content": "hi"}]
    return MessagesBody.parse({"model": "m", "max_tokens": 9, "messages": messages, **fields})


def generation(**fields: Any) -> GenerationRequest:
    return body(**fields).to_chat().to_generation("r")


def fields_with(cch: str) -> list[dict[str, Any]]:
    """The places in which the line may come, before ``Be brief.``"""
    user = {"role": "user", "content": "hi"}
    blocks = [block(billing(cch)), block("Be brief.")]
    text = f"{billing(cch)}\nBe brief."
    return [
        {"system": blocks},
        {"system": text},
        {"system": [block(text)]},
        {"messages": [{"role": "system", "content": blocks}, user]},
        {"messages": [{"role": "system", "content": text}, user]},
    ]


@pytest.mark.parametrize(
    ("first", "second"), [*zip(fields_with("a1b2c"), fields_with("0f9e8"), strict=True)]
)
def test_requests_that_differ_in_it_alone_are_the_same(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """And belong to one conversation; it is named, and nothing else is."""
    assert first != second
    plain = generation(system="Be brief.")
    assert generation(**first) == generation(**second) == plain
    assert session_id("", generation(**first)) == session_id("", generation(**second))
    assert session_id("", generation(**first)) == session_id("", plain) != ""
    assert body(**first).ignored == body(**second).ignored == (NAMED,)


@pytest.mark.parametrize("fields", fields_with("a1b2c"))
def test_tokens_are_counted_without_it(fields: dict[str, Any]) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    counted = CountTokensBody.parse({"model": "m", **messages, **fields}).to_chat()
    assert counted.to_generation("r").messages == generation(system="Be brief.").messages


def test_by_itself_it_is_no_system() -> None:
    line = billing("a")
    for system in (line, f"{line}\n", [block(line)], [block(f"{line}\n")]):
        assert generation(system=system) == generation()


def test_other_texts_of_the_system_stay_as_they_are() -> None:
    """Also those that name the line, and those of the user."""
    for text in (f"Be brief.\n{billing('a')}", f" {billing('a')}", "x-anthropic-billing-headers"):
        (system, _) = generation(system=[block(text), block(""), block("b")]).messages
        assert system["content"] == f"{text}\n\nb"
        assert body(system=text).ignored == ()
    said = [{"role": "user", "content": billing("a")}]
    assert generation(messages=said).messages == tuple(said)
    assert body(messages=said).ignored == ()
