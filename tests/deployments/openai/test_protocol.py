"""Requests of the OpenAI API: what is taken, what it means, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.generation import GenerationRequest
from deployments.http.param_names import params_named
from deployments.openai.messages import MAX_MESSAGES
from deployments.openai.protocol import (
    MAX_ANSWERS,
    MAX_CHOICES,
    MAX_DATABASES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Speculation,
    TokenizeBody,
)
from deployments.openai.request_body import parse_body
from hdserve.conversation import ChatEnd
from hdserve.core import MAX_TOP_LOGPROBS, SamplingParams, SpeculationParams
from hdserve.errors import InvalidRequest, Unsupported
from tests.deployments.bodies import USER, chat, refused, response_request


def completion(**fields: Any) -> GenerationRequest:
    return CompletionBody.parse({"model": "m", "prompt": "x", **fields}).to_generation("r")


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
    "allowed_token_ids": ([4, 3, 4, 4], "allowed_token_ids", (3, 4)),
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
    assert make(**{name: None}).sampling == {}


def test_every_sampling_field_has_a_parameter() -> None:
    """No field of ``SamplingParams`` is out of reach of a request."""
    others = {"logprobs", "prompt_logprobs", "grammar"}
    assert set(SamplingParams.__slots__) == {*SAMPLING, *others}


def test_what_a_client_leaves_out_is_absent() -> None:
    """Only what was set is passed on, so that the defaults of the model count."""
    assert chat().sampling == {}
    assert chat().speculation == {}
    assert chat().num_choices == 1
    assert completion().sampling == {}
    assert completion().api_defaults == {"max_tokens": 16}, "the default of the OpenAI API"
    assert chat().api_defaults == {}


@pytest.mark.parametrize(
    ("fields", "field", "wanted"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": []}, "stop", ()),
        ({"stop": ""}, "stop", ()),
        ({"stop": ["", "a", ""]}, "stop", ("a",)),
        ({"max_completion_tokens": 1}, "max_tokens", 1),
        ({"max_completion_tokens": 5, "max_tokens": 9}, "max_tokens", 5),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 0}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS}, "logprobs", MAX_TOP_LOGPROBS),
    ],
)
def test_spellings(fields: dict[str, Any], field: str, wanted: Any) -> None:
    """The API's different ways of saying one thing mean one thing here."""
    sampling = chat(**fields).sampling
    assert sampling[field] == wanted
    assert getattr(SamplingParams(**sampling), field) == wanted


@pytest.mark.parametrize("make", [chat, completion, response_request])
def test_a_seed_of_minus_one_is_none(make: Any) -> None:
    """Clients of vLLM and llama.cpp ask for another answer each time by it."""
    assert make(seed=-1).sampling == {}
    for seed in (-2, 0):
        assert make(seed=seed).sampling == {"seed": seed}


def test_completions_have_the_spellings_of_chats() -> None:
    sampling = completion(top_p=0, stop=["", "a"], max_tokens=9, max_completion_tokens=5).sampling
    assert (sampling["top_p"], sampling["stop"]) == (0, ("a",))
    assert sampling["max_tokens"] == 5
    assert completion(stop="").sampling["stop"] == ()


def test_a_verbosity_is_a_variable_of_the_template() -> None:
    """As the request has it, unless it sets the variable itself."""
    assert chat(verbosity="low").template_options == {"verbosity": "low"}
    assert chat(verbosity="low", chat_template_kwargs={"a": 1}).template_options == {
        "verbosity": "low",
        "a": 1,
    }
    own = {"verbosity": "high"}
    assert chat(verbosity="low", chat_template_kwargs=own).template_options == own
    assert refused(ChatBody, verbosity="loud").param == "verbosity"


