"""Whether, and how much, to think, in the forms that chats of other servers have for it."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.openai.protocol import ChatBody
from hdserve.errors import InvalidRequest
from tests.deployments.bodies import USER, refused

ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}


def parsed(**fields: Any) -> ChatBody:
    return ChatBody.parse({"model": "m", "messages": USER, **fields})


@pytest.mark.parametrize(
    ("fields", "options", "effort"),
    [
        ({"thinking": {"type": "disabled"}}, OFF, None),
        ({"thinking": {"type": "enabled"}}, ON, None),
        ({"thinking": {"type": "adaptive"}}, ON, None),
        ({"enable_thinking": False}, OFF, None),
        ({"enable_thinking": True, "thinking": {"type": "enabled"}}, ON, None),
        ({"reasoning": {"effort": "low"}}, {}, "low"),
        ({"reasoning": {"enabled": False}}, OFF, None),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {}, "high"),
        ({"reasoning": {"effort": "low", "enabled": True}}, ON, "low"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, OFF, "high"),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"thinking": True}},
            {"thinking": True},
            None,
        ),
        ({"enable_thinking": False, "chat_template_kwargs": {"a": 1}}, {**OFF, "a": 1}, None),
        ({"thinking": None, "enable_thinking": None, "reasoning": None}, {}, None),
    ],
)
def test_what_the_template_is_told(
    fields: dict[str, Any], options: dict[str, Any], effort: str | None
) -> None:
    """By the variables and the effort of a chat; what a request says in these itself counts."""
    body = parsed(**fields)
    found = body.to_generation("r")
    assert (found.template_options, found.reasoning_effort) == (options, effort)
    assert body.ignored == ()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"thinking": {"type": "enabled"}}, {"thinking"}),
        ({"enable_thinking": False}, {"enable_thinking"}),
        ({"reasoning": {"enabled": True}}, {"reasoning.enabled"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning.effort"}),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, {"reasoning_effort"}),
    ],
)
def test_what_no_template_reads_is_named_as_it_was_sent(
    fields: dict[str, Any], names: set[str]
) -> None:
    assert parsed(**fields).variables.keys() == names


def test_a_budget_and_what_nobody_knows_are_named() -> None:
    """The first is documented, so strict requests may have it."""
    body = parsed(
        thinking={"type": "enabled", "budget_tokens": 9, "display": "omitted"},
        reasoning={"effort": "low", "exclude": True},
    )
    unmet = {"thinking.budget_tokens", "thinking.display"}
    assert body.unmet == unmet
    assert set(body.ignored) == unmet | {"reasoning.exclude"}


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        (
            {"enable_thinking": True, "thinking": {"type": "disabled"}},
            "thinking and enable_thinking",
            "thinking",
        ),
        (
            {"reasoning": {"effort": "none", "enabled": True}},
            "reasoning.effort and reasoning.enabled",
            "reasoning.effort",
        ),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], reason: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{reason} contradict each other") as caught:
        parsed(**fields).to_generation("r")
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "maybe"}},
        {"thinking": True},
        {"enable_thinking": "false"},
        {"reasoning": {"effort": "huge"}},
        {"reasoning": {"enabled": "true"}},
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any]) -> None:
    assert refused(ChatBody, **fields).param == next(iter(fields))
