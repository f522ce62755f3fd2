"""Answers in the OpenAI API's shape, checked by the types of the real client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deployments.chat_format import ChatFormat
from deployments.completion_format import CompletionFormat
from deployments.generation import Alternative, Delta, DraftedToken, Summary, TokenInfo
from deployments.openai_objects import STREAM_END, error_body, server_sent_event, usage
from deployments.prediction import PredictionCounts
from deployments.response_builder import ResponseBuilder, ResponseFormat
from deployments.tool_parsers import HermesToolParser
from hdserve.core import DraftCounts, Source
from hdserve.errors import (
    EngineStopped,
    HdserveError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
)

COUNTS = DraftCounts(
    num_steps=5,
    num_drafts=4,
    num_draft_tokens=20,
    num_accepted_tokens=6,
    accepted_by_depth={Source.MODEL: [0, 2], Source.CONTEXT: [3, 0, 1]},
    draft_tokens_by_source={Source.MODEL: 10, Source.CONTEXT: 10},
    num_drafts_by_accepted=[1, 1, 1, 1],
)
SUMMARY = Summary(
    num_prompt_tokens=7, num_output_tokens=11, drafts=COUNTS, replica="abc", first_token_s=0.25
)
HALVES = (
    TokenInfo(b"\xc3", -0.5, (Alternative(b"\xc3", -0.5), Alternative(b"\xe4", -1.0))),
    TokenInfo(b"\xa9", -0.25, ()),
    TokenInfo(b"z", -0.25, ()),
)
LOGPROBS = (
    TokenInfo("é".encode(), -0.5, (Alternative("é".encode(), -0.5), Alternative(b"b", -1.0))),
    TokenInfo(b"yz", -0.25, ()),
)


def delta(text: str, choice: int = 0, prompt: int = 0, **fields: Any) -> Delta:
    defaults: dict[str, Any] = {
        "token_ids": (1,),
        "sources": (0,),
        "logprobs": None,
        "finish_reason": None,
    }
    return Delta(prompt_index=prompt, choice_index=choice, text=text, **{**defaults, **fields})


def builder(form: ResponseFormat, num_choices: int = 1) -> ResponseBuilder:
    return ResponseBuilder(form, "the-model", "r1", num_choices)


def collected(form: ResponseFormat, *deltas: Delta, num_choices: int = 1) -> dict[str, Any]:
    made = builder(form, num_choices)
    for item in deltas:
        made.collect(item)
    return made.whole(SUMMARY)


def test_a_whole_chat_answer() -> None:
    """The deltas of an answer become one object that the real client reads."""
    body = collected(ChatFormat(), delta("Hello"), delta(" there", finish_reason="stop"))
    answer = ChatCompletion.model_validate(body)
    (choice,) = answer.choices
    assert choice.message.content == "Hello there"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert (answer.id, answer.model, answer.object) == (
        "chatcmpl-r1",
        "the-model",
        "chat.completion",
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == 11
    assert answer.usage.total_tokens == 18


def test_the_usage_of_a_prediction() -> None:
    """In the fields of the real client, for requests that had one."""
    assert "completion_tokens_details" not in usage(SUMMARY)
    summary = SUMMARY._replace(prediction=PredictionCounts(5, 3))
    details = CompletionUsage.model_validate(usage(summary)).completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (5, 3)


def test_the_usage_of_reasoning() -> None:
    """It is a part of the completion; where it is not told apart nothing is said."""
    summary = SUMMARY._replace(num_reasoning_tokens=4, prediction=PredictionCounts(5, 3))
    found = CompletionUsage.model_validate(usage(summary))
    details = found.completion_tokens_details
    assert details is not None
    assert (details.reasoning_tokens, details.accepted_prediction_tokens) == (4, 5)
    assert found.completion_tokens == 11


def test_reasoning_is_beside_the_content() -> None:
    """Whole, and in the chunks in which it comes; an answer cut off in it has no content."""
    form = ChatFormat()
    deltas = [
        delta("", reasoning="Two and"),
        delta("Fo", reasoning=" two."),
        delta("ur.", finish_reason="stop"),
    ]
    (choice,) = ChatCompletion.model_validate(collected(form, *deltas)).choices
    assert choice.message.content == "Four."
    assert choice.message.model_extra == {"reasoning_content": "Two and two."}
    made = builder(form)
    chunks = [ChatCompletionChunk.model_validate(c) for item in deltas for c in made.add(item)]
    assert [chunk.choices[0].delta.to_dict() for chunk in chunks] == [
        {"role": "assistant", "content": "", "reasoning_content": "Two and"},
        {"content": "Fo", "reasoning_content": " two."},
        {"content": "ur."},
    ]
    cut_off = collected(form, delta("", reasoning="Two", finish_reason="length"))
    assert cut_off["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Two",
    }


def test_calls_behind_reasoning() -> None:
    """What the model thinks of calling is no call."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    form = ChatFormat(HermesToolParser)
    body = collected(form, delta(call, reasoning=call, finish_reason="stop"))
    message = body["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert (message["content"], message["reasoning_content"]) == (None, call)
    assert body["choices"][0]["finish_reason"] == "tool_calls"


def test_a_whole_completion() -> None:
    """The same for ``/v1/completions``."""
    body = collected(CompletionFormat(), delta("a"), delta("b", finish_reason="length"))
    answer = Completion.model_validate(body)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.id, answer.object) == ("cmpl-r1", "text_completion")


