"""What a client chose is safe to send back, and what is documented can be read."""

from __future__ import annotations

import json

import pytest

from deployments.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from deployments.routes import _body_schema, _header_value


def test_header_values_are_harmless() -> None:
    """Names a client made up cannot break or forge a header."""
    found = _header_value(["ok", "a\r\nset-cookie: x", "é🙂", "\x7f\x00", "\ud800", "x" * 5000])
    assert found.startswith("ok, a\\r\\nset-cookie: x, ")
    assert found.isascii()
    assert found.isprintable()
    assert len(found) == 1000


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody])
def test_schemas_of_bodies_stand_for_themselves(body: type[Body]) -> None:
    """A reference would point to the root of the whole OpenAPI document, where nothing is."""
    text = json.dumps(_body_schema(body))
    assert '"$ref"' not in text
    assert '"$defs"' not in text
    if body in (ChatBody, TokenizeBody):
        assert '"role"' in text
