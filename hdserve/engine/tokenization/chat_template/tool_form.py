"""The form in which a chat template takes tools, found out by rendering one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdserve.engine.tokenization.chat_template.shown_parts import PROBE_TOOL

Tools = Sequence[Mapping[str, Any]]

_FUNCTION: Mapping[str, Any] = PROBE_TOOL["function"]
_BARE: Mapping[str, Any] = {
    **PROBE_TOOL,
    "function": {name: _FUNCTION[name] for name in ("name", "parameters")},
}


def lacks_description(tool: Mapping[str, Any]) -> bool:
    """Whether it is a function without a description, which clients may leave out."""
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("description") is None


def with_descriptions(tools: Tools) -> Tools:
    """Return tools of which those without a description have an empty one."""
    return [
        {**tool, "function": {**tool["function"], "description": ""}}
        if lacks_description(tool)
        else tool
        for tool in tools
    ]


def needs_descriptions(render: Callable[[Tools], str]) -> bool:
    """Whether a template refuses a tool without a description, and takes it with an empty one:
    gpt-oss' joins the description to other text.

    Args:
        render: the text a template makes of a conversation with tools.
    """
    return not _takes(render, [_BARE]) and _takes(render, with_descriptions([_BARE]))


def _takes(render: Callable[[Tools], str], tools: Tools) -> bool:
    try:
        render(tools)
    except Exception:  # it refuses them
        return False
    return True