def test_logprobs_of_completions_count_alternatives() -> None:
    """In ``/v1/completions`` ``logprobs`` is a number; 0 reports the chosen tokens alone."""
    assert completion(logprobs=0).sampling["logprobs"] == 0
    assert completion(logprobs=MAX_TOP_LOGPROBS).sampling["logprobs"] == MAX_TOP_LOGPROBS
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
        (ChatBody, {"prompt_cache_options": {"prewarm": False}}),
        (ChatBody, {"stream": True, "stream_options": {"include_obfuscation": True}}),
        (ChatBody, {"stream": False, "stream_options": None}),
        (ChatBody, {"stream": True, "stream_options": {"include_usage": None}}),
        (ChatBody, {"speculation": {"enabled": None, "databases": None}}),
        (ChatBody, {"response_format": {"type": "text", "json_schema": None}}),
        (ChatBody, {"use_beam_search": False, "length_penalty": 1.0, "bad_words": []}),
        (CompletionBody, {"user": "u", "use_beam_search": False, "length_penalty": 1}),
        (ChatBody, {"include_reasoning": True, "separate_reasoning": True, "lora_path": None}),
        (CompletionBody, {"spaces_between_special_tokens": True, "return_token_ids": False}),
        (ChatBody, {"n": 1, "logprobs": None, "top_logprobs": None, "prediction": None}),
        (ChatBody, {"logprobs": False, "top_logprobs": 0}),
        (CompletionBody, {"suffix": "", "best_of": 1, "echo": False, "prompt_logprobs": None}),
        (ChatBody, {"grammar": "", "thinking": None, "enable_thinking": None, "reasoning": {}}),
        (CompletionBody, {"n": 3, "best_of": 3, "response_format": {"type": "text"}}),
        (ChatBody, {"truncation": "disabled", "text": {"format": {"type": "text"}}}),
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
    (CompletionBody, "verbosity", "low"),
    (ChatBody, "use_beam_search", True),
    (ChatBody, "add_special_tokens", True),
    (CompletionBody, "add_special_tokens", False),
    (ChatBody, "chat_template", "{{ 7 * 7 }}"),
    (ChatBody, "documents", [{"text": "x"}]),
    (ChatBody, "echo", True),
    (ChatBody, "logits_processors", ["x"]),
    (ChatBody, "bad_words", ["x"]),
    (CompletionBody, "length_penalty", 2.0),
    (CompletionBody, "truncate_prompt_tokens", 5),
    (ChatBody, "web_search_options", {}),
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
    (ChatBody, "cache_salt", "x"),
    (CompletionBody, "enable_thinking", False),
    (CompletionBody, "thinking", {"type": "disabled"}),
    (CompletionBody, "reasoning", {"effort": "low"}),
    (ChatBody, "grammar", 'root ::= "a"'),
    (CompletionBody, "grammar", 'root ::= "a"'),
    (CompletionBody, "guided_whitespace_pattern", " "),
    (CompletionBody, "vllm_xargs", {"x": 1}),
    (ChatBody, "best_of", 3),
    (ChatBody, "suffix", "after"),
    (ChatBody, "prompt", "x"),
    (CompletionBody, "messages", USER),
    (CompletionBody, "tools", [{}]),
    (CompletionBody, "functions", [{}]),
    (CompletionBody, "reasoning_effort", "high"),
    (CompletionBody, "chat_template_kwargs", {"a": 1}),
    (CompletionBody, "top_logprobs", 3),
    (ChatBody, "max_output_tokens", 5),
    (ChatBody, "instructions", "Be brief."),
    (ChatBody, "input", "x"),
    (ChatBody, "text", {"format": {"type": "json_object"}}),
    (ChatBody, "previous_response_id", "resp_1"),
    (ChatBody, "truncation", "auto"),
    (ChatBody, "prompt_cache_options", {"ttl": "30m", "prewarm": True}),
    (CompletionBody, "max_output_tokens", 5),
    (CompletionBody, "text", {"format": {"type": "json_object"}}),
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


def test_a_prompt_may_be_null() -> None:
    """As the OpenAI API has it; it is not left out."""
    for prompt in (None, ""):
        body = CompletionBody.parse({"model": "m", "prompt": prompt})
        assert body.to_generation("r").prompts == ("",)
    with pytest.raises(InvalidRequest) as caught:
        CompletionBody.parse({"model": "m"})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("temperature", "0", "a number"),
        ("n", "2", "an integer"),
        ("stream", "true", "true or false"),
    ],
)
def test_texts_are_no_numbers(name: str, value: str, kind: str) -> None:
    error = refused(ChatBody, **{name: value})
    assert (error.param, error.message) == (name, f"{name}: {kind} is expected")


