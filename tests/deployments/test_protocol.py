"""Requests of the OpenAI API: what is taken, what it means, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ParsedChatCompletionMessage,
)

from deployments.generation import GenerationRequest
from deployments.messages import MAX_MESSAGES
from deployments.protocol import (
    MAX_ANSWERS,
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Speculation,
    TokenizeBody,
)
from deployments.request_body import parse_body
from hdserve.core import MAX_TOP_LOGPROBS, SamplingParams, SpeculationParams
from hdserve.errors import InvalidRequest, Unsupported

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> GenerationRequest:
    return ChatBody.parse({"model": "m", "messages": USER, **fields}).to_generation("r")


def completion(**fields: Any) -> GenerationRequest:
    return CompletionBody.parse({"model": "m", "prompt": "x", **fields}).to_generation("r")


def refused(body: type[ChatBody | CompletionBody], **fields: Any) -> InvalidRequest:
    """The error that ``fields`` get; its message is always bounded."""
    required = {"messages": USER} if body is ChatBody else {"prompt": "x"}
    with pytest.raises(InvalidRequest) as caught:
        body.parse({"model": "m", **required, **fields}).to_generation("r")
    assert len(caught.value.message) <= 300
    caught.value.message.encode()
    return caught.value


SAMPLING: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.9, "top_p", 0.9),
    "top_k": (40, "top_k", 40),
    "min_p": (0.05, "min_p", 0.05),
    "repetition_penalty": (1.1, "repetition_penalty", 1.1),
    "presence_penalty": (0.3, "presence_penalty", 0.3),
    "frequency_penalty": (-0.3, "frequency_penalty", -0.3),
    "seed": (2**60, "seed", 2**60),
    "max_tokens": (7, "max_tokens", 7),
    "min_tokens": (3, "min_tokens", 3),
    "stop": ("a", "stop", ("a",)),
    "stop_token_ids": ([3, 4], "stop_token_ids", (3, 4)),
    "logit_bias": ({"5": -100, "7": 1.5}, "logit_bias", {5: -100.0, 7: 1.5}),
    "ignore_eos": (True, "ignore_eos", True),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "include_stop_str_in_output": (True, "include_stop_str_in_output", True),
}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("make", [chat, completion])
def test_sampling_parameters(make: Any, name: str) -> None:
    """Each parameter arrives under our name, in a form the engine takes; ``null`` is not set."""
    value, field, wanted = SAMPLING[name]
    sampling = make(**{name: value}).sampling
    assert sampling[field] == wanted
    assert getattr(SamplingParams(**sampling), field) == wanted
    default = {} if make is chat else {"max_tokens": 16}
    assert make(**{name: None}).sampling == default


def test_every_sampling_field_has_a_parameter() -> None:
    """No field of ``SamplingParams`` is out of reach of a request."""
    others = {"logprobs", "prompt_logprobs", "grammar"}
    assert set(SamplingParams.__slots__) == {*SAMPLING, *others}


def test_what_a_client_leaves_out_is_absent() -> None:
    """Only what was set is passed on, so that the model's own defaults count."""
    assert chat().sampling == {}
    assert chat().speculation == {}
    assert chat().num_choices == 1
    assert completion().sampling == {"max_tokens": 16}, "the default of the OpenAI API"


