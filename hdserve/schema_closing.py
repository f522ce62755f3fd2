"""Closing objects of a JSON Schema that list their properties to other ones.

A schema that says nothing about further properties allows any number of them, in which a small
model loses itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from hdserve.schema_parts import subschemas, with_subschemas

Schema = Mapping[str, Any]

_COMBINING = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "allOf",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "extends",
        "if",
        "not",
        "patternProperties",
        "then",
        "unevaluatedItems",
    }
)
"""Keywords that may hold a value to several schemas at once, or to the negation of one."""

_ALTERNATIVES = ("$ref", "anyOf", "oneOf")
_BESIDE_ALTERNATIVES = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "examples",
        "readOnly",
        "title",
        "type",
        "writeOnly",
    }
)
_OPENING = frozenset({"additionalProperties", "const", "enum", "unevaluatedProperties"})
"""Keywords that already say which properties there may be."""

_MAX_FORMS = 64
"""The most alternatives that are told apart."""

_SCALARS = frozenset({"boolean", "null", "number", "string"})
_WITHIN = re.compile(r"#(/items|/(\$defs|definitions|properties)/[^/]+)*")
"""References to parts of the schema by their position."""


def closed(schema: Schema) -> Schema:
    """Return ``schema`` with ``additionalProperties: false`` in objects that list properties and
    say nothing about others.

    The result allows only what ``schema`` allows, and it allows something if ``schema`` does.  A
    schema that holds a value to several schemas at once is unchanged: one may need what another
    lists.

    Raises:
        RecursionError: it is too deep.
    """
    return _closed(schema) if is_closable(schema) else schema


def is_closable(schema: Schema) -> bool:
    """Return whether :func:`closed` closes objects of ``schema``, as no value is held to several
    schemas at once."""
    waiting = [schema]
    while waiting:
        item = waiting.pop()
        if not _is_plain(item):
            return False
        waiting += subschemas(item)
    return True


def opened(schema: Schema) -> Schema:
    """Return a schema whose objects :func:`closed` leaves as they are."""
    found = with_subschemas(schema, opened)
    return {"additionalProperties": True, **found} if "properties" in found else found


def _is_plain(schema: Schema) -> bool:
    """Whether ``schema`` holds a value to only one of its schemas at a time."""
    if not _COMBINING.isdisjoint(schema):
        return False
    alternatives = [key for key in _ALTERNATIVES if key in schema]
    if alternatives and not schema.keys() - {alternatives[0]} <= _BESIDE_ALTERNATIVES:
        return False
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not _WITHIN.fullmatch(reference):
        return False
    return "oneOf" not in schema or are_disjoint(schema["oneOf"])


def are_disjoint(schemas: Any) -> bool:
    """Return whether no value matches two of the schemas, even once they are closed.

    Any two must differ in type, or be objects that differ in the text of a required property.  They
    are not compared pair by pair, which would take too long; conflicts are recorded as bits.
    """
    if not isinstance(schemas, (list, tuple)) or len(schemas) > _MAX_FORMS:
        return False
    told_apart = [1 << index for index in range(len(schemas))]
    for texts in _distinctions(schemas):
        for index, others in _without_common_texts(texts):
            told_apart[index] |= others
    return all(others + 1 == 1 << len(schemas) for others in told_apart)


def _distinctions(schemas: list[Any] | tuple[Any, ...]) -> Iterator[dict[int, set[str]]]:
    """For each schema, by position, its types, and then the possible texts of each required
    property."""
    kinds, by_name = dict[int, set[str]](), defaultdict[str, dict[int, set[str]]](dict)
    for index, schema in enumerate(schemas):
        if not isinstance(schema, Mapping):
            continue
        kinds[index] = kinds_of(schema)
        for name in _required(schema) if kinds[index] == {"object"} else ():
            by_name[name][index] = texts_of(schema, name)
    yield kinds
    yield from by_name.values()


def _without_common_texts(texts: dict[int, set[str]]) -> Iterator[tuple[int, int]]:
    """For each position the others, as bits, that have texts, but none in common with it."""
    having, having_any = defaultdict[str, int](int), 0
    for index, items in texts.items():
        having_any |= bool(items) << index
        for item in items:
            having[item] |= 1 << index
    for index, items in texts.items():
        common = 0 if items else having_any
        for item in items:
            common |= having[item]
        yield index, having_any & ~common


def kinds_of(schema: Schema) -> set[str]:
    """Return the types of a schema; empty if it allows any."""
    kinds = set(texts_in(schema.get("type")))
    return kinds - {"integer"} | {"number"} if "integer" in kinds else kinds


def texts_of(schema: Schema, name: str) -> set[str]:
    """Return the texts that a property can be, if it can be nothing else; otherwise none."""
    properties = schema.get("properties")
    item = properties.get(name) if isinstance(properties, Mapping) else None
    if not isinstance(item, Mapping):
        return set()
    values = [item["const"]] if "const" in item else item.get("enum")
    texts = set(texts_in(values))
    return texts if isinstance(values, (list, tuple)) and len(texts) == len(values) else set()


def _required(schema: Schema) -> set[str]:
    return set(texts_in(schema.get("required")))


def texts_in(value: Any) -> list[str]:
    """Return the texts in a list of a schema, or a single text used in place of a list."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, str)]


def _closed(schema: Schema) -> Schema:
    found = with_subschemas(schema, _closed)
    return {**found, "additionalProperties": False} if can_close(schema) else found


def can_close(schema: Schema) -> bool:
    """Return whether an object can consist of the listed properties only."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not _OPENING.isdisjoint(schema):
        return False
    required, fewest = _required(schema), schema.get("minProperties", 0)
    scalars = {name for name, item in properties.items() if _is_scalar(item)}
    has_enough = isinstance(fewest, (int, float)) and fewest <= len(required | scalars)
    return required <= properties.keys() and has_enough


def _is_scalar(schema: Any) -> bool:
    kinds = kinds_of(schema) if isinstance(schema, Mapping) else set()
    return bool(kinds) and kinds <= _SCALARS
