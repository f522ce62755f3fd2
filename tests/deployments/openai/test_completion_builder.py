"""Answers in the OpenAI API's shape, checked by the types of the real client."""

from __future__ import annotations

import json

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deployments.events import server_sent_event
from deployments.generation import DraftedToken, Summary, TokenInfo
from deployments.openai.chat_format import ChatFormat
from deployments.openai.completion_builder import CompletionBuilder
from deployments.openai.completion_format import CompletionFormat
from deployments.openai.objects import STREAM_END, error_body, usage
from deployments.parsers.tool_parsers import HermesToolParser
from deployments.prediction import PredictionCounts
from hdserve.core import DraftCounts
from hdserve.errors import (
    EngineStopped,
    HdserveError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
)
from tests.deployments.answers import SUMMARY, builder, collected, delta


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


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
@pytest.mark.parametrize("reason", ["\n\n", 7, None])
def test_what_stopped_a_choice_is_told(
    form: type[ChatFormat] | type[CompletionFormat], reason: str | int | None
) -> None:
    """Beside the reason why it ended, whole and streamed, as vLLM has it; before the end nothing
    is said of it."""
    deltas = [delta("a"), delta("b", finish_reason="stop", stop_reason=reason)]
    (choice,) = collected(form(), *deltas)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    made = builder(form())
    *_, first, last = [chunk["choices"][0] for item in deltas for chunk in made.add(item)]
    assert "stop_reason" not in first
    assert last["stop_reason"] == reason


def test_token_ids_of_a_chat() -> None:
    """Those of the prompt are beside the choices, once, as vLLM has them."""
    first = delta("a", token_ids=(5, 6), prompt_token_ids=(1, 2, 3))
    deltas = [first, delta("", token_ids=(7,)), delta("b", token_ids=(8,), finish_reason="stop")]
    other = delta("c", choice=1, token_ids=(9,), finish_reason="stop")
    whole = collected(ChatFormat(shows_token_ids=True), *deltas, other, num_choices=2)
    assert whole["prompt_token_ids"] == [1, 2, 3]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[5, 6, 7, 8], [9]]
    made = builder(ChatFormat(shows_token_ids=True), 2)
    chunks = [chunk for item in (*deltas, other) for chunk in made.add(item)]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[], [], [5, 6], [7], [8], [9]]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2, 3], *[None] * 5]
    without = collected(ChatFormat(), *deltas)
    assert "token_ids" not in without["choices"][0]
    assert "prompt_token_ids" not in without


def test_token_ids_of_calls() -> None:
    """Each chunk has some, or none: a call that begins and goes on at once is two."""
    form = ChatFormat(HermesToolParser, shows_token_ids=True)
    written = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    made = builder(form)
    chunks = [
        chunk["choices"][0]
        for item in (delta("Well", token_ids=(1,)), delta(written, token_ids=(2, 3)))
        for chunk in made.add(item)
    ]
    assert len(chunks) > 2
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [1, 2, 3]


def test_token_ids_of_completions() -> None:
    """Each choice has those of its own prompt, in a stream where it begins."""
    deltas = [
        delta("a", prompt=0, token_ids=(5,), prompt_token_ids=(1, 2)),
        delta("b", prompt=1, token_ids=(6,), prompt_token_ids=(3,)),
        delta("c", prompt=1, choice=1, token_ids=(7,)),
        delta("d", prompt=0, token_ids=(8,)),
    ]
    form = CompletionFormat(shows_token_ids=True)
    choices = collected(form, *deltas, num_choices=2)["choices"]
    found = {
        choice["index"]: (choice["prompt_token_ids"], choice["token_ids"]) for choice in choices
    }
    assert found == {0: ([1, 2], [5, 8]), 2: ([3], [6]), 3: ([3], [7])}
    made = builder(CompletionFormat(shows_token_ids=True), 2)
    chunks = [chunk["choices"][0] for item in deltas for chunk in made.add(item)]
    assert [chunk["token_ids"] for chunk in chunks] == [[5], [6], [7], [8]]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2], [3], [3], None]


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
        {"role": "assistant", "content": None},
        {"reasoning_content": "Two and"},
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
    ended_at_once = collected(form, delta("", reasoning="", finish_reason="stop"))
    assert ended_at_once["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
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
    """The roles of all choices come alone and first, in order; the finish reason with the last."""
    made = builder(ChatFormat(), 2)
    deltas = [
        delta("b", 1),
        delta("a"),
        delta("c"),
        delta("", 1, finish_reason="stop"),
        delta("", finish_reason="length"),
    ]
    chunks = [
        ChatCompletionChunk.model_validate(chunk) for item in deltas for chunk in made.add(item)
    ]
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.index for choice in choices] == [0, 1, 1, 0, 0, 1, 0]
    assert [choice.delta.to_dict() for choice in choices] == [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ""},
        {"content": "b"},
        {"content": "a"},
        {"content": "c"},
        {},
        {},
    ]
    assert [choice.finish_reason for choice in choices] == [*[None] * 5, "stop", "length"]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-r1"}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_the_roles_come_with_what_is_first() -> None:
    """Not with a token that is half a character, before it is known what a choice begins with."""
    made = builder(ChatFormat())
    assert made.add(delta("")) == []
    role, text = [chunk["choices"][0]["delta"] for chunk in made.add(delta("é"))]
    assert (role, text) == ({"role": "assistant", "content": ""}, {"content": "é"})