@pytest.mark.parametrize(
    ("fields", "field", "wanted"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": []}, "stop", ()),
        ({"max_completion_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, "max_tokens", 5),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 4}, "logprobs", 4),
    ],
)
def test_spellings(fields: dict[str, Any], field: str, wanted: Any) -> None:
    """The API's different ways of saying one thing mean one thing here."""
    assert chat(**fields).sampling[field] == wanted


def test_logprobs_of_completions_count_alternatives() -> None:
    """In ``/v1/completions`` ``logprobs`` is a number; 0 reports the chosen tokens alone."""
    assert completion(logprobs=0).sampling["logprobs"] == 0
    assert completion(logprobs=3).sampling["logprobs"] == 3
    assert "logprobs" not in chat(logprobs=False).sampling


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (
            ChatBody,
            {
                "tools": [],
                "parallel_tool_calls": True,
                "tool_choice": "none",
                "response_format": {"type": "text"},
            },
        ),
        (ChatBody, {"functions": [], "function_call": "auto", "modalities": ["text"]}),
        (ChatBody, {"verbosity": "medium", "audio": None, "reasoning_effort": "none"}),
        (ChatBody, {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}),
        (ChatBody, {"safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "default"}),
        (ChatBody, {"prompt_cache_options": {"mode": "implicit"}}),
        (ChatBody, {"stream_options": {"include_usage": True, "include_obfuscation": True}}),
        (ChatBody, {"use_beam_search": False, "length_penalty": 1.0, "bad_words": []}),
        (CompletionBody, {"user": "u", "use_beam_search": False, "length_penalty": 1}),
        (ChatBody, {"include_reasoning": True, "separate_reasoning": True, "lora_path": None}),
        (CompletionBody, {"spaces_between_special_tokens": True, "return_token_ids": False}),
        (ChatBody, {"n": 1, "logprobs": None, "top_logprobs": None, "prediction": None}),
        (CompletionBody, {"suffix": "", "best_of": 1, "echo": False, "prompt_logprobs": None}),
        (CompletionBody, {"n": 3, "best_of": 3, "response_format": {"type": "text"}}),
    ],
)
def test_neutral_values_are_taken(
    body: type[ChatBody | CompletionBody], fields: dict[str, Any]
) -> None:
    """A documented parameter that is not offered is fine as long as it changes nothing."""
    required = {"messages": USER} if body is ChatBody else {"prompt": "x"}
    parsed = body.parse({"model": "m", **required, **fields})
    assert parsed.ignored == ()
    parsed.to_generation("r")


UNSUPPORTED: list[tuple[type[ChatBody | CompletionBody], str, Any]] = [
    (ChatBody, "functions", [{}]),
    (ChatBody, "function_call", {"name": "f"}),
    (ChatBody, "modalities", ["text", "audio"]),
    (ChatBody, "audio", {}),
    (ChatBody, "verbosity", "low"),
    (ChatBody, "use_beam_search", True),
    (ChatBody, "add_generation_prompt", False),
    (ChatBody, "add_special_tokens", True),
    (CompletionBody, "add_special_tokens", False),
    (ChatBody, "chat_template", "{{ 7 * 7 }}"),
    (ChatBody, "continue_final_message", True),
    (ChatBody, "documents", [{"text": "x"}]),
    (ChatBody, "echo", True),
    (CompletionBody, "allowed_token_ids", [1]),
    (ChatBody, "logits_processors", ["x"]),
    (ChatBody, "bad_words", ["x"]),
    (CompletionBody, "length_penalty", 2.0),
    (CompletionBody, "truncate_prompt_tokens", 5),
    (ChatBody, "web_search_options", {}),
    (ChatBody, "reasoning_effort", "high"),
    (CompletionBody, "suffix", "after"),
    (CompletionBody, "prompt_logprobs", -1),
    (ChatBody, "prompt_logprobs", -1),
    (CompletionBody, "guided_grammar", "start: x"),
    (CompletionBody, "best_of", 4),
    (ChatBody, "regex", "a+"),
    (ChatBody, "ebnf", 'root ::= "a"'),
    (CompletionBody, "json_schema", "{}"),
    (CompletionBody, "stop_regex", "a+"),
    (CompletionBody, "prompt_embeds", "AAAA"),
    (ChatBody, "return_token_ids", True),
    (CompletionBody, "return_tokens_as_token_ids", True),
    (ChatBody, "return_prompt_text", True),
    (ChatBody, "include_reasoning", False),
    (ChatBody, "separate_reasoning", False),
    (ChatBody, "stream_reasoning", False),
    (ChatBody, "thinking_token_budget", 100),
    (ChatBody, "logprob_token_ids", [1]),
    (ChatBody, "repetition_detection", {"max_pattern_size": 5}),
    (CompletionBody, "spaces_between_special_tokens", False),
    (CompletionBody, "no_stop_trim", True),
    (CompletionBody, "return_hidden_states", True),
    (CompletionBody, "custom_logit_processor", "x"),
    (CompletionBody, "lora_path", "x"),
]


@pytest.mark.parametrize(("body", "name", "value"), UNSUPPORTED)
def test_unsupported_parameters_are_refused(
    body: type[ChatBody | CompletionBody], name: str, value: Any
) -> None:
    """What is documented but not offered is refused by name, never silently ignored."""
    error = refused(body, **{name: value})
    assert isinstance(error, Unsupported)
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"logprobs": 3}, None),
        ({"echo": True}, None),
        ({"echo": False, "logprobs": 3, "max_tokens": 0}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, 0),
        ({"echo": True, "max_tokens": 0}, 0),
    ],
)
def test_an_echo_has_log_probabilities_too(fields: dict[str, Any], wanted: int | None) -> None:
    """Where they are asked for; and the prompt alone is computed as if they were."""
    sampling = completion(**fields).sampling
    assert sampling.get("prompt_logprobs") == wanted
    assert sampling.get("logprobs") == fields.get("logprobs")
    if wanted is not None:
        assert SamplingParams(**sampling).prompt_logprobs == wanted


