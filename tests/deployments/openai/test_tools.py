"""Tools are checked, shown to the template, and turned into the grammar of a required call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall

from deployments.generation import Delta, GenerationRequest, Summary
from deployments.off_loop import MAX_INLINE_SIZE
from deployments.openai.chat_format import ChatFormat
from deployments.openai.completion_builder import CompletionBuilder
from deployments.openai.protocol import ChatBody, TokenizeBody
from deployments.openai.responses_protocol import ResponsesBody
from deployments.openai.tools import MAX_TOOLS
from deployments.parsers.tool_parsers import HermesToolParser
from hdserve import grammar
from hdserve.core import DraftCounts
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer
from hdserve.errors import InvalidRequest, Unsupported
from hdserve.schema import MAX_UNHELD

USER = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
OTHER = {"type": "function", "function": {"name": "g", "description": "does it", "strict": True}}
NAMED = {"type": "function", "function": {"name": "g"}}
SUMMARY = Summary(num_prompt_tokens=7, num_output_tokens=11, drafts=DraftCounts(), replica="abc")
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A choice of some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def request(**fields: Any) -> GenerationRequest:
    return ChatBody.parse({"model": "m", "messages": USER, **fields}).to_generation("r")


def test_tools_reach_the_template() -> None:
    """In the form of the API, without what the client left out; not when none may be called."""
    found = request(tools=[TOOL, OTHER])
    assert found.tools == (TOOL, OTHER)
    assert "grammar" not in found.sampling
    assert found.sampling["skip_special_tokens"] is False
    assert request(tools=[TOOL], skip_special_tokens=True).sampling["skip_special_tokens"] is True
    for fields in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {}):
        assert request(**fields).tools == ()
        assert request(**fields).sampling == {}


def test_all_apis_take_as_many_tools() -> None:
    """The functions of namespaces count as those beside them."""

    def of_response(functions: list[dict[str, Any]]) -> GenerationRequest:
        tools = [{"type": "function", **function} for function in functions]
        body = ResponsesBody.parse({"model": "m", "input": "hi", "tools": tools})
        return body.to_chat().to_generation("r")

    def of_group(functions: list[dict[str, Any]]) -> GenerationRequest:
        tools = [{"type": "function", **function} for function in functions]
        group = {"type": "namespace", "name": "ns", "tools": tools}
        body = ResponsesBody.parse({"model": "m", "input": "hi", "tools": [group]})
        return body.to_chat().to_generation("r")

    def of_chat(functions: list[dict[str, Any]]) -> GenerationRequest:
        return request(tools=[{"type": "function", "function": each} for each in functions])

    functions = [{"name": f"f{number}"} for number in range(MAX_TOOLS + 1)]
    for ask in (of_chat, of_response, of_group):
        assert len(ask(functions[:-1]).tools) == MAX_TOOLS == 2048
        with pytest.raises(InvalidRequest, match=f"at most {MAX_TOOLS}") as caught:
            ask(functions)
        assert caught.value.param == "tools"


def test_unknown_fields_of_tools_do_not_reach_the_template() -> None:
    """They are told to be ignored."""
    tool = {**TOOL, "a": 1, "function": {**TOOL["function"], "b": 2}}
    assert request(tools=[tool]).tools == (TOOL,)


def test_required_calls_have_a_grammar() -> None:
    """Of all tools, or of the named one; one call where there may not be several."""
    required = request(tools=[TOOL, OTHER], tool_choice="required").sampling["grammar"]
    single = request(
        tools=[TOOL, OTHER], tool_choice="required", parallel_tool_calls=False
    ).sampling["grammar"]
    named = request(tools=[TOOL, OTHER], tool_choice=NAMED)
    assert '\\"const\\": \\"f\\"' in required
    assert '\\"const\\": \\"f\\"' not in named.sampling["grammar"]
    assert named.grammar_param == "tools"
    body = {"model": "m", "messages": USER, "tools": [TOOL, OTHER]}
    assert ChatBody.parse({**body, "tool_choice": NAMED}).names_tool
    assert not ChatBody.parse({**body, "tool_choice": "required"}).names_tool
    assert ")*" in required
    assert ")*" not in single
    assert ")*" not in named.sampling["grammar"]


def test_a_format_of_the_answer_leaves_calls_possible(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """Clients give both: the model calls tools until it answers in the format.  A call that is
    required leaves no answer that could have one."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    def allows(output: str, **fields: Any) -> bool:
        found = request(response_format=form, **fields)
        assert found.grammar_param == "response_format"
        state = grammars.state(found.sampling["grammar"])
        for token_id in [*tokenizer.encode(output), 2]:
            if state.is_complete and token_id != 2:
                return False
            state.push(token_id)
        return state.error is None

    call = '<tool_call>\n{"name": "f", "arguments": {"b": 2}}\n</tool_call>'
    for output, with_tools, without in (
        ('{"a": 1}', True, True),
        (call, True, False),
        (f"{call}\n{call}", True, False),
        ('{"a": 2}', False, False),
        (f'{call}{{"a": 1}}', False, False),
        ("Well.", False, False),
    ):
        assert allows(output, tools=[TOOL]) is with_tools
        assert allows(output, tools=[TOOL], tool_choice="auto") is with_tools
        assert allows(output, tools=[TOOL], tool_choice="none") is without
        assert allows(output) is without
    assert not allows(f"{call}\n{call}", tools=[TOOL], parallel_tool_calls=False)
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        found = request(response_format=form, tools=[TOOL], tool_choice=choice)
        assert found == request(tools=[TOOL], tool_choice=choice)
    chosen = request(tools=[TOOL], guided_regex="ab*").sampling["grammar"]
    assert chosen == grammar.regex("ab*")


