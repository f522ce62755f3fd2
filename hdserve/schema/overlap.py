"""Whether the alternatives of a JSON Schema exclude each other.

Then exactly one of them matches wherever any does, and ``oneOf`` says the same as ``anyOf``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from hdserve.schema.parts import SCALARS, Schema
from hdserve.schema.references import referred
from hdserve.schema.values import kinds_of, required_by, texts_of, values_of

_Values = set[tuple[str, Any]]

_MAX_FORMS = 64
"""The most alternatives that :func:`are_disjoint` compares."""

_MAX_COMPARISONS = 500
"""The most comparisons of two schemas within a whole, some microseconds each: a request may have
hundreds of schemas."""

_MAX_DEPTH = 8
"""How deep within two schemas, counting references, a difference is looked for."""

_KINDS = ((bool, "boolean"), (int | float, "number"), (str, "string"))


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
        for name in required_by(schema) if kinds[index] == {"object"} else ():
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


class Comparison:
    """Compares the alternatives of one schema.

    Args:
        root: the whole, which references begin at.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_left = _MAX_COMPARISONS
        self._values: dict[int, _Values | None] = {}
        self._kinds: dict[int, set[str] | None] = {}
        self._required: dict[int, dict[str, None]] = {}
        """The values of schemas, their types and what objects need, by ``id``."""

    def exclude_each_other(self, schemas: Sequence[Any]) -> bool:
        """Return whether it is certain that no value matches two of the schemas."""
        listed = [*map(self._values_of, schemas)]
        known = [values for values in listed if values is not None]
        if len(known) == len(listed) and sum(map(len, known)) == len(set().union(*known)):
            return True
        return are_disjoint(schemas) or all(
            self._num_left > 0 and self._are_apart(one, other, 0)
            for one, other in combinations(schemas, 2)
        )

    def _are_apart(self, one: Any, other: Any, depth: int) -> bool:
        """Return whether no value matches two schemas, as far as can be told."""
        self._num_left -= 1
        if one is False or other is False:
            return True
        if self._num_left < 0 or depth > _MAX_DEPTH:
            return False
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        return (
            _differ(self._kinds_of(one), self._kinds_of(other))
            or _differ(self._values_of(one), self._values_of(other))
            or self._are_parts_apart(one, other, depth)
            or self._are_parts_apart(other, one, depth)
            or self._are_objects_apart(one, other, depth)
        )

    def _are_parts_apart(self, one: Schema, other: Schema, depth: int) -> bool:
        """Compare all that the same value must match with another schema."""
        for key in ("anyOf", "oneOf"):
            forms = one.get(key)
            if isinstance(forms, (list, tuple)) and all(
                self._are_apart(form, other, depth + 1) for form in forms
            ):
                return True
        parts = one.get("allOf")
        found = [*parts] if isinstance(parts, (list, tuple)) else []
        target = referred(one, self._root)
        found += [] if target is None else [target]
        return any(self._are_apart(part, other, depth + 1) for part in found)

    def _are_objects_apart(self, one: Schema, other: Schema, depth: int) -> bool:
        """Compare a property that either object needs, in both."""
        kinds = [found for found in map(self._kinds_of, (one, other)) if found is not None]
        if not kinds or set.intersection(*kinds) != {"object"}:
            return False
        return any(
            self._are_apart(_property(one, name), _property(other, name), depth + 1)
            for name in self._names_in(one, other)
        )

    def _kinds_of(self, schema: Schema) -> set[str] | None:
        """Return the types of a schema; ``None`` if it says nothing of them."""
        if id(schema) not in self._kinds:
            self._kinds[id(schema)] = self._find_kinds(schema)
        return self._kinds[id(schema)]

    def _find_kinds(self, schema: Schema) -> set[str] | None:
        if schema.get("type") is not None:
            return kinds_of(schema)
        values = self._values_of(schema)
        return None if values is None else {kind for kind, _ in values}

    def _names_in(self, one: Schema, other: Schema) -> Iterator[str]:
        """Yield the properties that either object needs, each once."""
        names = self._required_by(one)
        yield from names
        yield from (name for name in self._required_by(other) if name not in names)

    def _required_by(self, schema: Schema) -> dict[str, None]:
        if id(schema) not in self._required:
            self._required[id(schema)] = dict.fromkeys(required_by(schema))
        return self._required[id(schema)]

    def _values_of(self, schema: Any) -> _Values | None:
        if id(schema) not in self._values:
            self._values[id(schema)] = _values(schema)
        return self._values[id(schema)]


def _differ(one: set[Any] | None, other: set[Any] | None) -> bool:
    """Return whether two sets, if both are known, have nothing in common."""
    return one is not None and other is not None and one.isdisjoint(other)


def _values(schema: Any) -> _Values | None:
    """Return the only values of a schema, with their types; ``None`` if it has others, or lists and
    objects among them."""
    values = values_of(schema) if isinstance(schema, Mapping) else None
    if values is None or not all(isinstance(value, SCALARS) for value in values):
        return None
    return {(_kind(value), value) for value in values}


def _kind(value: Any) -> str:
    return next((kind for types, kind in _KINDS if isinstance(value, types)), "null")


def _property(schema: Schema, name: str) -> Any:
    """Return a schema that a property, if there is one, must match."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