def test_chat_chunks() -> None:
    """The role comes once per choice, with the first chunk; the finish reason with the last."""
    made = builder(ChatFormat(), 2)
    deltas = [
        delta("a"),
        delta("b", 1),
        delta("c"),
        delta("", 1, finish_reason="stop"),
        delta("", finish_reason="length"),
    ]
    chunks = [
        ChatCompletionChunk.model_validate(chunk) for item in deltas for chunk in made.add(item)
    ]
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.index for choice in choices] == [0, 1, 0, 1, 0]
    assert [choice.delta.role for choice in choices] == ["assistant", "assistant", None, None, None]
    assert [choice.delta.content for choice in choices] == ["a", "b", "c", None, None]
    assert [choice.finish_reason for choice in choices] == [None, None, None, "stop", "length"]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-r1"}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_an_empty_first_chunk_has_content() -> None:
    """A first token that is half a character still opens the answer."""
    chunk = ChatCompletionChunk.model_validate(builder(ChatFormat()).add(delta(""))[0])
    assert chunk.choices[0].delta.content == ""
    assert chunk.choices[0].delta.role == "assistant"


def test_the_last_chunk_has_usage_and_no_choices() -> None:
    """After the choices comes what they cost and what drafting did; chunks before it say that it
    will, as the OpenAI API has it."""
    assert builder(ChatFormat()).end(SUMMARY) == []
    assert "usage" not in builder(ChatFormat()).add(delta("a"))[0]
    made = ResponseBuilder(ChatFormat(), "m", "r1", 1, includes_usage=True)
    assert made.add(delta("a"))[0]["usage"] is None
    (body,) = made.end(SUMMARY)
    chunk = ChatCompletionChunk.model_validate(body)
    assert chunk.choices == []
    assert chunk.usage is not None
    assert chunk.usage.total_tokens == 18
    assert body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 6


@pytest.mark.parametrize("num_choices", [1, 3])
def test_choices_are_numbered_over_prompts(num_choices: int) -> None:
    """Choice ``c`` of prompt ``p`` has index ``p * n + c``, in whatever order the ends come."""
    deltas = [
        delta(f"{prompt}{choice}", choice, prompt, finish_reason="stop")
        for choice in reversed(range(num_choices))
        for prompt in reversed(range(2))
    ]
    body = collected(CompletionFormat(), *deltas, num_choices=num_choices)
    found = [(choice["index"], choice["text"]) for choice in body["choices"]]
    wanted = [f"{prompt}{choice}" for prompt in range(2) for choice in range(num_choices)]
    assert found == list(enumerate(wanted))


def test_echo_comes_once_before_each_answer() -> None:
    """With ``echo`` each choice begins with its own prompt, streamed and whole."""
    deltas = [delta("x", 0, 0), delta("y", 0, 1), delta("z", 0, 0, finish_reason="stop")]
    echoes = ("one ", "two ")
    whole = collected(CompletionFormat(echoes), *deltas)
    assert [choice["text"] for choice in whole["choices"]] == ["one xz", "two y"]
    made = builder(CompletionFormat(echoes))
    texts = [made.add(item)[0]["choices"][0]["text"] for item in deltas]
    assert texts == ["one x", "two y", "z"]


