"""The grammars of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deployments.parsers.tool_parser import Function
from hdserve import grammar
from hdserve.schema.parts import NAMED_SCHEMAS

_NO_SCHEMAS = frozenset({"const", "default", "enum", "examples"})
"""Keywords of a JSON schema whose values are instances, not schemas."""


def json_rules(functions: Sequence[Function], arguments_key: str) -> Iterator[str]:
    """Yield Lark rules, in which ``json`` is a call of one of ``functions``."""
    yield "json: " + " | ".join(f"json_{index}" for index in range(len(functions)))
    for index, function in enumerate(functions):
        schema = _call_schema(function, arguments_key)
        yield f"json_{index}: %json {json.dumps(grammar.with_json_options(schema))}"


def named_rules(functions: Sequence[Function], before: str, after: str) -> Iterator[str]:
    """Yield Lark rules, in which ``call`` is the name of one of ``functions`` and its arguments.

    Args:
        before: what comes directly before the name.
        after: the rules and literals between the two.
    """
    yield "call: " + " | ".join(
        f"{grammar.quoted(before + function.name)} {after} arguments_{index}"
        for index, function in enumerate(functions)
    )
    for index, function in enumerate(functions):
        schema = grammar.with_json_options(function.parameters)
        yield f"arguments_{index}: %json {json.dumps(schema)}"


def _call_schema(function: Function, arguments_key: str) -> dict[str, Any]:
    """Return the schema of a call.  References within the parameters are resolved from its root,
    unless the parameters have an ``$id``."""
    parameters = function.parameters
    if "$id" not in parameters:
        parameters = _rebased(parameters, f"#/properties/{arguments_key}")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments_key: parameters},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _rebased(schema: Any, root: str) -> Any:
    """Return ``schema`` with references to its own root changed to begin at ``root``."""
    if isinstance(schema, list):
        return [_rebased(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[key] = root + value.removeprefix("#")
        elif key in NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _rebased(item, root) for name, item in value.items()}
        else:
            found[key] = value if key in _NO_SCHEMAS else _rebased(value, root)
    return found
