"""Reasoning and templates as clients meet them.

No bundled model reasons.  Two models of one server are the same but that the reasoning of one is
told apart; both have a token for each mark, a template that opens the reasoning, and requests whose
``logit_bias`` makes the closing mark likely.  What one writes, the other has to give apart.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.models import bundled_model_path
from tests.reasoning import with_think_marks
from tests.serving import ServedApplication

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PLAIN, THINKER = "plain", "thinker"
CLOSE = "</think>"
QUESTION: list[Any] = [{"role": "user", "content": "I want to book a table for two in San Jose."}]
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined -%}
<think>{{ message.reasoning_content }}</think>
{%- endif %}
{{- message.content }}<|im_end|>
{% endfor %}{{ tools | default("", true) }}<|im_start|>assistant
<think>"""
SEEDS = range(16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = bundled_model_path("hdserve-tiny")
    assert source is not None
    directory = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(source, directory)
    with_think_marks(directory)
    return directory


@pytest.fixture(scope="module")
def application(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[ServedApplication]:
    directory = tmp_path_factory.mktemp("serve")
    template = directory / "reasoning.jinja"
    template.write_text(TEMPLATE)
    shared = {
        "model": str(model),
        "chat_template": str(template),
        "tool_parser": "hermes",
        "drafting": {"adapts_budget": False},
        "engine": {"dtype": "float32", "exact": True},
    }
    models = [{"name": PLAIN, **shared}, {"name": THINKER, "reasoning_parser": "think", **shared}]
    with ServedApplication(directory, {"models": models}) as served:
        yield served


@pytest.fixture(scope="module")
def options(model: Path) -> dict[str, Any]:
    """Of requests that close the reasoning sooner or later."""
    (closing,) = load_tokenizer(str(model)).encode(CLOSE, adds_special_tokens=False)
    return {
        "messages": QUESTION,
        "temperature": 1.0,
        "max_tokens": 40,
        "logit_bias": {str(closing): 9},
        "logprobs": True,
        "extra_body": {"ignore_eos": True},
    }


def expected(raw: str) -> tuple[str | None, str | None]:
    """Reasoning and content of what the model wrote."""
    reasoning, mark, content = raw.partition(CLOSE)
    if not mark:
        return reasoning.lstrip() or None, None
    return reasoning.strip() or None, content.lstrip() or None


def test_what_is_told_apart(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """Reasoning, content, and the tokens of both; log probabilities are those of all tokens."""
    kinds = set()
    for seed in SEEDS:
        raw = client.chat.completions.create(model=PLAIN, seed=seed, **options)
        split = client.chat.completions.create(model=THINKER, seed=seed, **options)
        (written,), (choice,) = raw.choices, split.choices
        reasoning, content = expected(written.message.content or "")
        message = choice.message
        assert (message.model_extra or {}).get("reasoning_content") == reasoning
        assert (message.content or None) == content
        assert choice.logprobs == written.logprobs
        assert written.logprobs is not None
        tokens = [token.token for token in written.logprobs.content or ()]
        assert split.usage is not None
        details = split.usage.completion_tokens_details
        assert details is not None
        num_tokens = tokens.index(CLOSE) + 1 if CLOSE in tokens else len(tokens)
        assert details.reasoning_tokens == num_tokens
        assert raw.usage is not None
        assert raw.usage.completion_tokens_details is None
        kinds.add((reasoning is not None, content is not None))
    assert {(True, True), (True, False)} <= kinds, "the bias closes too often or too seldom"


def test_streams(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """All choices give what they give whole; the sources of the tokens have all the text."""
    chosen = {**options, "n": 3, "seed": 1}
    raw = client.chat.completions.create(model=PLAIN, **chosen)
    whole = client.chat.completions.create(model=THINKER, **chosen)
    asked: Any = {"include_usage": True, "include_sources": True}
    *chunks, last = client.chat.completions.create(
        model=THINKER, **chosen, stream=True, stream_options=asked
    )
    found = [{"reasoning": "", "content": "", "all": ""} for _ in range(3)]
    for chunk in chunks:
        (choice,) = chunk.choices
        own, extra = found[choice.index], choice.delta.model_extra or {}
        assert not (own["content"] and "reasoning_content" in extra)
        own["reasoning"] += extra.get("reasoning_content", "")
        own["content"] += choice.delta.content or ""
        sources = (choice.model_extra or {})["token_sources"]
        own["all"] += "".join(token["text"] for token in sources)
    for index, own in enumerate(found):
        message = whole.choices[index].message
        assert own["reasoning"] == (message.model_extra or {}).get("reasoning_content", "")
        assert own["content"] == (message.content or "")
        assert own["all"] == raw.choices[index].message.content
    assert last.usage is not None
    assert last.usage.to_dict() == (whole.usage and whole.usage.to_dict())


def test_a_form_is_that_of_the_answer(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """It holds behind the mark, for a call that is required, too; reasoning may take all tokens."""
    tool: Any = {"type": "function", "function": {"name": "f"}}
    ends = set()
    for seed in SEEDS:
        held = {"guided_choice": ["yes", "no </think> no"]}
        chosen = {**options, "seed": seed, "model": THINKER, "max_tokens": 80}
        answer = client.chat.completions.create(**{**chosen, "extra_body": held})
        (choice,) = answer.choices
        assert "reasoning_content" in (choice.message.model_extra or {})
        is_whole = choice.finish_reason == "stop"
        assert choice.message.content in (("yes", "no </think> no") if is_whole else (None,))
        called = client.chat.completions.create(**chosen, tools=[tool], tool_choice="required")
        (choice,) = called.choices
        assert "reasoning_content" in (choice.message.model_extra or {})
        if choice.finish_reason != "length":
            assert choice.message.tool_calls
            assert choice.message.content is None
        ends |= {(is_whole, choice.finish_reason)}
    assert (True, "tool_calls") in ends


def test_responses(client: openai.OpenAI) -> None:
    """What the model thought is an item, streamed and whole; it can be sent back."""
    chosen: dict[str, Any] = {
        "model": THINKER,
        "input": QUESTION[0]["content"],
        "max_output_tokens": 5,
        "temperature": 0,
    }
    whole = client.responses.create(**chosen)
    assert whole.status == "incomplete"
    assert [item.type for item in whole.output] == ["reasoning"]
    (thought,) = whole.output
    assert thought.type == "reasoning"
    (part,) = thought.content or ()
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == whole.usage.output_tokens == 5
    with client.responses.stream(**chosen) as stream:
        events = list(stream)
    assert (
        "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == part.text
    )
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == ""
    tool = {"type": "function", "name": "f"}
    called = client.responses.create(**chosen, tools=[tool], tool_choice="required")
    assert [item.type for item in called.output] == ["reasoning"]
    again = [{"role": "user", "content": "hi"}, thought.to_dict(), QUESTION[0]]
    assert client.responses.create(**{**chosen, "input": again}).output


@pytest.fixture
def claude(application: ServedApplication) -> Iterator[anthropic.Anthropic]:
    url = application.base_url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_messages(claude: anthropic.Anthropic) -> None:
    """What the model thought is a block, streamed and whole; it can be sent back."""
    chosen: dict[str, Any] = {
        "model": THINKER,
        "messages": QUESTION,
        "max_tokens": 5,
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(**chosen)
    (thought,) = whole.content
    assert thought.type == "thinking"
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == whole.usage.output_tokens == 5
    with claude.messages.stream(**chosen) as stream:
        pieces = [event.thinking for event in stream if event.type == "thinking"]
        assert stream.get_final_message().content == whole.content
    assert "".join(pieces) == thought.thinking
    tool = {"name": "f", "input_schema": {"type": "object"}}
    called = claude.messages.create(**chosen, tools=[tool], tool_choice={"type": "any"})
    assert [block.type for block in called.content] == ["thinking"]
    answered = [thought.to_dict(), {"type": "text", "text": "When?"}]
    again = [*QUESTION, {"role": "assistant", "content": answered}, *QUESTION]
    counts = [
        claude.messages.count_tokens(model=THINKER, messages=messages).input_tokens
        for messages in (again, [*QUESTION, {"role": "assistant", "content": "When?"}, *QUESTION])
    ]
    assert counts[0] > counts[1]
    assert claude.messages.create(**{**chosen, "messages": again}).content


def test_the_template_makes_the_prompt(application: ServedApplication) -> None:
    """In every route; it is shown what the assistant thought, and knows tools."""

    def prompt(*messages: dict[str, Any]) -> str:
        body = {"model": THINKER, "messages": messages}
        found = httpx.post(f"{application.base_url}/tokenize", json=body).json()
        body = {"model": THINKER, "tokens": found["tokens"]}
        text: str = httpx.post(f"{application.base_url}/detokenize", json=body).json()["prompt"]
        return text

    end = "<|im_start|>assistant\n<think>"  # Jinja drops a newline at the end of a template
    assert prompt({"role": "user", "content": "hi"}) == f"<|im_start|>user\nhi<|im_end|>\n{end}"
    said = {"role": "assistant", "content": "b"}
    assert prompt({**said, "reasoning_content": "a"}).startswith(
        "<|im_start|>assistant\n<think>a</think>b<|im_end|>"
    )
    assert prompt({**said, "reasoning_content": None}) == prompt(said)
    assert "<think>" not in prompt(said).removesuffix(end)
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"model": THINKER, "messages": QUESTION, "tools": [tool], "max_tokens": 1}
    url = f"{application.base_url}/v1/chat/completions"
    assert httpx.post(url, json=body).status_code == 200, json.dumps(body)