def test_chat_logprobs() -> None:
    """Tokens with their bytes, log probabilities and alternatives, over all deltas."""
    body = collected(
        ChatFormat(),
        delta("é", logprobs=LOGPROBS[:1]),
        delta("yz", logprobs=LOGPROBS[1:], finish_reason="stop"),
    )
    logprobs = ChatCompletion.model_validate(body).choices[0].logprobs
    assert logprobs is not None
    first, second = logprobs.content or []
    assert (first.token, first.logprob, first.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [(item.token, item.logprob) for item in first.top_logprobs] == [("é", -0.5), ("b", -1)]
    assert second.top_logprobs == []


def test_completion_logprobs() -> None:
    """Parallel lists, with the offset of each token in the text, also across chunks."""
    parts = [
        delta("é", logprobs=LOGPROBS[:1]),
        delta("yz", logprobs=LOGPROBS[1:], finish_reason="stop"),
    ]
    logprobs = Completion.model_validate(collected(CompletionFormat(), *parts)).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["é", "yz"]
    assert logprobs.token_logprobs == [-0.5, -0.25]
    assert logprobs.top_logprobs == [{"é": -0.5, "b": -1.0}, {}]
    assert logprobs.text_offset == [0, 1]
    made = builder(CompletionFormat())
    chunks = [made.add(item)[0]["choices"][0]["logprobs"] for item in parts]
    assert [chunk["text_offset"] for chunk in chunks] == [[0], [1]]


def test_an_echo_has_logprobs() -> None:
    """The prompt's come first, with offsets from the start of its text, where the tokenizer put a
    token before it, too; those of the answer go on behind it, whole and streamed."""
    scored = (
        TokenInfo(b"<s>", None, ()),
        TokenInfo(b"\xc3", -1.5, (Alternative(b"a", -0.5),)),
        TokenInfo(b"\xa9", -0.25, ()),
        TokenInfo(b"on", -0.75, ()),
    )
    parts = [
        delta("yz", logprobs=LOGPROBS[1:], prompt_logprobs=scored),
        delta("é", logprobs=LOGPROBS[:1], finish_reason="stop"),
    ]
    for bos, offsets in (("", [0, 0, 0, 1, 3, 5]), ("<s>", [0, 3, 3, 4, 6, 8])):
        (body,) = collected(CompletionFormat((f"{bos}éon",)), *parts)["choices"]
        assert body["text"] == f"{bos}éonyzé"
        assert body["logprobs"] == {
            "tokens": ["<s>", "bytes:\\xc3", "bytes:\\xa9", "on", "yz", "é"],
            "token_logprobs": [None, -1.5, -0.25, -0.75, -0.25, -0.5],
            "top_logprobs": [None, {"a": -0.5}, {}, {}, {}, {"é": -0.5, "b": -1.0}],
            "text_offset": offsets,
        }
        made = builder(CompletionFormat((f"{bos}éon",)))
        chunks = [made.add(part)[0]["choices"][0] for part in parts]
        assert [chunk["text"] for chunk in chunks] == [f"{bos}éonyz", "é"]
        for name, values in body["logprobs"].items():
            assert [chunk["logprobs"][name] for chunk in chunks] == [values[:5], values[5:]]


SCORED = (
    TokenInfo(b"<s>", None, (), 1),
    TokenInfo(b"a", -1.5, (Alternative(b"b", -0.5, 6), Alternative(b"a", -1.5, 5)), 5, 2),
    TokenInfo(b"\xc3", -3.0, (Alternative(b"b", -0.5, 6), Alternative(b"a", -1.5, 5)), 7, 42),
)
B = {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
A = {"logprob": -1.5, "rank": 2, "decoded_token": "a"}
HALF = {"logprob": -3.0, "rank": 42, "decoded_token": "\ufffd"}


@pytest.mark.parametrize(
    ("num_top", "shown"),
    [
        (0, [None, {"5": A}, {"7": HALF}]),
        (1, [None, {"5": A, "6": B}, {"7": HALF, "6": B}]),
        (2, [None, {"5": A, "6": B}, {"7": HALF, "6": B, "5": A}]),
    ],
)
def test_a_prompts_logprobs_by_token_id(num_top: int, shown: list[Any]) -> None:
    """The token that is there, whatever its rank, and the likeliest; of a completion in each
    choice, of a chat once, though they came with the second choice alone."""
    parts = [
        delta("x", choice, finish_reason="length", prompt_logprobs=SCORED if choice else ())
        for choice in (1, 0)
    ]
    form = CompletionFormat(num_prompt_logprobs=num_top)
    made = builder(form, 2)
    for part in parts:
        made.collect(part)
    completion = made.whole(SUMMARY)
    assert [choice["prompt_logprobs"] for choice in completion["choices"]] == [shown, shown]
    assert [choice["logprobs"] for choice in completion["choices"]] == [None, None]
    made = builder(ChatFormat(num_prompt_logprobs=num_top), 2)
    for part in parts:
        made.collect(part)
    chat = made.whole(SUMMARY)
    assert chat["prompt_logprobs"] == shown
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])
    ChatCompletion.model_validate(chat)
    json.dumps([chat, completion], allow_nan=False)


