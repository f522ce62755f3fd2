"""Bodies of requests, as the gateway reads them."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.generation import GenerationRequest
from deployments.http.param_names import params_named
from deployments.openai.protocol import ChatBody, CompletionBody
from deployments.openai.responses_protocol import PARAM_NAMES, ResponsesBody
from deployments.parsers.tool_parsers import HermesToolParser
from hdserve.errors import InvalidRequest

USER = [{"role": "user", "content": "hi"}]
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields: Any) -> GenerationRequest:
    """What a chat with these fields asks of a model."""
    return ChatBody.parse({"model": "m", "messages": USER, **fields}).to_generation("r")


def response_request(**fields: Any) -> GenerationRequest:
    """What a request of the Responses API with these fields asks of a model."""
    body = ResponsesBody.parse({"model": "m", "input": "hi", **fields})
    with params_named(PARAM_NAMES):
        return body.to_chat().to_generation("r", HermesToolParser)


def refused(body: type[ChatBody | CompletionBody], **fields: Any) -> InvalidRequest:
    """The error that ``fields`` get; its message is always bounded."""
    required = {"messages": USER} if body is ChatBody else {"prompt": "x"}
    with pytest.raises(InvalidRequest) as caught:
        body.parse({"model": "m", **required, **fields}).to_generation("r")
    assert len(caught.value.message) <= 300
    caught.value.message.encode()
    return caught.value
