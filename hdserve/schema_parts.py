"""Where a JSON Schema contains other schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