def unique(name: str, **fields: Any) -> dict[str, Any]:
    """A tool with a keyword that cannot be held."""
    parameters = {"type": "object", "properties": {"tags": {"uniqueItems": True}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def test_what_cannot_be_held_of_parameters_is_left_out() -> None:
    """Of each tool that the grammar has, and no other; its path tells which tool it is."""
    plain = {"type": "object", "properties": {"tags": {}}}
    tools = [TOOL, unique("g"), unique("h", strict=False)]
    path = "parameters.properties.tags.uniqueItems"
    found = request(tools=tools, tool_choice="required")
    assert found.unheld == (f"tools.g.{path}", f"tools.h.{path}")
    same = request(
        tools=[TOOL, *(unique(x, parameters=plain) for x in "gh")], tool_choice="required"
    )
    assert found.sampling["grammar"] == same.sampling["grammar"]
    assert request(tools=tools, tool_choice=NAMED).unheld == (f"tools.g.{path}",)
    form = {"type": "json_object"}
    assert request(tools=tools, response_format=form).unheld == found.unheld
    assert request(tools=tools).unheld == ()


def test_strict_parameters_are_held_or_refused() -> None:
    """By name; not where nothing is held to them."""
    tools = [TOOL, unique("g", strict=True)]
    path = r"tools\.g\.parameters\.properties\.tags\.uniqueItems"
    with pytest.raises(Unsupported, match=f"^this keyword cannot be enforced: {path}$") as caught:
        request(tools=tools, tool_choice="required")
    assert caught.value.param == "tools"
    assert request(tools=tools, tool_choice=allowed("required", "f")).unheld == ()
    assert request(tools=tools).unheld == ()


def test_what_is_left_out_of_many_tools_is_bounded() -> None:
    tools = [unique(f"f{index}") for index in range(2 * MAX_UNHELD)]
    assert len(request(tools=tools, tool_choice="required").unheld) == MAX_UNHELD


def test_arguments_without_their_reference_are_an_object() -> None:
    """Where it leads elsewhere, and says nothing here."""
    tool = {"name": "f", "parameters": {"$ref": "https://example.com/a.json"}}
    found = request(tools=[{"type": "function", "function": tool}], tool_choice="required")
    assert found.unheld == ("tools.f.parameters.$ref",)
    assert (
        found.sampling["grammar"]
        == request(tools=[TOOL], tool_choice="required").sampling["grammar"]
    )


def test_a_required_call_is_of_an_allowed_tool() -> None:
    """The prompt shows all of them, as with other choices."""
    both = [TOOL, OTHER]
    found = request(tools=both, tool_choice=allowed("required", "g"))
    alone = request(tools=[OTHER], tool_choice="required")
    assert found.sampling == alone.sampling
    assert found.tools == request(tools=both, tool_choice="required").tools == (TOOL, OTHER)
    named = request(tools=both, tool_choice=allowed("required", "g", "f", "f"))
    assert named == request(tools=both, tool_choice="required")
    body = ChatBody.parse(
        {"model": "m", "messages": USER, "tools": both, "tool_choice": allowed("required", "g")}
    )
    assert not body.names_tool
    assert body.ignored == ()


def test_a_model_is_shown_the_tools_that_it_may_call() -> None:
    """As it is free to write calls, nothing else says which."""
    both = [TOOL, OTHER]
    form = {"type": "json_object"}
    for fields in ({}, {"response_format": form}):
        found = request(tools=both, tool_choice=allowed("auto", "f"), **fields)
        assert found == request(tools=[TOOL], tool_choice="auto", **fields)
    for name, ignored in (("f", ()), ("g", ("tools.function.strict",))):
        body = {"tools": both, "tool_choice": allowed("auto", name)}
        assert ChatBody.parse({"model": "m", "messages": USER, **body}).ignored == ignored


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_among_the_tools(mode: str) -> None:
    for fields, message in (
        ({"tools": [TOOL], "tool_choice": allowed(mode, "f", "h")}, "^there is no tool 'h'$"),
        ({"tool_choice": allowed(mode, "f")}, "^tool_choice needs tools$"),
        ({"tools": [TOOL], "tool_choice": allowed(mode)}, "an array of at least 1 is expected$"),
    ):
        with pytest.raises(InvalidRequest, match=message) as caught:
            request(**fields)
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("parameters", "allowed", "forbidden"),
    [
        ({"properties": {"a": {"enum": [1]}}}, ['{"a": 1}', "{}"], ["[1]", "5", '{"a": 2}']),
        ({"type": ["null", "object"]}, ["{}"], ["null"]),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"b": 1}'], ["{}", "5"]),
        ({}, ["{}", '{"a": 1}'], ["5"]),
        (None, ["{}"], ["5", '{"a": 1}']),
    ],
)
def test_the_arguments_of_required_calls_are_objects(
    parameters: Any,
    allowed: list[str],
    forbidden: list[str],
    tokenizer: Tokenizer,
    grammars: Grammars,
) -> None:
    """Whatever the parameters say of their type, as nothing else is read as a call.  A function
    without parameters takes no arguments."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = request(tools=[tool], tool_choice="required").sampling["grammar"]

    def allows(arguments: str) -> bool:
        state = grammars.state(text)
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        for token_id in tokenizer.encode(call):
            state.push(token_id)
        return state.error is None

    assert [allows(arguments) for arguments in allowed] == [True] * len(allowed)
    assert [allows(arguments) for arguments in forbidden] == [False] * len(forbidden)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
    (
        {
            "tools": [TOOL],
            "tool_choice": "required",
            "guided_json": {"type": "object"},
        },
        "tools",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": [1]}}]}]},
        "messages",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
            "tools",
            "tools of type 'custom' are not supported",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
            "tool_choice",
            "choices of tools of type 'custom' are not supported",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]},
                },
            },
            "tool_choice",
            "choices of tools of type 'mcp' are not supported",
        ),
        (
            {"tools": [{"type": "\ud800" * 99}]},
            "tools",
            f"tools of type {chr(0xD800) * 50!r} are not supported",
        ),
    ],
)
def test_what_is_not_offered_is_said_to_be(
    fields: dict[str, Any], param: str, message: str
) -> None:
    """Not that something else is expected, as where a value is wrong."""
    with pytest.raises(Unsupported) as caught:
        request(**fields)
    assert (caught.value.message, caught.value.param) == (message, param)


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_tools_are_refused(fields: dict[str, Any], param: str) -> None:
    """By the name of the parameter, in a bounded message."""
    with pytest.raises(InvalidRequest) as caught:
        request(**fields)
    assert caught.value.param == param
    assert len(caught.value.message) <= 300


def test_formats_of_parameters_are_notes(grammars: Grammars) -> None:
    """Tools that were made from OpenAPI have many that nobody knows."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "byte"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammars.check(request(tools=[tool], tool_choice="required").sampling["grammar"])


