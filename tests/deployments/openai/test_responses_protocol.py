"""A request of the Responses API is the chat it should be, or is refused by its own name."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.http.param_names import params_named
from deployments.openai.messages import MAX_MESSAGES
from deployments.openai.protocol import ChatBody
from deployments.openai.request_body import UNSUPPORTED_EXTENSIONS
from deployments.openai.responses_protocol import PARAM_NAMES, ResponsesBody
from hdserve.errors import InvalidRequest, Overloaded, PromptTooLong, RequestError, Unsupported
from tests.deployments.bodies import chat
from tests.deployments.bodies import response_request as request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "name": "f", "description": "does it", "parameters": SCHEMA}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def test_a_text_is_a_message_of_the_user() -> None:
    """Behind the instructions, if there are any."""
    assert request() == request(instructions="") == chat()
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "Be brief."}
    assert request(instructions="Be brief.") == chat(messages=[system, user])


def test_items_are_counted_without_the_instructions() -> None:
    items = [{"role": "user", "content": "a"}] * MAX_MESSAGES
    assert len(request(instructions="s", input=items).messages) == 1 + MAX_MESSAGES
    with pytest.raises(InvalidRequest, match="an array of at most 2048 is expected"):
        request(input=[*items, *items[:1]])


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        (
            {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3},
            {"max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3},
        ),
        ({"top_p": 0}, {"top_p": 0}),
        *(
            (fields, fields)
            for fields in (
                {"stop": ""},
                {"ignore_eos": True, "min_tokens": 3},
                {"stop": ["a"], "repetition_penalty": 1.1},
            )
        ),
        ({"text": {"verbosity": "high"}}, {"verbosity": "high"}),
        ({"speculation": {"enabled": False}}, {"speculation": {"enabled": False}}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {"verbosity": "medium"}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA},
                }
            },
        ),
        ({"store": False, "background": False, "include": [], "truncation": "disabled"}, {}),
        ({"store": True}, {}),
        ({"metadata": {"a": "b"}, "user": "u", "service_tier": "auto"}, {}),
        ({"reasoning": {"effort": None, "summary": None}}, {}),
        ({"reasoning": {"effort": "none", "summary": None}}, {"reasoning_effort": "none"}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"context": "all_turns", "mode": "pro", "new": 1}}, {}),
        ({"text": {"format": None}}, {}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"top_logprobs": 20}, {"logprobs": True, "top_logprobs": 20}),
        ({"top_logprobs": 0}, {}),
        ({"max_tool_calls": 3, "image": {"context_compression": "auto"}}, {}),
        ({"image": {"context_compression": "disabled"}}, {}),
    ],
)
def test_parameters_are_those_of_a_chat(fields: dict[str, Any], same: dict[str, Any]) -> None:
    """Or change nothing; but a grammar is asked for under another name."""
    found, wanted = request(**fields), chat(**same)
    assert (found.sampling, found.speculation) == (wanted.sampling, wanted.speculation)
    assert found.messages == wanted.messages
    assert found.reasoning_effort == wanted.reasoning_effort
    assert found.template_options == wanted.template_options
    assert found.grammar_param == ("text" if wanted.grammar_param else None)


@pytest.mark.parametrize("choice", ["auto", "required", "none", {"type": "function", "name": "f"}])
def test_tools_are_those_of_a_chat(choice: Any) -> None:
    """They are flat here."""
    function = {name: value for name, value in TOOL.items() if name != "type"}
    named = {"type": "function", "function": {"name": "f"}}
    found = request(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    wanted = chat(
        tools=[{"type": "function", "function": function}],
        tool_choice=choice if isinstance(choice, str) else named,
        parallel_tool_calls=False,
    )
    assert (found.tools, found.sampling) == (wanted.tools, wanted.sampling)


WRONG: list[tuple[dict[str, Any], str, type[RequestError]]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", Unsupported),
    ({"conversation": "conv_1"}, "conversation", Unsupported),
    ({"background": True}, "background", Unsupported),
    ({"stream_options": {}}, "stream_options", InvalidRequest),
    ({"reasoning": {"effort": "huge"}}, "reasoning", InvalidRequest),
    ({"reasoning": {"mode": 5}}, "reasoning", InvalidRequest),
    ({"reasoning": "high"}, "reasoning", InvalidRequest),
    ({"max_tool_calls": "many"}, "max_tool_calls", InvalidRequest),
    ({"context_management": [5]}, "context_management", InvalidRequest),
    ({"image": {"context_compression": "enabled"}}, "image", Unsupported),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options", Unsupported),
    ({"reasoning_effort": "high"}, "reasoning_effort", Unsupported),
    ({"reasoning": {"summary": ["auto"]}}, "reasoning", InvalidRequest),
    ({"top_logprobs": 21}, "top_logprobs", InvalidRequest),
    ({"top_logprobs": True}, "top_logprobs", InvalidRequest),
    ({"include": ["reasoning.encrypted_content", "x" * 1000]}, "include", Unsupported),
    ({"include": "reasoning.encrypted_content"}, "include", InvalidRequest),
    ({"truncation": "sometimes"}, "truncation", InvalidRequest),
    ({"input": []}, "input", InvalidRequest),
    ({"input": 5}, "input", InvalidRequest),
    ({"input": ["hi"]}, "input", InvalidRequest),
    ({"input": [{"content": "hi"}]}, "input", InvalidRequest),
    ({"input": [{"role": "tool", "content": "hi"}]}, "input", InvalidRequest),
    ({"input": [{"type": "web_search_call", "id": "1"}]}, "input", InvalidRequest),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        Unsupported,
    ),
    (
        {"input": [{"role": "user", "content": [{"type": ["input_text"], "text": "x"}]}]},
        "input",
        Unsupported,
    ),
    ({"max_output_tokens": 0}, "max_output_tokens", InvalidRequest),
    ({"metadata": {"a": 1}}, "metadata", InvalidRequest),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text", InvalidRequest),
    ({"text": {"format": {"type": "xml"}}}, "text", InvalidRequest),
    ({"text": {"verbosity": "loud"}}, "text", InvalidRequest),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools", Unsupported),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools", InvalidRequest),
    ({"tool_choice": "required"}, "tool_choice", InvalidRequest),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
        InvalidRequest,
    ),
    ({"stream": "perhaps"}, "stream", InvalidRequest),
    ({"guided_grammar": "x"}, "guided_grammar", Unsupported),
    ({"max_tokens": 5}, "max_tokens", Unsupported),
    ({"stop": 5}, "stop", InvalidRequest),
    ({"ignore_eos": "no"}, "ignore_eos", InvalidRequest),
    ({"presence_penalty": 0.5}, "presence_penalty", Unsupported),
    ({"n": 2}, "n", Unsupported),
    ({"frequency_penalty": 0.5}, "frequency_penalty", Unsupported),
    ({"response_format": {"type": "json_object"}}, "response_format", Unsupported),
    ({"logprobs": True}, "logprobs", Unsupported),
    ({"messages": [{"role": "user", "content": "hi"}]}, "messages", Unsupported),
    ({"functions": [{}]}, "functions", Unsupported),
    ({"verbosity": "low"}, "verbosity", Unsupported),
    ({"chat_template": "{{ 1 }}"}, "chat_template", Unsupported),
]


@pytest.mark.parametrize(("fields", "param", "kind"), WRONG)
def test_what_is_refused(fields: dict[str, Any], param: str, kind: type[RequestError]) -> None:
    """By the name of the parameter, in a bounded message."""
    with pytest.raises(kind) as caught:
        request(**fields)
    assert caught.value.param == param
    assert len(caught.value.message) <= 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [TOOL | {"name": "a b"}]}, r"^tools\.0\.name: "),
        ({"text": {"format": {"type": "json_schema"}}}, r"^text\.format needs "),
        ({"input": [{"type": "reasoning", "summary": []}]}, r"^input: an array of at least 1 "),
        ({"previous_response_id": "resp_1"}, r"not supported: nothing is stored here, so send "),
        ({"conversation": "conv_1"}, r"not supported: nothing is stored here, so send "),
        ({"background": True}, r"^background is not supported$"),
    ],
)
def test_messages_name_what_the_request_has(fields: dict[str, Any], message: str) -> None:
    """Not the chat it becomes."""
    with pytest.raises(InvalidRequest, match=message):
        request(**fields)


def test_parameters_of_a_chat_are_offered_or_refused() -> None:
    """They would change the answer; with a value that changes nothing they are taken."""
    known = {*ResponsesBody.model_fields, *ResponsesBody.unsupported, *UNSUPPORTED_EXTENSIONS}
    of_chats = ChatBody.model_fields.keys() | ChatBody.unsupported.keys()
    assert of_chats <= known
    request(n=1, frequency_penalty=0.0, presence_penalty=0, stop=None, logprobs=False)


def test_a_body_is_an_object_with_model_and_input() -> None:
    for data, param in (([], None), ({"model": "m"}, "input"), ({"input": "hi"}, "model")):
        with pytest.raises(InvalidRequest) as caught:
            ResponsesBody.parse(data)
        assert caught.value.param == param


def test_unknown_fields_are_known_by_name() -> None:
    body = ResponsesBody.parse({"model": "m", "input": "hi", "zz": 1, "messages": []})
    assert body.ignored == ("zz",)
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "b": 1}
    message = {"role": "assistant", "id": "1", "status": "completed", "content": [part], "c": 1}
    thought = {"type": "reasoning", "summary": [], "id": "1", "status": "completed"}
    items = [message, thought, CALL | {"id": "1", "status": "completed", "d": 1, "e": None}]
    fields = {"tools": [TOOL | {"f": 1}], "service_tier": "priority"}
    body = ResponsesBody.parse({"model": "m", "input": items, **fields})
    assert body.ignored == ("input.c", "input.content.b", "input.d", "service_tier", "tools.f")
    assert request(tools=[TOOL | {"f": 1}]).tools == request(tools=[TOOL]).tools


def test_what_cannot_be_held_is_left_out_unless_it_is_strict() -> None:
    """Of the form of the answer and of functions, which may be in a namespace."""
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    function = {"type": "function", "name": "f", "parameters": schema}
    group = {"type": "namespace", "name": "ns", "tools": [function]}
    path = "properties.a.uniqueItems"
    assert request(text={"format": form}).unheld == (f"text.format.schema.{path}",)
    found = request(tools=[function, group], tool_choice="required")
    assert found.unheld == (f"tools.f.parameters.{path}", f"tools.ns__f.parameters.{path}")
    for fields in (
        {"text": {"format": {**form, "strict": True}}},
        {"tools": [{**function, "strict": True}], "tool_choice": "required"},
    ):
        with pytest.raises(Unsupported, match=path) as caught:
            request(**fields)
        assert caught.value.param == next(iter(fields))


def test_what_agents_ask_for_and_never_get_is_named() -> None:
    """It would change no answer."""
    fields = {
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
        "truncation": "auto",
    }
    body = ResponsesBody.parse({"model": "m", "input": "hi", **fields})
    assert body.ignored == (
        *("context_management", "include", "reasoning.summary", "store", "truncation"),
    )
    assert body.to_chat().ignored == ()
    assert body.to_chat().reasoning_effort == "low"
    nothing = {
        "include": ["message.output_text.logprobs"],
        "context_management": [],
        "truncation": "disabled",
    }
    limit = {"max_tool_calls": 3}  # of what a server runs itself: it is kept
    body = ResponsesBody.parse({"model": "m", "input": "hi", **nothing, **limit})
    assert body.ignored == ()


@pytest.mark.parametrize(
    ("reasoning", "ignored"),
    [
        ({"context": "auto", "mode": "auto", "summary": None}, []),
        ({"context": None, "mode": "standard", "generate_summary": None}, []),
        ({"context": "current_turn", "mode": "pro"}, ["context", "mode"]),
        ({"context": "all_turns", "generate_summary": "auto"}, ["context", "summary"]),
        ({"budget": 5, "new": None, "effort": "low"}, ["budget"]),
    ],
)
def test_how_a_model_reasons_here_is_named_where_it_is_asked_for_otherwise(
    reasoning: dict[str, Any], ignored: list[str]
) -> None:
    """As are fields that nobody knows."""
    body = ResponsesBody.parse({"model": "m", "input": "hi", "reasoning": reasoning})
    assert body.ignored == tuple(f"reasoning.{name}" for name in ignored)
    assert body.to_chat().ignored == ()


def test_an_error_about_the_effort_names_its_field() -> None:
    """The parameter is what it is in: ``reasoning`` alone may be understood."""
    error = Unsupported("this template does not know reasoning_effort", "reasoning_effort")
    with (
        pytest.raises(Unsupported, match=r"know reasoning\.effort$") as caught,
        params_named(PARAM_NAMES),
    ):
        raise error
    assert caught.value.param == "reasoning"


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (PromptTooLong("too long", "messages", 9, 8), "input"),
        (InvalidRequest("wrong", "max_tokens"), "max_output_tokens"),
        (InvalidRequest("wrong", "logprobs"), "top_logprobs"),
        (InvalidRequest("wrong", "temperature"), "temperature"),
        (Overloaded("later"), None),
    ],
)
def test_errors_of_the_model_server_are_renamed(error: RequestError, param: str | None) -> None:
    """What a chat calls ``messages`` is ``input`` here; all else of the error stays."""
    with pytest.raises(type(error), match=error.message) as caught, params_named(PARAM_NAMES):
        raise error
    assert caught.value.param == param
    if isinstance(caught.value, PromptTooLong):
        assert (caught.value.num_tokens, caught.value.max_num_tokens) == (9, 8)