def test_prompt_logprobs_are_no_echo() -> None:
    """Beside ``logprobs`` they are not among those of the answer; with an echo each has the number
    that was asked for."""
    part = delta("yz", logprobs=LOGPROBS[1:], finish_reason="stop", prompt_logprobs=SCORED)
    (choice,) = collected(CompletionFormat(num_logprobs=1, num_prompt_logprobs=2), part)["choices"]
    assert choice["logprobs"]["tokens"] == ["yz"]
    (choice,) = collected(CompletionFormat(num_logprobs=1), part)["choices"]
    assert "prompt_logprobs" not in choice
    form = CompletionFormat(("a\ufffd",), num_logprobs=1, num_prompt_logprobs=2)
    (choice,) = collected(form, part)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"b": -0.5}, {}]
    assert choice["prompt_logprobs"][1] == {"5": A, "6": B}


def test_each_choice_has_the_echo_of_its_own_prompt() -> None:
    """Whose log probabilities came once, before the others' first deltas; whole and streamed."""
    parts = [
        delta("x", 1, 1, logprobs=LOGPROBS[1:], prompt_logprobs=SCORED[:2]),
        delta("x", 1, 0, logprobs=LOGPROBS[1:], prompt_logprobs=SCORED),
        *(delta("x", 0, prompt, logprobs=LOGPROBS[1:]) for prompt in (0, 1)),
        *(delta("y", choice, 1, logprobs=LOGPROBS[1:]) for choice in (0, 1)),
    ]
    form = CompletionFormat(("<s>a\ufffd", "<s>a"))
    echoes = [["<s>", "a", "bytes:\\xc3"]] * 2 + [["<s>", "a"]] * 2
    whole, streamed = builder(form, 2), builder(CompletionFormat(("<s>a\ufffd", "<s>a")), 2)
    for part in parts:
        whole.collect(part)
    choices = whole.whole(SUMMARY)["choices"]
    answers = [["yz"]] * 2 + [["yz", "yz"]] * 2
    found = [choice["logprobs"]["tokens"] for choice in choices]
    assert found == [[*echo, *answer] for echo, answer in zip(echoes, answers, strict=True)]
    chunks = [streamed.add(part)[0]["choices"][0] for part in parts]
    for index in range(4):
        tokens = [chunk["logprobs"]["tokens"] for chunk in chunks if chunk["index"] == index]
        assert tokens[0] == [*echoes[index], "yz"]
        assert tokens[1:] == [["yz"]] * (index // 2)


def test_an_echo_alone_has_no_logprobs() -> None:
    """Those that were computed for ``max_tokens: 0`` are not shown where nobody asked."""
    part = delta("", finish_reason="length", prompt_logprobs=(TokenInfo(b"a", None, ()),))
    (choice,) = collected(CompletionFormat(("a",)), part)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("a", None)


def test_of_two_tokens_with_one_text_the_likelier_is_shown() -> None:
    """So that the largest value stays that of the likeliest token."""
    twins = (Alternative(b"\n", -0.5), Alternative(b"\n", -3.0))
    part = delta("x", logprobs=(TokenInfo(b"x", -1.0, twins),))
    (choice,) = collected(CompletionFormat(), part)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\n": -0.5}]


def test_offsets_are_counted_per_choice() -> None:
    """The tokens of one choice do not move the offsets of another."""
    made = builder(CompletionFormat(), 2)
    for choice in (0, 1):
        chunk = made.add(delta("é", choice, logprobs=LOGPROBS))[0]
        assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_metrics_of_drafting() -> None:
    """The field names of vLLM, accepted tokens by source, and ratios that add up."""
    found = collected(ChatFormat(), delta("a"))["metrics"]
    assert found == {
        "replica": "abc",
        "time_to_first_token_s": 0.25,
        "speculative_decoding": {
            "mean_acceptance_length": 2.5,
            "draft_acceptance_rate": 0.3,
            "acceptance_histogram": [1, 1, 1, 1],
            "num_spec_steps": 4,
            "num_steps": 5,
            "num_draft_tokens": 20,
            "num_accepted_draft_tokens": 6,
            "accepted_by_source": {"context": 4, "model": 2},
        },
    }


def test_metrics_without_drafts() -> None:
    """Ratios of nothing are null, not zero and not an error."""
    made = builder(ChatFormat())
    body = made.whole(Summary(1, 2, DraftCounts(num_steps=2), "abc"))
    drafting = body["metrics"]["speculative_decoding"]
    assert drafting["mean_acceptance_length"] is None
    assert drafting["draft_acceptance_rate"] is None
    assert drafting["accepted_by_source"] == {}
    json.dumps(body, allow_nan=False)


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (InvalidRequest("wrong", "top_p"), "invalid_request_error", "top_p", "invalid_value"),
        (
            PromptTooLong("long", "prompt"),
            "invalid_request_error",
            "prompt",
            "context_length_exceeded",
        ),
        (ModelNotFound("none", "model"), "invalid_request_error", "model", "model_not_found"),
        (Overloaded("busy"), "rate_limit_error", None, "overloaded"),
        (EngineStopped("gone"), "server_error", None, "engine_stopped"),
        (HdserveError("oh"), "server_error", None, "internal_error"),
    ],
)
def test_errors(error: HdserveError, kind: str, param: str | None, code: str) -> None:
    """Every error is an object of message, type, parameter and slug."""
    assert error_body(error) == {
        "error": {"message": error.message, "type": kind, "param": param, "code": code}
    }


