"""Keywords of a JSON Schema, by what a grammar can do with them."""

from __future__ import annotations

from typing import Any

from hdserve.schema.parts import Schema

OPTIONS = "x-guidance"
"""The keyword for llguidance's options, among them one to be more lenient than a schema."""

HELD_FORMATS = frozenset(("date", "date-time", "duration", "time")).union(
    ("email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""The text formats that are enforced.  Others are annotations for readers of a schema, as in JSON
Schema."""

_UNHELD_COMBINING = frozenset(("else", "if", "not", "then")).union(
    ("$dynamicRef", "$recursiveRef", "contains", "unevaluatedItems"),
    ("dependencies", "dependentRequired", "dependentSchemas"),
)

COMBINING = _UNHELD_COMBINING.union(("allOf", "extends", "patternProperties"))
"""Keywords that may hold a value to several schemas at once, or to the negation of one."""

UNHELD = _UNHELD_COMBINING.union(
    ("$dynamicAnchor", "$recursiveAnchor", "maxContains", "minContains"),
    ("propertyNames", "unevaluatedProperties", "uniqueItems"),
)
"""The keywords that no grammar holds, other than in other words."""

IN_PLACE = frozenset(("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "oneOf")).union(
    ("contains", "dependentSchemas", "if")
)
"""Keywords whose schemas evaluate parts of the same value."""

TWINS = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
"""By keyword, the one that says the same where nothing else evaluates parts of the value."""

NOTES = frozenset({"default", "deprecated", "description", "examples", "title", "type"})
"""Keywords that may be beside a list of names."""

BESIDE_ALTERNATIVES = NOTES.union(
    ("$comment", "$defs", "$id", "$schema", "definitions"),
    ("discriminator", "readOnly", "writeOnly"),
)
"""Keywords that may be beside alternatives and hold a value to nothing more."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum")
"""Keywords whose numbers a grammar may be unable to hold."""

EXAMINED = UNHELD.union(
    BOUNDS,
    ("$ref", "maxProperties", "minProperties"),
    ("multipleOf", "oneOf", "pattern", "patternProperties"),
)
"""The keywords that may be left out."""


def is_note(key: str, value: Any) -> bool:
    """Return whether a keyword asks for nothing that a grammar knows."""
    if key == "format":
        return isinstance(value, str) and value not in HELD_FORMATS
    return key == OPTIONS


def asks_nothing(schema: Schema, key: str) -> bool:
    """Return whether a keyword that grammars do not know allows everything here."""
    value = schema[key]
    if key == "uniqueItems":
        return value is False
    if key == "propertyNames":
        return value in (True, {}, {"type": "string"})
    if key in ("then", "else"):
        return "if" not in schema
    if key == "if":
        return schema.keys().isdisjoint(("then", "else"))
    if key in ("minContains", "maxContains"):
        return "contains" not in schema
    if key.startswith(("unevaluated", "dependen")):
        return value in (True, {})
    return key.endswith("Anchor")
