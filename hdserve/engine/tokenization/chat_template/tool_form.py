"""The form in which a chat template takes tools, found out by rendering one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdserve.engine.tokenization.chat_template.shown_parts import PROBE_TOOL

Tools = Sequence[Mapping[str, Any]]

_STAND_INS: Mapping[str, Any] = {
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
"""What fields of a function mean that clients may leave out."""


def lacks_fields(tool: Mapping[str, Any]) -> bool:
    """Whether it is a function without a description or parameters, which clients may leave out."""
    return bool(_missing(tool, _STAND_INS))


def with_fields(tools: Tools, fields: Mapping[str, Any]) -> Tools:
    """Return tools of which those without one of these fields of a function have it."""
    return [
        {**tool, "function": {**tool["function"], **missing}} if missing else tool
        for tool, missing in ((tool, _missing(tool, fields)) for tool in tools)
    ]


def needed_fields(render: Callable[[Tools], str]) -> Mapping[str, Any]:
    """Return the fields of a function without which a template refuses a tool, and takes it with
    empty ones: gpt-oss' joins the description to other text, Hermes 3's goes through the properties
    of the parameters.

    Args:
        render: the text a template makes of a conversation with tools.
    """
    return {name: value for name, value in _STAND_INS.items() if _needs(render, {name: value})}


def _needs(render: Callable[[Tools], str], fields: Mapping[str, Any]) -> bool:
    function = {name: value for name, value in PROBE_TOOL["function"].items() if name not in fields}
    bare = [{**PROBE_TOOL, "function": function}]
    return not _takes(render, bare) and _takes(render, with_fields(bare, fields))


def _missing(tool: Mapping[str, Any], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return {}
    return {name: value for name, value in fields.items() if function.get(name) is None}


def _takes(render: Callable[[Tools], str], tools: Tools) -> bool:
    try:
        render(tools)
    except Exception:  # it refuses them
        return False
    return True
