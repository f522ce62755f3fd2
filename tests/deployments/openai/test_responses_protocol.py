"""A request of the Responses API is the chat it should be, or is refused by its own name."""

from __future__ import annotations

from time import thread_time
from typing import Any, get_args

import pytest
from openai.types.responses import EasyInputMessage, ResponseFunctionToolCall, ResponseInputItem

from deployments.generation import GenerationRequest
from deployments.http.param_names import params_named
from deployments.openai.protocol import ChatBody
from deployments.openai.request_body import UNSUPPORTED_EXTENSIONS
from deployments.openai.responses_protocol import LEFT_OUT_ITEMS, PARAM_NAMES, ResponsesBody
from deployments.parsers.tool_parsers import HermesToolParser
from hdserve.errors import InvalidRequest, Overloaded, PromptTooLong, RequestError, Unsupported

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "name": "f", "description": "does it", "parameters": SCHEMA}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def request(**fields: Any) -> GenerationRequest:
    body = ResponsesBody.parse({"model": "m", "input": "hi", **fields})
    with params_named(PARAM_NAMES):
        return body.to_chat().to_generation("r", HermesToolParser)


def chat(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "hi"}]
    return ChatBody.parse({"model": "m", "messages": messages, **fields}).to_generation("r")


def test_a_text_is_a_message_of_the_user() -> None:
    """Behind the instructions, if there are any."""
    assert request() == request(instructions="") == chat()
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "Be brief."}
    assert request(instructions="Be brief.") == chat(messages=[system, user])


def test_items_of_the_openai_library_are_read() -> None:
    """With all the fields that it knows, most of which are ``null``, also the type."""
    said = EasyInputMessage(role="user", content="hi").model_dump()
    call = ResponseFunctionToolCall(**CALL).model_dump()
    assert said["type"] is None
    body = ResponsesBody.parse({"model": "m", "input": [said, call]})
    assert not body.ignored
    user, assistant = body.to_chat().to_generation("r").messages
    assert user == {"role": "user", "content": "hi"}
    assert [found["id"] for found in assistant["tool_calls"]] == ["c1"]
    for kind in ("", "frobs"):
        with pytest.raises(Unsupported, match=rf"^items of type '{kind}' are not supported$"):
            request(input=[{**said, "type": kind}])
    with pytest.raises(InvalidRequest, match=r"^input\.0\.type: 'message' is expected$"):
        request(input=[{**said, "type": 5}])


def test_what_another_server_did_is_left_out() -> None:
    """Conversations that began there go on: what came of it is in the message behind it."""
    user, said = ({"role": role, "content": role} for role in ("user", "assistant"))
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"q": 1}}
    items = [user, search, said, search, {"type": "mcp_call", "id": "1", "output": "x"}, user]
    body = ResponsesBody.parse({"model": "m", "input": items})
    assert body.ignored == ("input.mcp_call", "input.web_search_call")
    assert [str(error) for error in body.left_out.values()] == [
        "items of type 'web_search_call' are not supported",
        "items of type 'mcp_call' are not supported",
    ]
    assert request(input=items).messages == request(input=[user, said, user]).messages


def test_every_documented_item_is_read_or_left_out_or_refused() -> None:
    """By all types that the client's library has for one: what a client's own tools gave, which
    nothing else says, is never left out."""
    (union, *_) = get_args(ResponseInputItem)
    annotations = [item.__annotations__["type"] for item in get_args(union)]
    kinds = {kind for found in annotations for kind in literals(found)}
    assert len(kinds) > 25
    calls = {"function_call", "custom_tool_call"}
    read = {"message", "reasoning", *calls, *(f"{kind}_output" for kind in calls)}
    assert kinds > LEFT_OUT_ITEMS | read
    for kind in kinds - LEFT_OUT_ITEMS - read - {"item_reference"}:
        with pytest.raises(Unsupported, match=rf"^items of type '{kind}' are not supported$"):
            request(input=[{"type": kind}])


def literals(annotation: Any) -> list[str]:
    """The texts of an annotation, optional or not."""
    found = get_args(annotation)
    return [part for part in found if isinstance(part, str)] + [
        text for part in found for text in literals(part)
    ]


def test_a_reference_to_an_item_says_what_to_send() -> None:
    """Clients send it in the second turn, as they take for granted that answers are stored."""
    with pytest.raises(Unsupported, match=r"send the item itself.*store: false$") as caught:
        request(input=[{"type": "item_reference", "id": "msg_1"}])
    assert caught.value.param == "input"