def test_deep_parameters_are_refused() -> None:
    """A schema deeper than can be written down is an error of the request."""
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(InvalidRequest) as caught:
        request(tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"


def test_models_whose_calls_cannot_be_read() -> None:
    """Their tools are refused; a request without tools is not."""
    body = ChatBody.parse({"model": "m", "messages": USER, "tools": [TOOL]})
    with pytest.raises(Unsupported) as caught:
        body.to_generation("r", None)
    assert caught.value.param == "tools"
    ChatBody.parse({"model": "m", "messages": USER, "tools": []}).to_generation("r", None)


def test_arguments_of_earlier_calls_are_objects_for_the_template() -> None:
    """Clients send them as text, templates write them out."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = request(
        messages=[
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
    ).messages
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found[1]["content"] == ""
    assert found[2] == {"role": "tool", "tool_call_id": "1", "content": "42"}
    call["function"] = {"name": "f", "arguments": ""}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (found_call,) = request(messages=[message]).messages[0]["tool_calls"]
    assert found_call["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "San', "[", "[1]", "null", '{"a": "\\ud800"}', '{"a": ' * 500 + "1" + "}" * 500],
)
def test_arguments_that_are_no_object_stay_as_they_were(arguments: str) -> None:
    """The model may have been cut off in them, and an answer can always be sent back."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (found,) = request(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert found["tool_calls"] == [call]


def test_a_call_that_was_cut_off_can_be_sent_back() -> None:
    """As this server answered it."""
    begun = CALL[: CALL.index("é")]
    builder = CompletionBuilder(ChatFormat(HermesToolParser), "m", "r", 1)
    for delta in deltas(begun, "length"):
        builder.collect(delta)
    choice = builder.whole(SUMMARY)["choices"][0]
    assert choice["finish_reason"] == "length"
    (found,) = request(messages=[choice["message"]]).messages
    assert found["tool_calls"][0]["function"]["arguments"] == '{"a": "'


def deltas(text: str, reason: str = "stop", size: int = 7) -> list[Delta]:
    """``text`` in pieces of ``size`` characters."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return [
        Delta(0, 0, piece, (1,), (0,), None, reason if index == len(pieces) - 1 else None)
        for index, piece in enumerate(pieces)
    ]


def as_read(pieces: list[ChoiceDeltaToolCall]) -> list[dict[str, Any]]:
    """The calls of a stream, put together: each begins with all but its arguments."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        assert piece.function is not None
        if piece.index == len(calls):
            assert (piece.type, piece.function.arguments) == ("function", "")
            function = {"name": piece.function.name, "arguments": ""}
            calls.append({"id": piece.id, "function": function})
        else:
            assert (piece.id, piece.type, piece.function.name) == (None, None, None)
            calls[piece.index]["function"]["arguments"] += piece.function.arguments
    return calls


@pytest.mark.parametrize(
    ("text", "is_one_call", "content", "num_calls"),
    [
        (f"Wait. {CALL}\n{CALL}", False, "Wait.", 2),
        (f"{CALL}{CALL}", True, None, 1),
        ("just text", False, "just text", 0),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_answers_with_calls(
    text: str, is_one_call: bool, content: str | None, num_calls: int, size: int
) -> None:
    """Whole and streamed, as the real client reads them, the same calls; no chunk is empty while
    the text of a call is held back."""

    def builder() -> CompletionBuilder:
        form = ChatFormat(HermesToolParser, is_one_call=is_one_call)
        return CompletionBuilder(form, "m", "r", 1)

    made = builder()
    for delta in deltas(text, size=size):
        made.collect(delta)
    choice = ChatCompletion.model_validate(made.whole(SUMMARY)).choices[0]
    calls = choice.message.tool_calls or []
    assert choice.message.content == content
    assert len(calls) == num_calls
    assert choice.finish_reason == ("tool_calls" if num_calls else "stop")
    streamed = builder()
    chunks = [
        ChatCompletionChunk.model_validate(chunk)
        for delta in deltas(text, size=size)
        for chunk in streamed.add(delta)
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (content or "")
    assert all(chunk.choices[0].delta.to_dict() for chunk in chunks[:-1])
    first = chunks[0].choices[0].delta.to_dict()
    assert first == {"role": "assistant", "content": content and ""}
    found = as_read([call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()])
    assert [call["function"] for call in found] == [call.function.model_dump() for call in calls]
    assert len({call["id"] for call in found}) == num_calls
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    for call in calls:
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"a": "é"}


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_named_function_ends_with_stop(reason: str) -> None:
    """As with the OpenAI API: to call was not the model's choice."""
    form = ChatFormat(HermesToolParser, is_named_call=True)
    made = CompletionBuilder(form, "m", "r", 1)
    for delta in deltas(CALL, reason):
        made.collect(delta)
    choice = ChatCompletion.model_validate(made.whole(SUMMARY)).choices[0]
    assert choice.finish_reason == reason
    assert len(choice.message.tool_calls or ()) == 1
    streamed = [chunk for delta in deltas(CALL, reason) for chunk in made.add(delta)]
    assert streamed[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("size", [30, 45])
def test_an_answer_that_is_cut_off_keeps_its_reason(size: int, reason: str) -> None:
    """Half a call is text before its arguments, and a call with half of them after."""
    made = CompletionBuilder(ChatFormat(HermesToolParser), "m", "r", 1)
    for delta in deltas(CALL[:size], reason):
        made.collect(delta)
    choice = ChatCompletion.model_validate(made.whole(SUMMARY)).choices[0]
    assert choice.finish_reason == reason
    if size == 30:
        assert (choice.message.content, choice.message.tool_calls) == (CALL[:30], None)
        return
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", '{"a": "')


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_a_call_is_told_to_its_end_before_the_next_begins(size: int) -> None:
    """Clients take it for complete then, however many tokens come at a time."""
    streamed = CompletionBuilder(ChatFormat(HermesToolParser), "m", "r", 1)
    state = ChatCompletionStreamState()
    texts = {}
    for delta in deltas(CALL + CALL, size=size):
        for chunk in streamed.add(delta):
            for event in state.handle_chunk(ChatCompletionChunk.model_validate(chunk)):
                if event.type == "tool_calls.function.arguments.done":
                    texts[event.index] = event.arguments
    assert [json.loads(text) for text in texts.values()] == [{"a": "é"}] * 2


def test_strict_tools_whose_numbers_are_multiples_of_too_much_are_refused() -> None:
    tool: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"n": {"type": "integer", "multipleOf": 10**9}}},
            "strict": True,
        },
    }
    with pytest.raises(InvalidRequest, match="multipleOf") as caught:
        request(tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"


@pytest.mark.parametrize("choice", ["required", "auto", "none", None])
def test_tools_of_too_many_values_together_are_refused(choice: str | None) -> None:
    """Also where no grammar is made of them: templates write them, and responses show them."""

    def tool(name: str) -> dict[str, Any]:
        parameters = {"properties": {"n": {"enum": list(range(60_000))}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    with pytest.raises(InvalidRequest, match="more than 100000 values") as caught:
        request(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert caught.value.param == "tools"
    tokenized = TokenizeBody.parse(
        {"model": "m", "messages": USER, "tools": [tool("f"), tool("g")]}
    )
    with pytest.raises(InvalidRequest, match="more than 100000 values"):
        tokenized.to_generation()


def test_a_long_call_is_much_to_read() -> None:
    """So that it is read beside the event loop."""
    builder = CompletionBuilder(ChatFormat(HermesToolParser), "m", "r", 1)
    for part in ('<tool_call>{"name": "f", "arguments": {"a": "', 200_000 * "x", '"}}</tool_call>'):
        builder.collect(Delta(0, 0, part, (1,), (0,), None, None))
    assert builder.size > MAX_INLINE_SIZE
    (call,) = builder.whole(SUMMARY)["choices"][0]["message"]["tool_calls"]
    assert len(call["function"]["arguments"]) > 200_000
