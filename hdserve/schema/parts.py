"""What a JSON Schema consists of, and the ways through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

Schema = Mapping[str, Any]
Item = TypeVar("Item")

SCALARS = (str, int, float, type(None))
"""The types of values that have no others in them."""

DEFINITIONS = ("$defs", "definitions")

NAMED_SCHEMAS = (*DEFINITIONS, "dependentSchemas", "patternProperties", "properties")
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


def walk(start: Item, below: Callable[[Item], Iterable[Item]]) -> Iterator[Item]:
    """Yield ``start`` and, however deep, all below it.

    Args:
        below: what is directly below an item, such as :func:`subschemas` of a schema; asked before
            the item is yielded.
    """
    waiting = [start]
    while waiting:
        item = waiting.pop()
        waiting += below(item)
        yield item


def subschemas(schema: Schema) -> Iterator[Schema]:
    """The schemas directly below ``schema``."""
    for key, value in schema.items():
        if key in NAMED_SCHEMAS and isinstance(value, Mapping):
            found: list[Any] = [*value.values()]
        elif key in SCHEMAS:
            found = [*value] if isinstance(value, (list, tuple)) else [value]
        else:
            continue
        yield from (item for item in found if isinstance(item, Mapping))


def members(value: Any) -> Iterable[Any]:
    """The values directly below any value of JSON, which need not be schemas."""
    if isinstance(value, SCALARS):  # nearly all: to ask for a mapping takes longer
        return ()
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def with_subschemas(schema: Schema, change: Callable[[Schema], Any]) -> dict[str, Any]:
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
