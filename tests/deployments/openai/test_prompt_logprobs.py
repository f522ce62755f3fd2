"""Log probabilities of prompts over HTTP, as evaluation harnesses ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.models import resolve_model
from tests.serving import ServedApplication

pytestmark = pytest.mark.ray

MODEL = "hdserve-mini"
TEXT = "I want to book a table → for two → in San José, and"
TOKENIZER = load_tokenizer(MODEL)
EVALUATION: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}
"""What lm-eval's ``local-completions`` sends with a list of prompts, as token ids."""


@pytest.fixture(scope="module")
def stock() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32).eval()


def stock_logprobs(stock: Any, token_ids: list[int]) -> torch.Tensor:
    """``[len(token_ids), vocab_size]``: of what follows each token."""
    with torch.inference_mode():
        logits = stock(torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.as_tensor(logits.log_softmax(dim=-1))


def likelihood(logprobs: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """What a harness reads: how likely the tokens behind the context are, all but the one that was
    generated, and whether each was the likeliest."""
    continuation = slice(num_context, -1)
    values = logprobs["token_logprobs"][continuation]
    tops = logprobs["top_logprobs"][continuation]
    is_greedy = all(max(top.values()) == value for value, top in zip(values, tops, strict=True))
    return sum(values), is_greedy


def greedy(stock: Any, context: list[int], num_tokens: int) -> list[int]:
    found = list(context)
    for _ in range(num_tokens):
        found.append(int(stock_logprobs(stock, found)[-1].argmax()))
    return found[len(context) :]


def test_an_evaluation_harness(application: ServedApplication, stock: Any) -> None:
    """Likelihoods of continuations, and whether they are greedy, are those of transformers; all
    prompts in one request, short and long, twice, as if answers were compared."""
    context = TOKENIZER.encode(TEXT)
    likely = greedy(stock, context, 6)
    unlikely = TOKENIZER.encode(" on the other side of the moon", adds_special_tokens=False)
    assert greedy(stock, context, len(unlikely)) != unlikely
    pairs = [(context, likely), (context, unlikely), (context[:1], [7]), (context * 9, likely)]
    prompts = [context + continuation for context, continuation in pairs]
    wanted = [stock_logprobs(stock, prompt) for prompt in prompts]
    for _ in range(2):
        answer = httpx.post(
            f"{application.base_url}/v1/completions",
            json={**EVALUATION, "prompt": prompts},
            timeout=120,
        )
        choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
        assert len(choices) == len(prompts)
        for (context, continuation), rows, choice in zip(pairs, wanted, choices, strict=True):
            scored = [*zip(rows, (context + continuation)[1:], strict=False)]
            values = [float(row[token]) for row, token in scored]
            found, is_greedy = likelihood(choice["logprobs"], len(context))
            assert found == pytest.approx(sum(values[len(context) - 1 :]), abs=1e-3)
            likeliest = rows[len(context) - 1 : -1].argmax(dim=-1).tolist()
            assert is_greedy == (likeliest == continuation)
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("prompt", [TEXT, TOKENIZER.encode(TEXT)], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_the_echo(client: openai.OpenAI, prompt: Any, max_tokens: int) -> None:
    """Text and token ids alike: tokens, values and offsets of the prompt, then of the answer,
    which is what it is without them; whole and streamed, in which the echo comes first."""
    ids = TOKENIZER.encode(TEXT)
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
    plain = client.completions.create(**options, max_tokens=max(max_tokens, 1), logprobs=2)
    options |= {"max_tokens": max_tokens, "echo": True, "logprobs": 2, "n": 2}
    whole = client.completions.create(**options)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(ids)
    for choice in whole.choices:
        assert choice.text == TEXT + (plain.choices[0].text if max_tokens else "")
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.text_offset is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        lengths = {len(values) for values in found.model_dump().values()}
        assert lengths == {len(ids) + (whole.usage.completion_tokens // 2)}
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        scored = zip(found.tokens[1:], found.top_logprobs[1:], strict=True)
        assert all(token in top and len(top) in (2, 3) for token, top in scored)
        assert plain.choices[0].logprobs is not None
        if max_tokens:
            assert choice.finish_reason == plain.choices[0].finish_reason
            assert found.tokens[len(ids) :] == plain.choices[0].logprobs.tokens
            assert found.text_offset[len(ids)] == len(TEXT)
        else:
            assert choice.finish_reason == "length"
        ends = [*found.text_offset[1:], len(choice.text)]
        assert all(first <= second for first, second in pairwise(found.text_offset))
        for token, start, end in zip(found.tokens, found.text_offset, ends, strict=True):
            assert token.startswith("bytes:") or choice.text[start:end] == token
    chunks = [
        chunk.choices[0]
        for chunk in client.completions.create(**options, stream=True)
        if chunk.choices[0].index == 1
    ]
    assert chunks[0].text.startswith(TEXT)
    assert "".join(chunk.text for chunk in chunks) == whole.choices[1].text
    wanted = whole.choices[1].logprobs
    assert wanted is not None
    for name, values in wanted.model_dump().items():
        parts = [chunk.logprobs.model_dump()[name] for chunk in chunks if chunk.logprobs]
        assert len(parts[0]) >= len(ids)
        assert [value for part in parts for value in part] == values


def test_the_echo_alone(client: openai.OpenAI) -> None:
    """``max_tokens: 0`` needs an echo, but no log probabilities."""
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=0, echo=True)
    (choice,) = answer.choices
    assert (choice.text, choice.logprobs, choice.finish_reason) == (TEXT, None, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_long_prompt(client: openai.OpenAI) -> None:
    """As long as the context, with all alternatives there can be."""
    prompt = (TOKENIZER.encode(TEXT) * 200)[:2048]
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=20, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 2048
    assert answer.choices[0].finish_reason == "length"


def right_entries(entries: list[Any], token_ids: list[int], rows: torch.Tensor, num: int) -> None:
    """Whether they say what ``rows``, ``[len(token_ids), vocab_size]``, say of what follows."""
    assert entries[0] is None
    assert len(entries) == len(token_ids)
    for entry, token_id, row in zip(entries[1:], token_ids[1:], rows, strict=False):
        likeliest = row.topk(num).indices.tolist() if num else []
        assert set(entry) == {str(token) for token in (token_id, *likeliest)}
        for key, found in entry.items():
            assert set(found) == {"logprob", "rank", "decoded_token"}
            assert found["logprob"] == pytest.approx(float(row[int(key)]), abs=1e-4)
            assert found["rank"] == int((row >= row[int(key)]).sum())
            text = TOKENIZER.token_bytes(int(key)).decode(errors="replace")
            assert found["decoded_token"] == text


@pytest.mark.parametrize("num", [0, 3])
def test_by_token_id(client: openai.OpenAI, stock: Any, num: int) -> None:
    """As vLLM has them: in each choice of a completion, and beside those of a chat; the same as in
    an echo."""
    extra: dict[str, Any] = {"extra_body": {"prompt_logprobs": num}}
    ids = TOKENIZER.encode(TEXT)
    rows = stock_logprobs(stock, ids)
    options: dict[str, Any] = {"model": MODEL, "prompt": [TEXT, "It"], "temperature": 0, "n": 2}
    answer = client.completions.create(
        **options, max_tokens=2, echo=True, logprobs=1, **extra
    ).model_dump()
    assert len(answer["choices"]) == 4
    for choice in answer["choices"][:2]:
        right_entries(choice["prompt_logprobs"], ids, rows, num)
        values = [entry[str(token)]["logprob"] for entry, token in choice_entries(choice, ids)]
        assert choice["logprobs"]["token_logprobs"][1:-2] == values
        assert all(len(top) in (1, 2) for top in choice["logprobs"]["top_logprobs"][1:])
    plain = client.completions.create(**options, max_tokens=0, **extra).model_dump()
    assert [choice["text"] for choice in plain["choices"]] == [""] * 4
    for found, wanted in zip(plain["choices"], answer["choices"], strict=True):
        assert found["prompt_logprobs"] == wanted["prompt_logprobs"]
        assert found["logprobs"] is None
    messages: Any = [{"role": "user", "content": TEXT}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=1, n=2, **extra
    ).model_dump()
    ids = TOKENIZER.encode_chat(messages, {})
    right_entries(chat["prompt_logprobs"], ids, stock_logprobs(stock, ids), num)


def choice_entries(choice: dict[str, Any], ids: list[int]) -> Iterator[tuple[dict[str, Any], int]]:
    return zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "invalid_value", "max_tokens"),
        ({"max_tokens": -1, "logprobs": 1, "echo": True}, "invalid_value", "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "invalid_value", "min_tokens"),
        ({"logprobs": 21, "echo": True}, "invalid_value", "logprobs"),
        ({"prompt_logprobs": -1}, "unsupported_parameter", "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
        (
            {"prompt": [5] * 2048, "logprobs": 1, "echo": True},
            "context_length_exceeded",
            "prompt",
        ),
    ],
)
def test_what_does_not_go_together(
    client: openai.OpenAI, fields: dict[str, Any], code: str, param: str
) -> None:
    """Each mistake gets 400 and the name of its parameter."""
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 1, **fields}
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/completions", body=body, cast_to=httpx.Response)
    assert (error.value.code, error.value.param) == (code, param)
