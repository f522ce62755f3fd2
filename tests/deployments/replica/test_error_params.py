"""Errors in mid-answer name what the client sent, not what was made of it."""

from __future__ import annotations

import pytest

from deployments.generation import GenerationRequest
from deployments.replica.record_stream import as_asked
from hdserve.errors import EngineStopped, InvalidRequest, PromptTooLong

CHAT = ({"role": "user", "content": "a"},)


@pytest.mark.parametrize("kind", [InvalidRequest, PromptTooLong])
@pytest.mark.parametrize(
    ("param", "told"),
    [("grammar", "guided_regex"), ("prompt", "messages"), ("stop", "stop"), (None, None)],
)
def test_of_a_chat(kind: type[InvalidRequest], param: str | None, told: str | None) -> None:
    """A grammar may turn out to be too complex while it is followed."""
    request = GenerationRequest("r", messages=CHAT, grammar_param="guided_regex")
    found = as_asked(kind("the reason", param), request)
    assert isinstance(found, kind)
    assert (found.message, found.param) == ("the reason", told)


def test_of_a_prompt() -> None:
    """It is called so; and what is no fault of the request is passed on."""
    request = GenerationRequest("r", prompts=("a",), grammar_param="tools")
    error = PromptTooLong("long", "prompt")
    assert as_asked(error, request) is error
    found = as_asked(InvalidRequest("complex", "grammar"), request)
    assert isinstance(found, InvalidRequest)
    assert found.param == "tools"
    gone = EngineStopped("gone")
    assert as_asked(gone, request) is gone
