"""The id that a request came with is told again, without what terminals obey."""

from __future__ import annotations

import pytest

from deployments.http.request_id import anthropic_headers, request_id, sent_id


@pytest.mark.parametrize(
    ("sent", "told"),
    [("a-1", "a-1"), ("é🙂", "é🙂"), ("a\x9b31m\x85", r"a\x9b31m\x85"), ("a\u00a0", "a\u00a0")],
)
def test_control_characters_are_escaped(sent: str, told: str) -> None:
    scope = {"type": "http", "headers": [(b"x-request-id", sent.encode())]}
    assert sent_id(scope) == request_id(scope) == told
    assert anthropic_headers(scope)["request-id"].encode("latin-1").decode() == told


def test_bytes_that_are_no_text_are_escaped() -> None:
    scope = {"type": "http", "headers": [(b"x-request-id", b"a\xff")]}
    assert sent_id(scope) == r"a\xff"
    assert anthropic_headers({"type": "http", "headers": []}) == {}