def test_events() -> None:
    """An event is one line of JSON that any text survives, and the stream has its end."""
    event = server_sent_event({"text": "a\nb\u2028\ud83d é"})
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: ")) == {"text": "a\nb\u2028\ud83d é"}
    assert STREAM_END == b"data: [DONE]\n\n"


def test_tokens_that_are_parts_of_characters() -> None:
    """Their bytes are the real ones, their names in completions distinct, and offsets count the
    characters they make together."""
    body = collected(ChatFormat(), delta("éz", logprobs=HALVES, finish_reason="stop"))
    tokens = ChatCompletion.model_validate(body).choices[0].logprobs
    assert tokens is not None
    assert tokens.content is not None
    assert b"".join(bytes(token.bytes or ()) for token in tokens.content).decode() == "éz"
    body = collected(CompletionFormat(), delta("éz", logprobs=HALVES, finish_reason="stop"))
    found = Completion.model_validate(body).choices[0].logprobs
    assert found is not None
    assert found.tokens == ["bytes:\\xc3", "bytes:\\xa9", "z"]
    assert found.top_logprobs is not None
    assert set(found.top_logprobs[0]) == {"bytes:\\xc3", "bytes:\\xe4"}
    assert found.text_offset == [0, 0, 1]


@pytest.mark.parametrize("first", [(b"<s>", b" ab"), (b" ab",), (b"ab",)])
def test_what_a_tokenizer_puts_before_a_prompt_takes_no_place(first: tuple[bytes, ...]) -> None:
    """A special token, and the space of SentencePiece's first token."""
    tokens = (*first, b" ab", b"c")
    prompt = tuple(TokenInfo(data, -1.0, ()) for data in tokens)
    body = collected(
        CompletionFormat(("ab abc",)),
        delta("d", logprobs=(TokenInfo(b"d", -1.0, ()),), finish_reason="stop")._replace(
            prompt_logprobs=prompt
        ),
    )
    found = Completion.model_validate(body).choices[0].logprobs
    assert found is not None
    assert found.text_offset == [*[0] * len(first), 2, 5, 6]


def test_chunks_with_sources() -> None:
    """Where each token came from, and the tree it was verified with, when it was asked for."""
    made = builder(ChatFormat())
    draft = (
        DraftedToken(" a", 1, 0, True),
        DraftedToken(" b", 2, 1, False),
        DraftedToken(" c", 3, 0, False),
    )
    asked = delta(" a!", token_ids=(5, 6), sources=(1, 0), texts=(" a", "!"), draft=draft)
    (choice,) = made.add(asked)[0]["choices"]
    assert choice["token_sources"] == [
        {"text": " a", "source": "context"},
        {"text": "!", "source": "plain"},
    ]
    assert choice["draft"] == [
        {"text": " a", "source": "context", "parent": -1, "accepted": True},
        {"text": " b", "source": "model", "parent": 0, "accepted": False},
        {"text": " c", "source": "statistics", "parent": -1, "accepted": False},
    ]
    (choice,) = made.add(delta("b"))[0]["choices"]
    assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
