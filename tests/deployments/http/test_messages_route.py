"""Messages say what of them is not heard, and clients of that API are told in its words."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.gateway import Gateway
from deployments.generation import Delta, GenerationRequest, ModelInfo, Records, Summary
from deployments.http.routes import build_api
from deployments.replica.heartbeat import AnswersCalls
from deployments.request_faults import RequestFault
from hdserve.config import ModelConfig, ServeConfig
from hdserve.core import DraftCounts, SamplingParams
from hdserve.engine.request_check import check_prompt_length
from hdserve.errors import PromptTooLong

HI: Any = {"role": "user", "content": "hi"}
INFO = ("m", 1024, "float32", "cpu", False, True, 1, 1, 1, 0, 0, 0, (), "f")
ASKED: dict[str, Any] = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}


class Thinking(AnswersCalls):
    """A model whose chat template has some variables."""

    def __init__(self, variables: tuple[str, ...] = ()) -> None:
        self._variables = variables

    async def describe(self) -> ModelInfo:
        return ModelInfo(*INFO, template_variables=self._variables)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        yield Delta(0, 0, "a", (1,), (0,), None, "stop"), Summary(1, 1, DraftCounts(), "r")

    async def tokenize_chat(self, request: GenerationRequest) -> list[int]:
        return [1, 2]


def asked(model: serve.Application, path: str = "", **fields: Any) -> httpx.Response:
    handle: Any = serve.run(model, name="model", _local_testing_mode=True)
    config = ServeConfig(models=(ModelConfig(name="m", model="m"),))
    transport = httpx.ASGITransport(build_api(Gateway(config, {"m": handle})))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://hdserve") as client:
            body = {"model": "m", "messages": [HI], **fields}
            return await client.post(f"/v1/messages{path}", json=body)

    return asyncio.run(post())


@pytest.mark.parametrize(
    ("variables", "ignored"),
    [
        ((), "output_config.effort, thinking"),
        (("thinking",), "output_config.effort"),
        (("enable_thinking",), "output_config.effort"),
        (("reasoning_effort",), "thinking"),
        (("enable_thinking", "reasoning_effort"), None),
    ],
)
def test_what_a_template_does_not_know_is_named(
    variables: tuple[str, ...], ignored: str | None
) -> None:
    """Also where tokens are counted; what nobody asked for is not."""
    model = serve.deployment(Thinking).bind(variables)
    for stream in (False, True):
        found = asked(model, max_tokens=9, stream=stream, **ASKED)
        assert found.headers.get("x-hdserve-ignored") == ignored
        assert "x-hdserve-ignored" not in asked(model, max_tokens=9, stream=stream).headers
    counted = asked(model, "/count_tokens", **ASKED)
    assert counted.headers.get("x-hdserve-ignored") == ignored


class TooLong:
    """A model for which no prompt is short enough."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records | RequestFault]:
        try:
            check_prompt_length(2000, 1024, SamplingParams())
        except PromptTooLong as error:
            yield RequestFault(pickle.loads(pickle.dumps(error)))


def test_prompts_that_are_too_long_are_told_in_the_words_of_the_api() -> None:
    """By which clients know that they have to shorten a conversation."""
    model = serve.deployment(TooLong).bind()
    for stream in (False, True):
        found = asked(model, max_tokens=9, stream=stream)
        error = found.json()["error"]
        assert (found.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("prompt is too long: 2000 tokens > 1023 maximum")
