"""Requests of the Messages API are chats in other words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types.beta import BetaOutputConfigParam, BetaToolParam, MessageCountTokensParams
from anthropic.types.beta.message_create_params import MessageCreateParamsBase

from deployments.anthropic.protocol import (
    PARAM_NAMES,
    CountTokensBody,
    MessagesBody,
    MessagesTool,
    OutputConfig,
)
from deployments.generation import THINKING_VARIABLES, GenerationRequest
from deployments.http.param_names import params_named
from deployments.openai.messages import MAX_MESSAGES
from deployments.openai.protocol import ChatBody
from deployments.openai.tools import MAX_TOOLS
from hdserve.conversation import ChatEnd
from hdserve.core import SamplingParams
from hdserve.errors import InvalidRequest, Unsupported

HI: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "f", "description": "Does f.", "input_schema": SCHEMA}
THINKING = {"enable_thinking": True, "thinking": True}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}
CALLING = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "b"}}


def parsed(**fields: Any) -> MessagesBody:
    return MessagesBody.parse({"model": "m", "max_tokens": 9, "messages": HI, **fields})


def generation(**fields: Any) -> GenerationRequest:
    with params_named(PARAM_NAMES):
        return parsed(**fields).to_chat().to_generation("r")


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """What the template is given of a conversation."""
    return [dict(found) for found in generation(messages=given, **fields).messages]


def test_it_is_the_chat_that_asks_for_the_same() -> None:
    chat = ChatBody.parse(
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, *HI],
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "stop": ["x", ""],
            "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
    ).to_generation("r")
    found = generation(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["", "x"],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        metadata={"user_id": "u"},
    )
    assert found == chat


def test_empty_stop_sequences_are_dropped() -> None:
    assert generation(stop_sequences=[""]).sampling["stop"] == ()


def test_a_seed_of_minus_one_is_none() -> None:
    assert "seed" not in generation(seed=-1).sampling
    assert generation(seed=0).sampling["seed"] == 0


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], wanted: Any) -> None:
    chat = parsed(tools=[TOOL], tool_choice=choice).to_chat()
    assert chat.model_dump()["tool_choice"] == wanted


def test_blocks_of_a_conversation() -> None:
    """Results come before what is said after them, and thoughts, texts and calls of one answer are
    one message."""
    found = messages(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Well.", "signature": "s"},
                {"type": "text", "text": "So:"},
                CALLING,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "42", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "43"}],
                },
                {"type": "text", "text": "And?"},
            ],
        },
        tools=[TOOL],
    )
    user, assistant, first, second, last = found
    assert user == {"role": "user", "content": "a\nb"}
    assert assistant["reasoning_content"] == "Well."
    assert assistant["content"] == "So:"
    (call,) = assistant["tool_calls"]
    assert (call["id"], call["function"]) == ("t1", {"name": "f", "arguments": {"a": "b"}})
    assert first == {"role": "tool", "tool_call_id": "t1", "content": "42"}
    assert second == {"role": "tool", "tool_call_id": "t2", "content": "43"}
    assert last == {"role": "user", "content": "And?"}


def test_messages_of_one_role_are_one() -> None:
    found = messages(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Well."}]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    )
    assert [(each["role"], each["content"]) for each in found] == [
        ("user", "a\nb"),
        ("assistant", "c\nd"),
        ("user", "e"),
    ]
    assert found[1]["reasoning_content"] == "Well."


def test_an_empty_beginning_is_none() -> None:
    """Nor one of what nobody can read."""
    redacted = {"type": "redacted_thinking", "data": "x"}
    thought = {"type": "thinking", "thinking": "Well."}
    for content in ("", " \n", [], [redacted], [thought]):
        found = generation(messages=[*HI, {"role": "assistant", "content": content}])
        assert found.chat_end is ChatEnd.BEFORE_ANSWER
        assert [message["role"] for message in found.messages] == ["user"]


def test_a_last_message_of_the_assistant_goes_on() -> None:
    found = generation(messages=[*HI, {"role": "assistant", "content": "The answer is ("}])
    assert found.chat_end is ChatEnd.IN_LAST_MESSAGE
    assert found.messages[-1]["content"] == "The answer is ("
    assert generation().chat_end is ChatEnd.BEFORE_ANSWER


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, THINKING),
        ({"thinking": {"type": "adaptive"}}, THINKING),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": THINKING},
            THINKING,
        ),
    ],
)
def test_thinking_is_asked_for_by_the_template(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert generation(**fields).template_options == variables


def test_what_only_a_template_can_meet() -> None:
    """Is said by the parameter; any of its variables will do."""
    assert parsed().variables == parsed(output_config={}).variables == {}
    found = parsed(thinking={"type": "disabled"}, output_config={"effort": "low"}).variables
    assert set(found) == {"thinking", "output_config.effort"}
    assert {name for names in found.values() for name in names} == {*THINKING_VARIABLES}


def test_the_form_of_the_answer() -> None:
    """Is held; a wrong one is told by the parameter it came in."""
    form = {"type": "json_schema", "schema": SCHEMA}
    found = generation(output_config={"format": form})
    assert found.grammar_param == "output_config"
    assert json.dumps("a") in found.sampling["grammar"]
    endless = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    with pytest.raises(InvalidRequest) as caught:
        generation(output_config={"format": {**form, "schema": endless}})
    assert caught.value.param == "output_config"


def test_what_cannot_be_held_is_left_out_unless_it_is_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    path = "properties.a.uniqueItems"
    found = generation(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert found.unheld == (f"output_config.format.schema.{path}",)
    tool = {"name": "f", "input_schema": schema}
    found = generation(tools=[tool], tool_choice={"type": "any"})
    assert found.unheld == (f"tools.f.input_schema.{path}",)
    with pytest.raises(Unsupported, match=f"f.input_schema.{path}") as caught:
        generation(tools=[{**tool, "strict": True}], tool_choice={"type": "any"})
    assert caught.value.param == "tools"


def test_what_is_asked_in_vain_is_named() -> None:
    body = parsed(
        messages=[
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, CALLING]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "is_error": True}],
            },
        ],
        thinking={"type": "enabled", "budget_tokens": 5000, "display": "omitted"},
        context_management={"edits": []},
        output_config={"task_budget": {"type": "tokens", "total": 50_000}},
        tools=[
            {
                **TOOL,
                "strict": True,
                "defer_loading": True,
                "input_examples": [{"a": "b"}],
                "cache_control": {"type": "ephemeral"},
            }
        ],
        metadata={"user_id": "u"},
        service_tier="auto",
        frobnicate=1,
    )
    assert body.ignored == (
        "context_management",
        "frobnicate",
        "messages.content.is_error",
        "messages.content.redacted_thinking",
        "output_config.task_budget",
        "thinking.budget_tokens",
        "thinking.display",
        "tools.defer_loading",
        "tools.input_examples",
        "tools.strict",
    )
    form = {"type": "json_schema", "schema": SCHEMA}
    held = {"tools": [{**TOOL, "strict": True}]}
    for fields in ({"tool_choice": {"type": "any"}}, {"output_config": {"format": form}}):
        assert parsed(**held, **fields).ignored == ()


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens: at least 1 is expected"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "messages.0.role"),
        ({"messages": [{"role": "user", "content": [CALLING]}]}, "messages", "role 'user' has no"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [CALLING]}]},
            "messages",
            "the results of the last message's calls are missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": 5, "source": {}}]}]},
            "messages",
            "messages.0.content.0: a type of",
        ),
        ({"tools": [TOOL | {"type": 5}]}, "tools", "tools.0.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice", "has a name where"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}},
            "tool_choice",
            "has a name where",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice",
            "there is no tool 'g'",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences", "an array is expected"),
        ({"stop_sequences": ["x" * 1000]}, "stop_sequences", "256 characters"),
        ({"thinking": {"type": "sometimes"}}, "thinking", "thinking.type"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught, params_named(PARAM_NAMES):
        SamplingParams(**generation(**fields).sampling)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param", "things"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}, TOOL]}, "tools", "tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages",
            "content blocks",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [RESULT | {"content": [{"type": "search"}]}]}
                ]
            },
            "messages",
            "content blocks",
        ),
        ({"system": [{"type": "image"}]}, None, "content blocks"),
    ],
)
def test_what_is_not_offered_is_said_to_be(
    fields: dict[str, Any], param: str | None, things: str
) -> None:
    """Not that something else is expected, as where a value is wrong."""
    reason = rf"^{things} of type '\w+' are not supported$"
    with pytest.raises(Unsupported, match=reason) as caught:
        generation(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"container": "c"},
        {"mcp_servers": [{"url": "u"}]},
        {"thread": {"type": "continue"}},
        {"compaction": {"type": "x"}},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"stop": "x"},
        {"previous_response_id": "r"},
        {"bad_words": ["x"]},
    ],
)
def test_what_is_not_offered_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        parsed(**fields)
    assert [caught.value.param] == list(fields)


def test_where_the_form_of_a_former_beta_is_sent_now() -> None:
    with pytest.raises(Unsupported, match=r"send it as output_config\.format"):
        parsed(output_format={"type": "json_schema", "schema": {}})


def test_as_many_tools_as_a_conversation_may_have_messages() -> None:
    tools = [{**TOOL, "name": f"mcp__server__{number}"} for number in range(MAX_TOOLS)]
    assert len(generation(tools=tools).tools) == MAX_TOOLS > 128
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TOOLS}") as caught:
        generation(tools=[*tools, TOOL])
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("params", "offered"),
    [(MessageCreateParamsBase, MessagesBody), (MessageCountTokensParams, CountTokensBody)],
)
def test_every_parameter_of_the_client_is_known(params: Any, offered: Any) -> None:
    """None is taken for one that nobody documents; ``betas`` is a header."""
    known = {*offered.model_fields, *offered.unsupported, *offered.without_effect, "betas"}
    assert set(params.__annotations__) <= known
    assert set(BetaOutputConfigParam.__annotations__) <= set(OutputConfig.model_fields)
    assert set(BetaToolParam.__annotations__) <= {
        *MessagesTool.model_fields,
        *MessagesTool.without_effect,
    }


def test_tokens_are_counted_of_the_same_prompt() -> None:
    """Without what says how to answer, which may be there all the same."""
    fields: dict[str, Any] = {"model": "m", "messages": HI, "system": "s", "tools": [TOOL]}
    counted = CountTokensBody.parse(fields).to_chat().to_generation("r")
    answered = generation(system="s", tools=[TOOL])
    for name in ("messages", "tools", "template_options", "chat_end"):
        assert getattr(counted, name) == getattr(answered, name)


RESULTS = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": "r"} for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("said", "num_made"),
    [
        ([HI[0], {"role": "assistant", "content": "a"}], MAX_MESSAGES),
        (
            [
                {"role": "assistant", "content": [CALLING | {"id": f"t{n}"} for n in (1, 2, 3)]},
                {"role": "user", "content": RESULTS},
            ],
            2 * MAX_MESSAGES,
        ),
    ],
)
def test_messages_are_counted_as_they_were_sent(said: list[Any], num_made: int) -> None:
    """Beside the system's, a message with several results is several of a chat."""
    given = said * (MAX_MESSAGES // 2)
    body = CountTokensBody.parse({"model": "m", "system": "s", "messages": given})
    assert len(body.to_chat().to_generation("r").messages) == 1 + num_made
    with pytest.raises(InvalidRequest, match="an array of at most 2048 is expected"):
        CountTokensBody.parse({"model": "m", "messages": [*given, HI[0]]})