def test_the_logprobs_come_behind_the_role() -> None:
    """Even without text: clients take those of a first chunk twice."""
    held = delta("", logprobs=(TokenInfo(b"\xc3", -1.0, ()),))
    role, first = [chunk["choices"][0] for chunk in builder(ChatFormat()).add(held)]
    assert role["delta"] == {"role": "assistant", "content": None}
    assert (role["logprobs"], role["finish_reason"]) == (None, None)
    assert len(first["logprobs"]["content"]) == 1


def test_an_answer_without_tokens_has_an_empty_text() -> None:
    """As the whole answer has, in each choice."""
    made = builder(ChatFormat(), 2)
    state = ChatCompletionStreamState()
    for item in (delta("", finish_reason="stop"), delta("", 1, finish_reason="stop")):
        for chunk in made.add(item):
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    found = state.get_final_completion()
    assert [choice.message.content for choice in found.choices] == ["", ""]
    thought = builder(ChatFormat()).add(delta("", reasoning="", finish_reason="stop"))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in thought] == [None, None]


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
def test_there_is_no_chunk_that_tells_nothing(
    form: type[ChatFormat] | type[CompletionFormat],
) -> None:
    """Of tokens whose text is held back; those that were asked for usage, log probabilities or
    sources tell that."""
    made = CompletionBuilder(form(), "m", "r1", 1, includes_usage=True)
    counting = CompletionBuilder(form(), "m", "r1", 1, counts_in_chunks=True)
    for each in (made, counting):
        each.add(delta("a"))
    assert made.add(delta("")) == []
    for held in (
        delta("", logprobs=(TokenInfo(b"b", -1.0, ()),)),
        delta("", texts=("b",)),
        delta("", finish_reason="stop"),
    ):
        assert len(made.add(held)) == 1
    (chunk,) = counting.add(delta(""))
    assert chunk["usage"]["completion_tokens"] == 2


def test_the_last_chunk_has_usage_and_no_choices() -> None:
    """After the choices comes what they cost and what drafting did; chunks before it say that it
    will, as the OpenAI API has it."""
    assert builder(ChatFormat()).end(SUMMARY) == []
    assert "usage" not in builder(ChatFormat()).add(delta("a"))[0]
    made = CompletionBuilder(ChatFormat(), "m", "r1", 1, includes_usage=True)
    assert made.add(delta("a"))[0]["usage"] is None
    (body,) = made.end(SUMMARY)
    chunk = ChatCompletionChunk.model_validate(body)
    assert chunk.choices == []
    assert chunk.usage is not None
    assert chunk.usage.total_tokens == 18
    assert body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 6


def test_chunks_say_how_many_tokens_there_are_so_far() -> None:
    """Of the choice of the chunk and its prompt, for clients that count tokens by chunks, which
    here may have several."""
    made = CompletionBuilder(ChatFormat(), "m", "r1", 2, includes_usage=True, counts_in_chunks=True)
    deltas = [
        delta("ab", 0, token_ids=(1, 2), sources=(0, 0), num_prompt_tokens=7),
        delta("c", 1, num_prompt_tokens=7),
        delta("d", 0, num_prompt_tokens=7, finish_reason="stop"),
    ]
    chunks = [chunk for each in deltas for chunk in made.add(each)]
    found = [ChatCompletionChunk.model_validate(chunk).usage for chunk in chunks]
    counts = [(one.prompt_tokens, one.completion_tokens, one.total_tokens) for one in found if one]
    assert counts == [(7, 0, 7), (7, 0, 7), (7, 2, 9), (7, 1, 8), (7, 3, 10)]


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
    """Ratios of nothing are numbers, as clients of vLLM expect."""
    made = builder(ChatFormat())
    body = made.whole(Summary(1, 2, DraftCounts(num_steps=2), "abc"))
    drafting = body["metrics"]["speculative_decoding"]
    assert drafting["mean_acceptance_length"] == 1.0
    assert drafting["draft_acceptance_rate"] == 0.0
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


def test_chunks_with_sources() -> None:
    """Where each token came from, and the tree it was verified with, when it was asked for."""
    made = builder(ChatFormat())
    draft = (
        DraftedToken(" a", 1, 0, True),
        DraftedToken(" b", 2, 1, False),
        DraftedToken(" c", 3, 0, False),
    )
    asked = delta(" a!", token_ids=(5, 6), sources=(1, 0), texts=(" a", "!"), draft=draft)
    role, choice = [chunk["choices"][0] for chunk in made.add(asked)]
    assert (role["token_sources"], role["draft"]) == ([], [])
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


def test_each_choice_of_each_chunk_has_sources() -> None:
    """Also where a call begins and goes on at once, which makes several chunks of one step."""
    made = builder(ChatFormat(HermesToolParser))
    written = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    choices = [
        chunk["choices"][0]
        for item in (
            delta("Well", token_ids=(1,), sources=(0,), texts=("Well",)),
            delta(written, token_ids=(2, 3), sources=(1, 0), texts=(written, "")),
        )
        for chunk in made.add(item)
    ]
    assert len(choices) > 2
    assert all("draft" in choice for choice in choices)
    texts = [token["text"] for choice in choices for token in choice["token_sources"]]
    assert texts == ["Well", written, ""]
