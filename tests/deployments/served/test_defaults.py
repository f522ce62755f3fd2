"""The defaults of a model's requests, as the clients of each API meet them."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.serving import ServedApplication
from tests.waiting import WAIT_S

pytestmark = pytest.mark.ray

MODEL = "assistant"
CHAT: list[Any] = [{"role": "user", "content": "I want to book a table for two in San Jose."}]
NUM_TOKENS = 7
TO_THE_END: dict[str, Any] = {"ignore_eos": True}


def num_prompt_tokens(application: ServedApplication, **variables: Any) -> int:
    """Of the chat, as ``/tokenize`` has it."""
    body = {"model": MODEL, "messages": CHAT, "chat_template_kwargs": variables}
    answer = httpx.post(f"{application.base_url}/tokenize", json=body, timeout=WAIT_S)
    return int(answer.json()["count"])


def test_sampling(client: openai.OpenAI) -> None:
    """Greedy whatever the seed is, unless the request says otherwise."""

    def text(seed: int, **options: Any) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=CHAT, seed=seed, extra_body=TO_THE_END, **options
        )
        return answer.choices[0].message.content

    greedy = text(1, temperature=0)
    assert [text(seed) for seed in (1, 2, 3)] == [greedy] * 3
    assert greedy not in [text(seed, temperature=20, top_p=1) for seed in (1, 2, 3)]


def test_the_number_of_tokens(client: openai.OpenAI) -> None:
    """A completion has as many as a chat, and more where it asks for more."""
    options: dict[str, Any] = {"model": MODEL, "extra_body": TO_THE_END}
    cases: list[tuple[Any, int]] = [(openai.omit, NUM_TOKENS), (9, 9), (None, NUM_TOKENS)]
    for given, wanted in cases:
        chat = client.chat.completions.create(messages=CHAT, max_tokens=given, **options)
        completion = client.completions.create(prompt="A taxi", max_tokens=given, **options)
        for answer in (chat, completion):
            assert answer.usage is not None
            assert answer.usage.completion_tokens == wanted
            assert answer.choices[0].finish_reason == "length"


def test_variables_of_the_template(application: ServedApplication, client: openai.OpenAI) -> None:
    """Each has its default until the request sets it, by whatever parameter."""
    both = num_prompt_tokens(application)
    on = num_prompt_tokens(application, note="")
    off = num_prompt_tokens(application, enable_thinking=False)
    assert both > max(on, off)
    assert on + off == both + num_prompt_tokens(application, note="", enable_thinking=False)
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, both),
        ({"extra_body": {"chat_template_kwargs": {"note": ""}}}, on),
        ({"extra_body": {"enable_thinking": False}}, off),
        ({"reasoning_effort": "none"}, off),
        ({"reasoning_effort": "high"}, both),
    ]
    for options, wanted in cases:
        chat = client.chat.completions.create(model=MODEL, messages=CHAT, **options)
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == wanted


def test_responses(application: ServedApplication, client: openai.OpenAI) -> None:
    """Say what they were sampled with."""
    text = CHAT[0]["content"]
    answer = client.responses.create(model=MODEL, input=text)
    assert (answer.temperature, answer.top_p, answer.status) == (0, 0.75, "incomplete")
    assert answer.usage is not None
    assert answer.usage.output_tokens == NUM_TOKENS
    assert answer.usage.input_tokens == num_prompt_tokens(application)
    chosen = client.responses.create(
        model=MODEL,
        input=text,
        temperature=0.5,
        max_output_tokens=3,
        reasoning={"effort": "none"},
    )
    assert (chosen.temperature, chosen.top_p) == (0.5, 0.75)
    assert chosen.usage is not None
    assert chosen.usage.output_tokens == 3
    assert chosen.usage.input_tokens == num_prompt_tokens(application, enable_thinking=False)


def test_messages(application: ServedApplication) -> None:
    """``thinking`` goes before the default, in either direction."""
    url = application.base_url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        options: dict[str, Any] = {"model": MODEL, "messages": CHAT}
        both = num_prompt_tokens(application)
        off = num_prompt_tokens(application, enable_thinking=False)
        assert claude.messages.count_tokens(**options).input_tokens == both
        options["thinking"] = {"type": "disabled"}
        assert claude.messages.count_tokens(**options).input_tokens == off
        usage = claude.messages.create(max_tokens=3, **options).usage
        assert usage.output_tokens == 3
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == off
