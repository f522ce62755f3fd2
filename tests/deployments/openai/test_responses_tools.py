"""Tools of the Responses API are the functions of a chat, or are left out by name."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from openai.types.responses import Tool

from deployments.http.param_names import params_named
from deployments.openai.responses_protocol import PARAM_NAMES, ResponsesBody
from deployments.openai.responses_tools import LEFT_OUT_TOOLS
from deployments.parsers.tool_parsers import HermesToolParser
from hdserve.errors import InvalidRequest, RequestError, Unsupported

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "name": "f", "description": "does it", "parameters": PARAMETERS}
OTHER = {"type": "function", "name": "g", "strict": False, "parameters": PARAMETERS}
GROUP = {"type": "namespace", "name": "ns", "description": "All.", "tools": [FUNCTION, OTHER]}
SEARCH = {"type": "web_search", "external_web_access": False}


def allowed(mode: str, *names: str, kind: str = "function") -> dict[str, Any]:
    """A choice of some of the tools."""
    tools = [{"type": kind, "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def parsed(*tools: Any, **fields: Any) -> ResponsesBody:
    return ResponsesBody.parse({"model": "m", "input": "hi", "tools": [*tools], **fields})


def told(*tools: Any, **fields: Any) -> list[tuple[str, str | None]]:
    """The names and descriptions of the functions that the model is told of."""
    with params_named(PARAM_NAMES):
        found = parsed(*tools, **fields).to_chat().to_generation("r", HermesToolParser).tools
    functions = [tool["function"] for tool in found]
    return [(function["name"], function.get("description")) for function in functions]


def test_every_documented_tool_is_known() -> None:
    """By all types that the client's library has for it."""
    (union, *_) = get_args(Tool)
    kinds = {kind for tool in get_args(union) for kind in get_args(tool.__annotations__["type"])}
    assert kinds == LEFT_OUT_TOOLS | {"function", "namespace"}


def test_functions_of_a_namespace_have_its_name_before_theirs() -> None:
    """So that they can be told from others, and what is said of it stands before the first."""
    assert told(GROUP, FUNCTION) == [
        ("ns__f", "All.\n\ndoes it"),
        ("ns__g", None),
        ("f", "does it"),
    ]
    assert told(GROUP | {"description": ""}) == [("ns__f", "does it"), ("ns__g", None)]
    assert parsed(GROUP).ignored == ()


@pytest.mark.parametrize(
    "tools",
    [
        (GROUP, FUNCTION | {"name": "ns__f"}),
        (GROUP, GROUP),
        (GROUP | {"name": "n" * 127},),
    ],
)
def test_names_that_models_could_not_tell_apart_are_refused(tools: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"two functions|characters together") as caught:
        told(*tools)
    assert caught.value.param == "tools"
    assert len(caught.value.message) <= 300


@pytest.mark.parametrize("kind", sorted(LEFT_OUT_TOOLS))
def test_tools_that_are_no_functions_are_left_out_by_name(kind: str) -> None:
    """Agents offer them to every server; a namespace may have some, too."""
    tool = {"type": kind, "name": "x", "filters": {"a": 1}}
    assert told(tool, FUNCTION) == [("f", "does it")]
    assert told(tool) == []
    for body in (parsed(tool, FUNCTION), parsed(GROUP | {"tools": [tool, FUNCTION]})):
        assert body.ignored == (f"tools.{kind}",)
        (error,) = body.left_out.values()
        assert error.message == f"tools of type {kind!r} are not supported"
        assert (error.param, error.code) == ("tools", "unsupported_parameter")


