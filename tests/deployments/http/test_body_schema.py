"""What is documented can be read."""

from __future__ import annotations

import json

import pytest

from deployments.anthropic.protocol import CountTokensBody, MessagesBody
from deployments.http.body_schema import body_schema
from deployments.openai.body import Body
from deployments.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from deployments.openai.responses_protocol import ResponsesBody

TALKS = [ChatBody, ResponsesBody, TokenizeBody, MessagesBody, CountTokensBody]
BODIES = [*TALKS, CompletionBody, DetokenizeBody]


@pytest.mark.parametrize("body", BODIES)
def test_schemas_of_bodies_stand_for_themselves(body: type[Body]) -> None:
    """A reference would point to the root of the whole OpenAPI document, where nothing is."""
    text = json.dumps(body_schema(body))
    assert '"$ref"' not in text
    assert '"$defs"' not in text
    if body in TALKS:
        assert '"role"' in text
