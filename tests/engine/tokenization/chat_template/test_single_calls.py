"""Several calls of one message, and what they returned, in turns."""

from __future__ import annotations

from typing import Any

import pytest

from hdserve.engine.tokenization.chat_template.call_form import with_single_calls

USER = {"role": "user", "content": "hi"}


def calling(*ids: str | None, **fields: Any) -> dict[str, Any]:
    calls = [{"id": call_id, "function": {"name": "f", "arguments": {}}} for call_id in ids]
    return {"role": "assistant", "content": "", **fields, "tool_calls": calls}


def result(call_id: str, content: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_results_follow_their_calls() -> None:
    """In whatever order they came; what was thought and said comes first."""
    said = calling("a", "b", content="Wait.", reasoning_content="Hm.")
    found = list(with_single_calls([USER, said, result("b"), result("a"), result("b", "x"), USER]))
    assert found == [
        USER,
        calling("a", content="Wait.", reasoning_content="Hm."),
        result("a"),
        calling("b"),
        result("b"),
        result("b", "x"),
        USER,
    ]


@pytest.mark.parametrize(
    ("ids", "named"),
    [(("a", "a"), ("a", "a")), ((None, None), ("a", "b")), (("a", "b"), ("a", "c"))],
)
def test_results_that_name_no_call_follow_in_their_order(ids: Any, named: Any) -> None:
    results = [result(name, str(order)) for order, name in enumerate((*named, "d"))]
    found = list(with_single_calls([calling(*ids), *results]))
    assert found == [calling(ids[0]), results[0], calling(ids[1]), *results[1:]]


@pytest.mark.parametrize("ids", [(), ("a",), ("b",)])
def test_calls_may_have_no_result(ids: tuple[str, ...]) -> None:
    """Yet, or because what came next was something else."""
    found = list(with_single_calls([calling("a", "b"), *map(result, ids), USER, result("a")]))
    calls = {"a": [calling("a")], "b": [calling("b")]}
    for call_id in ids:
        calls[call_id].append(result(call_id))
    assert found == [*calls["a"], *calls["b"], USER, result("a")]


def test_single_calls_stay_as_they_are() -> None:
    messages = [USER, {"role": "assistant", "content": "a", "tool_calls": None}, result("a")]
    messages += [calling("a", content="Wait."), result("b"), result("a"), calling("b")]
    assert list(with_single_calls(messages)) == messages