WRONG: list[tuple[type[ChatBody | CompletionBody], dict[str, Any], str]] = [
    (ChatBody, {"model": None}, "model"),
    (ChatBody, {"messages": []}, "messages"),
    (ChatBody, {"messages": "hi"}, "messages"),
    (ChatBody, {"messages": [{"content": "hi"}]}, "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": 5}]}, "messages"),
    (ChatBody, {"messages": [{"role": "x" * 10_000, "content": "hi"}]}, "messages"),
    (ChatBody, {"messages": USER * (MAX_MESSAGES + 1)}, "messages"),
    (ChatBody, {"temperature": "hot"}, "temperature"),
    (ChatBody, {"temperature": 10**400}, "temperature"),
    (ChatBody, {"temperature": True}, "temperature"),
    (ChatBody, {"seed": False}, "seed"),
    (CompletionBody, {"logprobs": False}, "logprobs"),
    (CompletionBody, {"prompt": [True]}, "prompt"),
    (CompletionBody, {"stop_token_ids": [True]}, "stop_token_ids"),
    (ChatBody, {"n": 0}, "n"),
    (ChatBody, {"n": MAX_CHOICES + 1}, "n"),
    (ChatBody, {"stop": [1]}, "stop"),
    (ChatBody, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (ChatBody, {"stop_token_ids": ["a"]}, "stop_token_ids"),
    (ChatBody, {"logit_bias": {"a": 1}}, "logit_bias"),
    (ChatBody, {"logit_bias": {"\ud800" * 400: 1}}, "logit_bias"),
    (ChatBody, {"logit_bias": {"x" * 10_000: 1}}, "logit_bias"),
    (ChatBody, {"top_logprobs": 2}, "top_logprobs"),
    (ChatBody, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (ChatBody, {"stream_options": 3}, "stream_options"),
    (ChatBody, {"prediction": {"type": "content"}}, "prediction"),
    (ChatBody, {"prediction": {"type": "other", "content": "a"}}, "prediction"),
    (ChatBody, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    (ChatBody, {"speculation": {"enable": True}}, "speculation"),
    (ChatBody, {"speculation": {"databases": ["corpus"]}}, "speculation"),
    (ChatBody, {"speculation": {"max_draft_tokens": -1}}, "speculation"),
    (CompletionBody, {"prompt": None}, "prompt"),
    (CompletionBody, {"prompt": []}, "prompt"),
    (CompletionBody, {"prompt": [1, "a"]}, "prompt"),
    (CompletionBody, {"prompt": [[1], "a"]}, "prompt"),
    (CompletionBody, {"prompt": [1.5]}, "prompt"),
    (CompletionBody, {"prompt": ["a"] * 100, "n": 3}, "prompt"),
    (CompletionBody, {"prompt": ["a"] * (MAX_ANSWERS + 1)}, "prompt"),
    (ChatBody, {"logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS + 1}, "top_logprobs"),
    (CompletionBody, {"logprobs": -1}, "logprobs"),
    (CompletionBody, {"logprobs": MAX_TOP_LOGPROBS + 1}, "logprobs"),
]


@pytest.mark.parametrize(("body", "fields", "param"), WRONG)
def test_wrong_values_are_refused_by_name(
    body: type[ChatBody | CompletionBody], fields: dict[str, Any], param: str
) -> None:
    """Every wrong value gets an error that names its parameter, in a message of bounded length."""
    assert refused(body, **fields).param == param


@pytest.mark.parametrize("data", [None, [], "text", 3, True])
def test_a_body_is_an_object(data: Any) -> None:
    """Any other JSON is no request."""
    for body in (ChatBody, CompletionBody):
        with pytest.raises(InvalidRequest, match="must be a JSON object"):
            body.parse(data)


@pytest.mark.parametrize("name", ["prompt", "stop", "stop_token_ids"])
def test_long_wrong_lists_are_refused_by_their_first_item(name: str) -> None:
    """A list of wrong items is refused without an error for each, which would take a gateway's
    time and memory."""
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"model": "m", "prompt": "x", name: [{}] * 1000})
    assert len(caught.value.errors()) < 10


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("abc", ("abc",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ([[]], ((),)),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, prompts: Any) -> None:
    """A text, texts, token ids and lists of them are one list of prompts."""
    assert completion(prompt=prompt).prompts == prompts


def test_as_much_as_allowed() -> None:
    """The bound on the answers of a request counts prompts times choices."""
    assert len(chat(messages=USER * MAX_MESSAGES).messages) == MAX_MESSAGES
    assert len(completion(prompt=["a"] * (MAX_ANSWERS // 4), n=4).prompts) == MAX_ANSWERS // 4
    assert chat(n=MAX_CHOICES).num_choices == MAX_CHOICES


@pytest.mark.parametrize("role", ["function", "ai", "System", ""])
def test_unknown_roles_are_refused(role: str) -> None:
    """A template would show them to a model that has never seen one."""
    error = refused(ChatBody, messages=[*USER, {"role": role, "name": "f", "content": "hi"}])
    assert error.param == "messages"
    for known in ("assistant", "developer", "system", "tool", "user"):
        assert repr(known) in error.message
    with pytest.raises(InvalidRequest, match=r"messages\.0\.role"):
        TokenizeBody.parse({"model": "m", "messages": [{"role": role, "content": "hi"}]})


def test_messages_for_the_template() -> None:
    """Parts of text are joined, other fields of a message reach the template."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = chat(
        messages=[
            {"role": "system", "content": "s", "name": "n"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "b", "reasoning_content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": None},
        ]
    )
    assert found.messages == (
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "b", "reasoning_content": "a"},
        {"role": "assistant", "content": "b"},
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"text": "a"},
        {"type": "x" * 5000},
    ],
)
def test_parts_that_are_no_text_are_refused(part: dict[str, Any]) -> None:
    """Images and malformed parts are refused, never dropped."""
    error = refused(ChatBody, messages=[{"role": "user", "content": [part]}])
    assert isinstance(error, Unsupported)
    assert error.param == "messages"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text"},
        {"type": "text", "text": 5},
        {"type": "refusal", "text": "No."},
    ],
)
def test_parts_without_their_text_are_refused_as_such(part: dict[str, Any]) -> None:
    """Their type is one that is offered."""
    error = refused(ChatBody, messages=[{"role": "user", "content": [part]}])
    assert not isinstance(error, Unsupported)
    assert error.param == "messages"
    assert error.message == f"the text of a part of type {part['type']!r} must be a string"


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_what_a_template_would_leave_out_is_refused(name: str) -> None:
    """A part of the conversation is never missing from the prompt without a word."""
    message = {"role": "assistant", "content": None, name: {"name": "f", "arguments": "{}"}}
    assert isinstance(refused(ChatBody, messages=[message]), Unsupported)
    assert chat(messages=[{"role": "assistant", "content": "a", name: None}]).messages


def test_names_of_fields_are_bounded() -> None:
    """Those that are told, too."""
    with pytest.raises(InvalidRequest) as caught:
        parse_body(Speculation, {"x" * 10_000: 1, "\ud800": 1})
    assert len(str(caught.value.param)) <= 100
    assert len(caught.value.message) <= 300


def test_prediction_is_one_text() -> None:
    """A prediction may come as a text or in parts."""
    assert chat().prediction is None
    assert chat(prediction={"type": "content", "content": "abc"}).prediction == "abc"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(prediction={"type": "content", "content": parts}).prediction == "ab"


def test_a_prediction_that_is_no_text_is_refused() -> None:
    """By its own name."""
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    error = refused(ChatBody, prediction={"type": "content", "content": parts})
    assert isinstance(error, Unsupported)
    assert error.param == "prediction"


def test_speculation_fields_are_those_of_the_engine() -> None:
    """The extension of hdserve becomes ``SpeculationParams``."""
    found = chat(
        speculation={
            "enabled": False,
            "max_draft_tokens": 3,
            "databases": ["context", "model"],
            "share_output": False,
        }
    ).speculation
    assert SpeculationParams(**found) == SpeculationParams(
        is_enabled=False,
        max_draft_tokens=3,
        databases=frozenset({"context", "model"}),
        is_output_shared=False,
    )
    assert SpeculationParams(**chat(speculation={}).speculation) == SpeculationParams()
    assert (
        SpeculationParams(**chat(speculation={"databases": []}).speculation).databases
        == frozenset()
    )


def test_unknown_fields_are_named() -> None:
    """A field nobody documents is taken, and reported."""
    body = ChatBody.parse({"model": "m", "messages": USER, "zebra": 1, "apple": None})
    assert body.ignored == ("apple", "zebra")
    body = ChatBody.parse({"model": "m", "messages": USER, "json": True, "copy": False})
    assert body.ignored == ("copy", "json")
    options = {"include_usage": True, "flavour": 1}
    body = ChatBody.parse({"model": "m", "messages": USER, "stream_options": options})
    assert body.ignored == ("stream_options.flavour",)


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_what_is_asked_for_in_vain_is_named(body: type[ChatBody | CompletionBody]) -> None:
    """Clients send it to every server, and the answer is the same."""
    required = {"messages": USER} if body is ChatBody else {"prompt": "x"}
    parsed = body.parse({"model": "m", **required, "store": True, "service_tier": "flex", "z": 1})
    assert parsed.ignored == ("service_tier", "store", "z")
    assert parsed.unmet == {"service_tier", "store"}


CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"messages": [*USER, {"role": "user", "content": "a", "zebra": 1}]}, "messages.zebra"),
        ({"messages": [{"role": "assistant", "reasoning": "a"}]}, "messages.reasoning"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages.content.b",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL, CALL | {"a": 1}]}]},
            "messages.tool_calls.a",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [CALL | {"function": {**CALL["function"], "a": 1}}],
                    }
                ]
            },
            "messages.tool_calls.function.a",
        ),
        ({"prediction": {"content": "a", "b": 1}}, "prediction.b"),
        (
            {"prediction": {"content": [{"type": "text", "text": "a", "b": [0]}]}},
            "prediction.content.b",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "a": 1}]}, "tools.a"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "a": False}}]},
            "tools.function.a",
        ),
    ],
)
def test_unknown_fields_are_named_wherever_they_are(fields: dict[str, Any], ignored: str) -> None:
    """By where they are, without the number of the item."""
    body = ChatBody.parse({"model": "m", "messages": USER, **fields})
    assert body.ignored == (ignored,)
    body.to_generation("r")


def test_names_are_as_many_as_there_are_fields() -> None:
    """Not as there are messages; schemas and variables of templates have names of their own."""
    messages = [{"role": "user", "content": "a", "b": index} for index in range(MAX_MESSAGES)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"title": "t"}}}
    fields = {"tools": [tool], "response_format": form, "chat_template_kwargs": {"thinking": True}}
    body = ChatBody.parse({"model": "m", "messages": messages, **fields})
    assert body.ignored == ("messages.b",)
    body = TokenizeBody.parse({"model": "m", "messages": messages})  # type: ignore[assignment]
    assert body.ignored == ("messages.b",)


def echoes() -> Iterator[dict[str, Any]]:
    """Messages of assistants as clients append them to a conversation."""
    tool_call = ChatCompletionMessageFunctionToolCall.model_validate(CALL)
    yield ChatCompletionMessage(role="assistant", content="a").model_dump()
    yield ChatCompletionMessage(role="assistant", content="a", annotations=[]).model_dump()
    yield ChatCompletionMessage(role="assistant", tool_calls=[tool_call]).model_dump()
    yield (
        ParsedChatCompletionMessage[Any]
        .model_validate(
            {
                "role": "assistant",
                "content": '{"a": 1}',
                "parsed": {"a": 1},
                "tool_calls": [
                    CALL
                    | {"index": 0, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}
                ],
            }
        )
        .model_dump()
    )
    answer = {"role": "assistant", "content": "a"}
    yield answer | {"reasoning": None, "reasoning_content": None, "tool_calls": []}  # of vLLM
    yield answer | {"provider_specific_fields": {"refusal": None}, "images": []}  # of litellm
    url = {"url": "u", "title": "t", "start_index": 0, "end_index": 1}
    yield answer | {"annotations": [{"type": "url_citation", "url_citation": url}]}


@pytest.mark.parametrize("message", list(echoes()))
def test_answers_can_be_sent_back(message: dict[str, Any]) -> None:
    """With all the fields a library knows; templates see those that say something."""
    body = ChatBody.parse({"model": "m", "messages": [message]})
    assert body.ignored == ()
    (found,) = body.to_generation("r").messages
    assert set(found) <= {"role", "content", "tool_calls"}
    for call in found.get("tool_calls", ()):
        assert set(call) == {"id", "type", "function"}
        assert set(call["function"]) == {"name", "arguments"}


def test_a_refusal_is_what_the_assistant_said() -> None:
    """Beside a content or in it."""
    message = {"role": "assistant", "content": None, "refusal": "No."}
    assert chat(messages=[message]).messages == ({"role": "assistant", "content": "No."},)


def test_the_assistant_calls_tools() -> None:
    """Templates do not look for calls elsewhere."""
    message = {"role": "user", "content": "a", "tool_calls": [CALL]}
    assert refused(ChatBody, messages=[message]).param == "messages"
    assert chat(messages=[message | {"tool_calls": None}]).messages


def test_templates_may_have_fields_of_their_own() -> None:
    """A field of a message that nobody documents reaches them all the same."""
    message = {"role": "assistant", "content": "a", "thinking": "b"}
    assert chat(messages=[message]).messages == (message,)


def test_usage_is_asked_for() -> None:
    """``stream_options.include_usage`` is off by default."""
    for options, wanted in ((None, False), ({}, False), ({"include_usage": True}, True)):
        body = ChatBody.parse({"model": "m", "messages": USER, "stream_options": options})
        assert body.includes_usage is wanted


def test_template_options_are_passed_on() -> None:
    """``chat_template_kwargs`` are the template's variables."""
    assert chat(chat_template_kwargs={"thinking": True}).template_options == {"thinking": True}
    assert chat().template_options == {}


def test_tokenize_bodies() -> None:
    """A text or a conversation, and token ids back."""
    assert parse_body(TokenizeBody, {"model": "m", "prompt": "a"}).add_special_tokens
    found = parse_body(TokenizeBody, {"model": "m", "messages": USER}).messages
    assert found is not None
    assert found[0].for_template() == USER[0]
    assert parse_body(DetokenizeBody, {"model": "m", "tokens": [1]}).tokens == (1,)
    with pytest.raises(InvalidRequest) as caught:
        parse_body(DetokenizeBody, {"model": "m", "tokens": ["a"]})
    assert caught.value.param == "tokens"


@pytest.mark.parametrize(
    "fields",
    [{"tools": [{}]}, {"chat_template_kwargs": {"a": 1}}, {"add_generation_prompt": False}],
)
def test_tokenize_refuses_what_would_change_the_count(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        TokenizeBody.parse({"model": "m", "messages": USER} | fields)
    assert [caught.value.param] == list(fields)
    neutral = {"tools": [], "chat_template": None, "add_generation_prompt": True, "other": 1}
    assert TokenizeBody.parse({"model": "m", "messages": USER} | neutral).ignored == ("other",)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "suffix", "other"})


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_json_is_taken_or_refused(fields: dict[str, Any]) -> None:
    """Whatever is sent is either understood or refused with a bounded message of valid text."""
    for body, required in ((ChatBody, {"messages": USER}), (CompletionBody, {"prompt": "x"})):
        message = ""
        try:
            body.parse({"model": "m", **required, **fields}).to_generation("r")
        except InvalidRequest as error:
            message = error.message
        assert len(message) <= 300
        message.encode()


@pytest.mark.parametrize(
    ("fields", "wanted", "param"),
    [
        ({"prompt_logprobs": None}, None, None),
        ({"prompt_logprobs": 0}, 0, "prompt_logprobs"),
        ({"prompt_logprobs": 3}, 3, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "max_tokens": 0}, 3, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "logprobs": 5}, 3, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "logprobs": 5, "echo": True}, 5, "logprobs"),
        ({"prompt_logprobs": 5, "logprobs": 3, "echo": True}, 5, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "max_tokens": 0, "echo": True}, 0, "prompt_logprobs"),
        ({"logprobs": 3, "echo": True}, 3, "logprobs"),
        ({"max_tokens": 0, "echo": True}, 0, None),
        ({"prompt_logprobs": 0, "stream": True}, None, None),
    ],
)
def test_prompt_logprobs(fields: dict[str, Any], wanted: int | None, param: str | None) -> None:
    """The larger number is computed, and named when it is too much; whoever asks for neither is
    shown nothing."""
    request = completion(**fields)
    assert request.sampling.get("prompt_logprobs") == wanted
    assert request.prompt_logprobs_param == param
    if "echo" not in fields and "logprobs" not in fields:
        request = chat(**fields)
        assert request.sampling.get("prompt_logprobs") == wanted
        assert request.prompt_logprobs_param == param


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}]
)
def test_prompt_logprobs_that_cannot_be_had(
    body: type[ChatBody | CompletionBody], fields: dict[str, Any]
) -> None:
    """More than there are, or in a stream."""
    assert refused(body, **fields).param == "prompt_logprobs"