WRONG: list[tuple[dict[str, Any], str, type[RequestError], str]] = [
    (
        {"tools": [SEARCH], "tool_choice": "required"},
        "tools",
        Unsupported,
        r"^tools of type 'web_search' are not supported$",
    ),
    (
        {"tools": [SEARCH, FUNCTION], "tool_choice": {"type": "web_search"}},
        "tool_choice",
        Unsupported,
        r"^choices of tools of type 'web_search' are not supported$",
    ),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        "tool_choice",
        InvalidRequest,
        r"^tool_choice\.tools: is missing$",
    ),
    (
        {"tools": [SEARCH, FUNCTION], "tool_choice": allowed("auto", "f", kind="web_search")},
        "tool_choice",
        Unsupported,
        r"^choices of tools of type 'web_search' are not supported$",
    ),
    (
        {"tools": [GROUP, GROUP | {"name": "m"}], "tool_choice": allowed("required", "f")},
        "tool_choice",
        InvalidRequest,
        r"^there is no tool 'f'$",
    ),
    (
        {"tools": [{"type": "functoin", "name": "f"}]},
        "tools",
        Unsupported,
        r"^tools of type 'functoin' are not supported$",
    ),
    (
        {"tools": [GROUP | {"tools": [GROUP]}]},
        "tools",
        Unsupported,
        r"^tools of type 'namespace' are not supported$",
    ),
    ({"tools": [{"name": "f"}]}, "tools", InvalidRequest, r"^tools\.0\.type: is missing$"),
    ({"tools": [GROUP | {"name": ""}]}, "tools", InvalidRequest, r"^tools\.0\.name: "),
    (
        {"tools": [GROUP | {"tools": [FUNCTION | {"name": "a b"}]}]},
        "tools",
        InvalidRequest,
        r"^tools\.0\.tools\.0\.name: ",
    ),
]


@pytest.mark.parametrize(("fields", "param", "kind", "message"), WRONG)
def test_what_is_refused(
    fields: dict[str, Any], param: str, kind: type[RequestError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        told(**fields)
    assert caught.value.param == param


def test_a_function_is_chosen_by_the_name_the_client_has_for_it() -> None:
    """A function of a namespace, too, where its name says which one is meant."""

    def chosen(name: str, *tools: Any) -> Any:
        body = parsed(*tools, tool_choice={"type": "function", "name": name})
        return body.tools_for_chat()["tool_choice"]["function"]["name"]

    assert chosen("f", GROUP) == chosen("ns__f", GROUP) == "ns__f"
    assert chosen("f", GROUP, FUNCTION) == "f"
    assert chosen("g", GROUP, GROUP | {"name": "other"}) == "g"


def test_some_of_the_functions_may_be_chosen() -> None:
    """By the names the client has for them; the model is shown what it may call."""
    assert told(GROUP, FUNCTION, tool_choice=allowed("auto", "g")) == [("ns__g", None)]
    assert told(GROUP, FUNCTION, tool_choice=allowed("auto", "f", "ns__f")) == [
        ("ns__f", "All.\n\ndoes it"),
        ("f", "does it"),
    ]
    required = parsed(GROUP, FUNCTION, tool_choice=allowed("required", "g", "f"))
    assert len(told(GROUP, FUNCTION, tool_choice=allowed("required", "g", "f"))) == 3
    assert required.tools_for_chat()["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": name}} for name in ("ns__g", "f")],
        },
    }


@pytest.mark.parametrize(
    ("mode", "name", "ignored"),
    [
        ("auto", "f", ("tools.strict",)),
        ("auto", "g", ()),
        ("auto", "ns__f", ()),
        ("required", "f", ()),
    ],
)
def test_a_strict_function_is_named_where_it_may_be_called(
    mode: str, name: str, ignored: tuple[str, ...]
) -> None:
    """And nothing holds its calls."""
    strict = FUNCTION | {"strict": True}
    assert parsed(GROUP, strict, tool_choice=allowed(mode, name)).ignored == ignored


def test_calls_of_a_conversation_are_called_as_the_model_was_told() -> None:
    """Else it would learn from them names that nothing has."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    user = {"role": "user", "content": "hi"}
    items = [user, call | {"namespace": "ns"}, call | {"call_id": "2"}]
    body = parsed(GROUP, FUNCTION, input=items)
    assert body.ignored == ()
    (_, said) = body.to_chat().to_generation("r", HermesToolParser).messages
    assert [found["function"]["name"] for found in said["tool_calls"]] == ["ns__f", "f"]


def test_strict_functions_of_a_namespace_are_named() -> None:
    """As those beside it are."""
    body = parsed(GROUP | {"tools": [FUNCTION | {"strict": True}]})
    assert body.ignored == ("tools.strict",)
