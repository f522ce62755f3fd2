"""Closing objects of a JSON Schema that list their properties to other ones.

A schema that says nothing about further properties allows any number of them, in which a small
model loses itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hdserve.schema.keywords import BESIDE_ALTERNATIVES, COMBINING
from hdserve.schema.overlap import are_disjoint
from hdserve.schema.parts import Schema, subschemas, walk, with_subschemas
from hdserve.schema.values import kinds_of, required_by

_ALTERNATIVES = ("$ref", "anyOf", "oneOf")
_OPENING = frozenset({"additionalProperties", "const", "enum", "unevaluatedProperties"})
"""Keywords that already say which properties there may be."""

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
    return all(map(_is_plain, walk(schema, subschemas)))


def opened(schema: Schema) -> Schema:
    """Return a schema whose objects :func:`closed` leaves as they are."""
    found = with_subschemas(schema, opened)
    return {"additionalProperties": True, **found} if "properties" in found else found


def _is_plain(schema: Schema) -> bool:
    """Whether ``schema`` holds a value to only one of its schemas at a time."""
    if not COMBINING.isdisjoint(schema):
        return False
    alternatives = [key for key in _ALTERNATIVES if key in schema]
    if alternatives and not schema.keys() - {alternatives[0]} <= BESIDE_ALTERNATIVES:
        return False
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not _WITHIN.fullmatch(reference):
        return False
    return "oneOf" not in schema or are_disjoint(schema["oneOf"])


def _closed(schema: Schema) -> Schema:
    found = with_subschemas(schema, _closed)
    return {**found, "additionalProperties": False} if can_close(schema) else found


def can_close(schema: Schema) -> bool:
    """Return whether an object can consist of the listed properties only."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not _OPENING.isdisjoint(schema):
        return False
    required, fewest = set(required_by(schema)), schema.get("minProperties", 0)
    scalars = {name for name, item in properties.items() if _is_scalar(item)}
    has_enough = isinstance(fewest, (int, float)) and fewest <= len(required | scalars)
    return required <= properties.keys() and has_enough


def _is_scalar(schema: Any) -> bool:
    kinds = kinds_of(schema) if isinstance(schema, Mapping) else set()
    return bool(kinds) and kinds <= _SCALARS
