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
    schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return ``schema`` with each of the schemas directly below it changed."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {
                name: change(item) if isinstance(item, Mapping) else item
                for name, item in value.items()
            }
        elif key in SCHEMAS and isinstance(value, (list, tuple)):
            found[key] = [change(item) if isinstance(item, Mapping) else item for item in value]
        elif key in SCHEMAS and isinstance(value, Mapping):
            found[key] = change(value)
        else:
            found[key] = value
    return found