def test_so_many_stop_token_ids_are_read() -> None:
    """Each choice looks at all of them."""
    assert chat(stop_token_ids=[5] * 1024).sampling["stop_token_ids"]
    assert refused(ChatBody, stop_token_ids=[5] * 1025).param == "stop_token_ids"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (ChatBody.parse({"model": "m", "messages": USER}), "max_tokens"),
        (
            ChatBody.parse({"model": "m", "messages": USER, "max_completion_tokens": 3}),
            "max_completion_tokens",
        ),
        (CompletionBody.parse({"model": "m", "prompt": "x", "max_tokens": 3}), "max_tokens"),
    ],
)
def test_errors_name_the_parameter_that_was_sent(
    body: ChatBody | CompletionBody, name: str
) -> None:
    for param in ("max_tokens", "min_tokens"):
        with pytest.raises(InvalidRequest) as caught, params_named(body.param_names):
            raise InvalidRequest("min_tokens is larger than max_tokens", param)
        assert caught.value.message == f"min_tokens is larger than {name}"
        assert caught.value.param == (name if param == "max_tokens" else param)


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
    (ChatBody, {"logit_bias": {"5": True}}, "logit_bias"),
    (ChatBody, {"logit_bias": {"\ud800" * 400: 1}}, "logit_bias"),
    (ChatBody, {"logit_bias": {"x" * 10_000: 1}}, "logit_bias"),
    (ChatBody, {"top_logprobs": 2}, "top_logprobs"),
    (ChatBody, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (ChatBody, {"stream": True, "stream_options": 3}, "stream_options"),
    (ChatBody, {"logprobs": 1}, "logprobs"),
    (ChatBody, {"stream_options": {}}, "stream_options"),
    (CompletionBody, {"stream": False, "stream_options": {}}, "stream_options"),
    (ChatBody, {"prediction": {"type": "content"}}, "prediction"),
    (ChatBody, {"prediction": {"type": "other", "content": "a"}}, "prediction"),
    (ChatBody, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    (ChatBody, {"speculation": {"enable": True}}, "speculation"),
    (ChatBody, {"speculation": {"databases": ["corpus"]}}, "speculation"),
    (ChatBody, {"speculation": {"databases": ["context"] * (MAX_DATABASES + 1)}}, "speculation"),
    (ChatBody, {"speculation": {"max_draft_tokens": -1}}, "speculation"),
    (ChatBody, {"speculation": {"max_draft_tokens": True}}, "speculation"),
    (ChatBody, {"speculation": {"max_draft_tokens": False}}, "speculation"),
    (CompletionBody, {"prompt": 5}, "prompt"),
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


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        *((CompletionBody, {name: [{}] * 1000}) for name in ("prompt", "stop", "stop_token_ids")),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 1000}]}),
    ],
)
def test_long_wrong_lists_are_refused_by_their_first_item(
    body: type[ChatBody | CompletionBody], fields: dict[str, Any]
) -> None:
    """A list of wrong items is refused without an error for each, which would take a gateway's
    time and memory."""
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        body.model_validate({"model": "m", "prompt": "x", **fields})
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
            "max_draft_tokens": 0,
            "databases": ["context", "model"],
            "share_output": False,
        }
    ).speculation
    assert SpeculationParams(**found) == SpeculationParams(
        is_enabled=False,
        max_draft_tokens=0,
        databases=frozenset({"context", "model"}),
        is_output_shared=False,
    )
    assert SpeculationParams(**chat(speculation={}).speculation) == SpeculationParams()
    assert (
        SpeculationParams(**chat(speculation={"databases": []}).speculation).databases
        == frozenset()
    )


@pytest.mark.parametrize("name", ["usage", "sources"])
def test_what_a_stream_includes_is_asked_for(name: str) -> None:
    """All of ``stream_options`` is off by default."""
    option = f"include_{name}"
    for options, wanted in ((None, False), ({}, False), ({option: True}, True)):
        stream = {"stream": True, "stream_options": options}
        body = ChatBody.parse({"model": "m", "messages": USER, **stream})
        assert getattr(body, f"includes_{name}") is wanted


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
    "fields", [{"chat_template": "{{ 1 }}"}, {"mm_processor_kwargs": {"a": 1}}]
)
def test_tokenize_refuses_what_would_change_the_count(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        TokenizeBody.parse({"model": "m", "messages": USER} | fields)
    assert [caught.value.param] == list(fields)
    neutral = {"mm_processor_kwargs": {}, "chat_template": None, "other": 1}
    assert TokenizeBody.parse({"model": "m", "messages": USER} | neutral).ignored == ("other",)


def test_tokenize_reads_a_conversation_as_a_chat_does() -> None:
    """So that what it counts is the prompt of the request that has the same parameters."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    fields = {
        "model": "m",
        "messages": [*USER, {"role": "assistant", "content": "So"}],
        "tools": [tool],
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": True,
    }
    asked = TokenizeBody.parse(fields).to_generation()
    answered = ChatBody.parse(fields).to_generation("r")
    for name in ("messages", "tools", "template_options", "chat_end"):
        assert getattr(asked, name) == getattr(answered, name)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ChatEnd.BEFORE_ANSWER),
        ({"add_generation_prompt": True}, ChatEnd.BEFORE_ANSWER),
        ({"add_generation_prompt": False}, ChatEnd.AFTER_LAST_MESSAGE),
        ({"continue_final_message": True}, ChatEnd.IN_LAST_MESSAGE),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            ChatEnd.IN_LAST_MESSAGE,
        ),
        ({"continue_final_message": False}, ChatEnd.BEFORE_ANSWER),
    ],
)
def test_where_a_conversation_ends(fields: dict[str, Any], end: ChatEnd) -> None:
    body = ChatBody.parse({"model": "m", "messages": USER, **fields})
    assert body.to_generation("r").chat_end is end


def test_a_message_is_not_both_continued_and_answered() -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": True}
    body = ChatBody.parse({"model": "m", "messages": USER, **fields})
    with pytest.raises(InvalidRequest, match="cannot go with") as caught:
        body.to_generation("r")
    assert caught.value.param == "continue_final_message"


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


def test_a_list_is_wrong_once() -> None:
    """An error for each of a million items would take seconds and gigabytes."""
    with pytest.raises(ValidationError) as caught:
        Speculation.model_validate({"databases": [0] * 100})
    assert caught.value.error_count() == 1
