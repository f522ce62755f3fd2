"""Where a JSON Schema contains other schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

NAMED_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Keywords whose values map names to schemas."""

SCHEMAS = (
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "items",
    "oneOf",
    "prefixItems",
)
"""Keywords whose values are schemas, or lists of schemas."""


def subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas directly below ``schema``."""
    for key, value in schema.items():
        if key in NAMED_SCHEMAS and isinstance(value, Mapping):
            found: list[Any] = [*value.values()]
        elif key in SCHEMAS:
            found = [*value] if isinstance(value, (list, tuple)) else [value]
        else:
            continue
        yield from (item for item in found if isinstance(item, Mapping))


def with_subschemas(
    schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Any]
) -> dict[str, Any]:
    """Return ``schema`` with each schema directly below it changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [changed(item) for item in value]
        return change(value) if isinstance(value, Mapping) else value

    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: changed(item) for name, item in value.items()}
        else:
            found[key] = changed(value) if key in SCHEMAS else value
    return found