def test_items_are_messages() -> None:
    """Parts are lines of one text; calls belong to the message of the assistant before them."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        CALL,
        CALL | {"call_id": "c2", "id": "fc_2", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "43"}],
        },
        CALL | {"call_id": "c3"},
    ]
    found = request(input=items).messages
    assert [(message["role"], message["content"]) for message in found] == [
        ("developer", "Be brief."),
        ("user", "a\nb"),
        ("assistant", "Well."),
        ("tool", "42"),
        ("tool", "43"),
        ("assistant", ""),
    ]
    assert [call["id"] for call in found[2]["tool_calls"]] == ["c1", "c2"]
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [message.get("tool_call_id") for message in found[3:]] == ["c1", "c2", None]
    assert [call["id"] for call in found[5]["tool_calls"]] == ["c3"]


def test_what_is_said_behind_a_call_is_in_its_message() -> None:
    """So that results follow what called, and behind them another message begins."""

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    for items, contents in (
        ([CALL, said("a"), result], ["a", "42"]),
        (
            [said("a"), CALL, said("b"), CALL | {"call_id": "c2"}, said("c"), result],
            ["a\nb\nc", "42"],
        ),
        ([CALL, said(""), result, said("b")], ["", "42", "b"]),
        ([said("a"), said("b"), CALL, result], ["a", "b", "42"]),
    ):
        found = request(input=[{"role": "user", "content": "hi"}, *items]).messages[1:]
        assert [message["content"] for message in found] == contents
        calling = found[[message["role"] for message in found].index("tool") - 1]
        assert calling["tool_calls"][0]["id"] == "c1"


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"role": "assistant", "content": "x" * 2000}, "content"),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 2000}]},
            "reasoning_content",
        ),
    ],
)
def test_many_texts_of_a_message_are_copied_once(item: dict[str, Any], name: str) -> None:
    """Not each time that another one follows."""
    first = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}
    body = ResponsesBody.parse({"model": "m", "input": [first, CALL, *[item] * 2000]})
    before = thread_time()
    (*_, last) = body._messages()
    assert thread_time() - before < 0.15
    assert len(last[name]) >= 4_000_000


def test_reasoning_belongs_to_what_follows() -> None:
    """A message or calls of the assistant; what only another server can read is left out."""

    def thought(text: str) -> dict[str, Any]:
        parts = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts}

    user, said = ({"role": role, "content": role} for role in ("user", "assistant"))
    items = [user, thought("a"), said, CALL, user, thought("b"), CALL, thought("c"), user]
    found = request(input=items).messages
    assert [
        (message["content"], message.get("reasoning_content"), len(message.get("tool_calls", ())))
        for message in found
    ] == [
        ("user", None, 0),
        ("assistant", "a", 1),
        ("user", None, 0),
        ("", "b", 1),
        ("", "c", 0),
        ("user", None, 0),
    ]
    parts = [{"type": "summary_text", "text": "in short"}]
    short = {"type": "reasoning", "summary": parts, "encrypted_content": ""}
    nothing = {"type": "reasoning", "summary": []}
    (_, answer, _) = request(input=[user, thought("a"), short, nothing, said, user]).messages
    assert (answer["content"], answer["reasoning_content"]) == ("assistant", "ain short")
    assert request(input=[nothing, user]).messages == request(input=[user]).messages
    for encrypted, same in ((nothing, nothing), (short, {**short, "encrypted_content": None})):
        items = [user, {**encrypted, "encrypted_content": "x"}, said, user]
        assert request(input=items).messages == request(input=[user, same, said, user]).messages
        body = ResponsesBody.parse({"model": "m", "input": items})
        assert body.ignored == ("input.encrypted_content",)
        (error,) = body.left_out.values()
        assert (error.message, error.param) == ("encrypted reasoning is not supported", "input")


def test_calls_of_tools_that_take_a_text() -> None:
    """Are those of functions with one parameter, as a model that knows functions alone has them."""
    user = {"role": "user", "content": "hi"}
    call = {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c1"}
    items = [
        user,
        {**call, "name": "apply_patch", "input": "*** Begin Patch\n"},
        {"type": "custom_tool_call_output", "id": "o1", "call_id": "c1", "output": "Done."},
        {**call, "call_id": "c2", "namespace": "ns", "name": "f", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": ""},
        user,
    ]
    body = ResponsesBody.parse({"model": "m", "input": items})
    assert body.ignored == ()
    functions = {
        "c1": ("apply_patch", {"input": "*** Begin Patch\n"}),
        "c2": ("ns__f", {"input": ""}),
    }
    found = request(input=items).messages
    assert [message["role"] for message in found] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "user",
    ]
    for message in found[1:4:2]:
        (called,) = message["tool_calls"]
        name, arguments = functions[called["id"]]
        assert called["function"] == {"name": name, "arguments": arguments}
    assert [(found[place]["tool_call_id"], found[place]["content"]) for place in (2, 4)] == [
        ("c1", "Done."),
        ("c2", ""),
    ]
    with pytest.raises(InvalidRequest, match=r"^input\.0\.input: is missing$"):
        request(input=[{**call, "name": "f"}])


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        (
            {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3},
            {"max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3},
        ),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"stop": ""}, {}),
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
        ({"text": {"format": None}}, {}),
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
    ({"reasoning": {"budget": 5}}, "reasoning", InvalidRequest),
    ({"reasoning_effort": "high"}, "reasoning_effort", Unsupported),
    ({"reasoning": {"summary": ["auto"]}}, "reasoning", InvalidRequest),
    ({"include": ["message.output_text.logprobs"]}, "include", Unsupported),
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
    ({"stop": ["a"]}, "stop", Unsupported),
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
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
        "truncation": "auto",
    }
    body = ResponsesBody.parse({"model": "m", "input": "hi", **fields})
    assert body.ignored == ("include", "reasoning.summary", "store", "truncation")
    assert body.to_chat().ignored == ()
    assert body.to_chat().reasoning_effort == "low"
    nothing = {"include": [], "reasoning": {"summary": None}, "truncation": "disabled"}
    assert ResponsesBody.parse({"model": "m", "input": "hi", **nothing}).ignored == ()


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
        (PromptTooLong("too long", "messages"), "input"),
        (InvalidRequest("wrong", "max_tokens"), "max_output_tokens"),
        (InvalidRequest("wrong", "temperature"), "temperature"),
        (Overloaded("later", retry_after_s=7), None),
    ],
)
def test_errors_of_the_model_server_are_renamed(error: RequestError, param: str | None) -> None:
    """What a chat calls ``messages`` is ``input`` here; all else of the error stays."""
    with pytest.raises(type(error), match=error.message) as caught, params_named(PARAM_NAMES):
        raise error
    assert caught.value.param == param
    if isinstance(caught.value, Overloaded):
        assert caught.value.retry_after_s == 7
