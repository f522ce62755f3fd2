"""The library of the API asks a server for responses, and gets what it asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from ray import serve

from deployments.gateway import Gateway
from deployments.generation import (
    Alternative,
    Delta,
    GenerationRequest,
    ModelInfo,
    Records,
    Summary,
    TokenInfo,
)
from deployments.http.routes import build_api
from deployments.off_loop import MAX_INLINE_SIZE
from deployments.replica.heartbeat import AnswersCalls
from hdserve.config import ModelConfig, ServeConfig
from hdserve.core import DraftCounts
from tests.deployments.http.server import served

INFO = ("m", 1024, "float32", "cpu", False, True, 1, 1, 1, 0, 0, 0, (), "f")
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
LOGPROBS: Any = ["message.output_text.logprobs"]


class Scored(AnswersCalls):
    """Writes ``max_tokens`` tokens, with the log probabilities that are asked for."""

    async def describe(self) -> ModelInfo:
        return ModelInfo(*INFO, tool_parser="hermes", template_variables=("reasoning_effort",))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        num_tokens, num_top = request.sampling["max_tokens"], request.sampling.get("logprobs")
        for index in range(num_tokens):
            top = tuple(Alternative(b"b", -float(rank)) for rank in range(num_top or 0))
            token = TokenInfo(f"a{index} ".encode(), -float(index), top)
            logprobs = None if num_top is None else (token,)
            reason = "stop" if index == num_tokens - 1 else None
            yield (Delta(0, 0, f"a{index} ", (1,), (0,), logprobs, reason),)
        yield (Summary(1, num_tokens, DraftCounts(), "r"),)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    handle: Any = serve.run(serve.deployment(Scored).bind(), name="model", _local_testing_mode=True)
    config = ServeConfig(models=(ModelConfig(name="m", model="m"),))
    with (
        served(build_api(Gateway(config, {"m": handle}))) as (host, port),
        openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def asked(client: openai.OpenAI, **fields: Any) -> tuple[Response, str | None]:
    """A response, and what of the request is ignored."""
    fields = {"model": "m", "input": "hi", "max_output_tokens": 3, **fields}
    raw = client.responses.with_raw_response.create(**fields)
    return raw.parse(), raw.headers.get("x-hdserve-ignored")


def logprobs_of(response: Response) -> list[Any]:
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    return [logprob.to_dict() for logprob in part.logprobs or ()]


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"reasoning": {"context": "auto", "mode": "standard", "effort": "low"}}, None),
        ({"reasoning": {"context": None, "mode": "auto", "summary": None}}, None),
        (
            {"reasoning": {"context": "all_turns", "mode": "pro", "budget": 9}},
            "reasoning.budget, reasoning.context, reasoning.mode",
        ),
        ({"max_tool_calls": 5}, None),
        ({"include": LOGPROBS, "top_logprobs": 20}, None),
        ({"include": [*LOGPROBS, "reasoning.encrypted_content"]}, "include"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"extra_body": {"image": {"context_compression": "auto"}}}, None),
    ],
)
def test_what_the_library_knows_is_taken(
    client: openai.OpenAI, fields: dict[str, Any], ignored: str | None
) -> None:
    """And named where it asks for something that is not done."""
    found, named = asked(client, **fields)
    assert found.output_text == "a0 a1 a2 "
    assert named == ignored
    assert (found.max_tool_calls, found.top_logprobs) == (
        fields.get("max_tool_calls"),
        fields.get("top_logprobs", 0),
    )


def test_outputs_of_calls_need_no_id(client: openai.OpenAI) -> None:
    """Where one call is open; else the error says what is missing."""
    output: Any = {"type": "function_call_output", "call_id": None, "output": "42"}
    assert asked(client, input=[CALL, output])[1] is None
    with pytest.raises(openai.BadRequestError, match="an output without call_id") as caught:
        asked(client, input=[CALL, CALL | {"call_id": "c2"}, output])
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("fields", "num_top"), [({"include": LOGPROBS}, 0), ({"top_logprobs": 2}, 2)]
)
def test_log_probabilities(client: openai.OpenAI, fields: dict[str, Any], num_top: int) -> None:
    """In the events of the text, in the parts, and in the response; those of a chat."""
    whole = logprobs_of(asked(client, **fields)[0])
    chat = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=num_top,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert whole == [token.to_dict() for token in logprobs.content or ()]
    assert [len(token["top_logprobs"]) for token in whole] == [num_top] * 3
    streamed, done, part = [], [], []
    asking: Any = {"model": "m", "input": "hi", "max_output_tokens": 3, **fields}
    with client.responses.stream(**asking) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                streamed += [(token.token, token.logprob) for token in event.logprobs]
            elif event.type == "response.output_text.done":
                done = [(token.token, token.logprob) for token in event.logprobs]
            elif event.type == "response.content_part.done":
                part = [token.to_dict() for token in event.part.logprobs or ()]  # type: ignore[union-attr]
        final = stream.get_final_response()
    assert streamed == done == [(token["token"], token["logprob"]) for token in whole]
    assert part == logprobs_of(final) == whole
    assert logprobs_of(asked(client, top_logprobs=0)[0]) == []  # nobody asked


def test_many_log_probabilities(client: openai.OpenAI) -> None:
    """So many that events with all of them are written off the loop."""
    num_tokens = MAX_INLINE_SIZE // 21 + 100
    fields: Any = {"max_output_tokens": num_tokens, "top_logprobs": 20}
    whole = logprobs_of(asked(client, **fields)[0])
    assert len(whole) == num_tokens
    events = [*client.responses.create(model="m", input="hi", stream=True, **fields)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert logprobs_of(last.response) == whole
