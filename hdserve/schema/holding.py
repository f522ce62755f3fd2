"""What of a JSON Schema a grammar can hold.

A grammar remembers little: not which values or names have been, nor what comes later, nor what a
value must not be.  Keywords that ask for that are left out here, and named.  Each is a condition of
its own, so the rest allows all that the schema allows.  Some of them are written in other words
instead, which say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from hdserve.schema.closing import can_close, opened
from hdserve.schema.keywords import (
    BOUNDS,
    EXAMINED,
    IN_PLACE,
    NOTES,
    TWINS,
    UNHELD,
    asks_nothing,
    is_note,
)
from hdserve.schema.numbers import are_held
from hdserve.schema.overlap import Comparison
from hdserve.schema.parts import NAMED_SCHEMAS, SCHEMAS, Schema, members, walk
from hdserve.schema.patterns import is_readable, without_look_around
from hdserve.schema.references import referred
from hdserve.schema.values import values_of
from hdserve.schema.whole import Whole

MAX_UNHELD = 100
"""The most keywords that are named."""

_MAX_LISTED = 50_000
"""The most schemas that lists of names may come to, with the parts of each."""

_MAX_NAME_CHARACTERS = 64
_MAX_PATH_CHARACTERS = 200


class Held(NamedTuple):
    """What a grammar can hold.

    Attributes:
        schema: it allows all that the whole schema allows.
        unheld: the paths of the keywords that were left out, without the indices of lists; the
            first of them if there are very many.
    """

    schema: Schema
    unheld: tuple[str, ...]


def held(schema: Schema) -> Held:
    """Return what of ``schema`` a grammar can hold.

    Annotations that llguidance does not know are left out, too, and not named.  What no reference
    leads to is not named either.

    Raises:
        RecursionError: it is too deep.
    """
    holding = _Holding(Whole(schema))
    found = holding.part(schema, "")
    if holding.unheld and not holding.whole.is_closable:
        found = opened(found)
    return Held(found, tuple(sorted(holding.unheld)))


class _Holding:
    """The way through one schema.

    Attributes:
        unheld: the paths of what was left out so far.
    """

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        self.unheld: set[str] = set()
        self._comparison = Comparison(whole.root)
        self._num_listed_left = _MAX_LISTED
        self._names: dict[int, list[str] | None] = {}
        """The names that schemas list, by ``id``: thousands of places may refer to one."""

    def part(self, schema: Any, path: str) -> Any:
        """Return what can be held of a schema, or of a list of schemas, at a path; name what was
        left out, if values are held to the schema."""
        if isinstance(schema, (list, tuple)):
            return [self.part(item, path) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        found = {
            key: self._below(key, value, path)
            for key, value in schema.items()
            if key not in UNHELD and not is_note(key, value)
        }
        if EXAMINED.isdisjoint(schema):
            return found
        is_whole = True
        for key in self._left_out(schema, found, path):
            is_whole, used = False, self.whole.used
            if len(self.unheld) < MAX_UNHELD and (used is None or id(schema) in used):
                self.unheld.add(_joined(path, key))
        if not is_whole and "properties" in found and not can_close(schema):
            found.setdefault("additionalProperties", True)  # it may need others
        return found

    def _below(self, key: str, value: Any, path: str) -> Any:
        if key in NAMED_SCHEMAS and isinstance(value, Mapping):
            inside = _joined(path, key)
            return {name: self.part(item, _joined(inside, name)) for name, item in value.items()}
        return self.part(value, _joined(path, key)) if key in SCHEMAS else value

    def _left_out(self, schema: Schema, found: dict[str, Any], path: str) -> Iterator[str]:
        """Write in other words, in ``found``, what can be; leave out the rest of what cannot be
        held, and yield its keywords."""
        return chain(
            self._unknown(schema, found, path),
            self._alternatives(schema, found),
            _patterns(found),
            self._numbers(found),
            self._references(found),
        )

    def _unknown(self, schema: Schema, found: dict[str, Any], path: str) -> Iterator[str]:
        for key in sorted(UNHELD & schema.keys(), reverse=True):
            if asks_nothing(schema, key):
                continue
            if key == "propertyNames" and self._list_names(schema[key], found):
                continue
            if key in TWINS and IN_PLACE.isdisjoint(schema):
                twin = TWINS[key]
                if not isinstance(found.get(twin), list):
                    found.setdefault(twin, self.part(schema[key], _joined(path, key)))
                    continue
            yield key

    def _list_names(self, names: Any, found: dict[str, Any]) -> bool:
        """Write names of which there are only some as the properties that they are; return whether
        that was possible."""
        properties, listed = found.get("properties", {}), self._listed(names)
        if listed is None or not isinstance(properties, Mapping) or "patternProperties" in found:
            return False
        other = found.get("additionalProperties", True)
        most = self._num_listed_left // max(len(listed), 1)
        num_schemas = sum(1 for _ in islice(walk(other, members), most + 1))
        if num_schemas > most:  # what is large counts, too, so that not each level counts it again
            self._num_listed_left = max(self._num_listed_left - num_schemas, 0)
            return False
        self._num_listed_left -= max(len(listed), 1) * num_schemas
        found["properties"] = {name: properties.get(name, other) for name in listed}
        found["additionalProperties"] = False
        return True

    def _listed(self, names: Any) -> list[str] | None:
        """Return the only names that a schema, or what it refers to, allows, if they are listed."""
        if isinstance(names, Mapping) and "$ref" in names and names.keys() - {"$ref"} <= NOTES:
            names = referred(names, self.whole.root)
        if id(names) not in self._names:
            self._names[id(names)] = _listed(names)
        return self._names[id(names)]

    def _alternatives(self, schema: Schema, found: dict[str, Any]) -> Iterator[str]:
        """Make ``anyOf`` of ``oneOf``, unless the alternatives must stay."""
        forms = schema.get("oneOf")
        if not isinstance(forms, (list, tuple)) or self.whole.keeps_alternatives(schema):
            return
        if not self._comparison.exclude_each_other(forms):
            yield "oneOf"
        any_of = {"anyOf": found.pop("oneOf")}
        if "anyOf" not in found:
            found |= any_of
        elif isinstance(found.get("allOf", []), list):
            found["allOf"] = [*found.get("allOf", []), any_of]

    def _numbers(self, found: dict[str, Any]) -> Iterator[str]:
        unheld = [key for key in BOUNDS if key in found and not are_held(key, found[key])]
        if "multipleOf" in found and self.whole.has_too_many_multiples:
            unheld.append("multipleOf")
        for key in (*unheld, *self._counts(found)):
            del found[key]
            yield key

    def _counts(self, found: Schema) -> Iterator[str]:
        """Yield the keywords that count the properties of an object of which some are listed, but
        not required: a grammar counts only to the first of these."""
        properties, required = found.get("properties"), found.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, (list, tuple)):
            return
        names = {name for name in required if isinstance(name, str)}
        if properties.keys() <= names:
            return
        is_closed = found.get("additionalProperties") is False or (
            self.whole.is_closable and can_close(found)
        )
        fewest = len(names) + is_closed
        least, most = found.get("minProperties"), found.get("maxProperties")
        if isinstance(least, (int, float)) and least > fewest:
            yield "minProperties"
        if isinstance(most, (int, float)) and not (is_closed and most == fewest):
            yield "maxProperties"

    def _references(self, found: dict[str, Any]) -> Iterator[str]:
        """Leave out what refers to another document, which nothing here fetches."""
        reference = found.get("$ref")
        is_elsewhere = isinstance(reference, str) and not reference.startswith("#")
        if is_elsewhere and self.whole.used is not None:
            del found["$ref"]
            yield "$ref"


def _listed(names: Any) -> list[str] | None:
    """Return the only names that a schema allows, if it does no more than to list them."""
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return None
    values = values_of(names) if names.keys() - NOTES in ({"const"}, {"enum"}) else None
    if values is None:
        return None
    return [*dict.fromkeys(name for name in values if isinstance(name, str))]


def _patterns(found: dict[str, Any]) -> Iterator[str]:
    pattern = found.get("pattern")
    if isinstance(pattern, str) and not is_readable(pattern):
        same = without_look_around(found)
        del found["pattern"]
        found |= same or {}
        if same is None:
            yield "pattern"
    patterns = found.get("patternProperties")
    if not isinstance(patterns, Mapping) or all(map(is_readable, patterns)):
        return
    readable = {name: item for name, item in patterns.items() if is_readable(name)}
    found["patternProperties"] = readable
    yield "patternProperties"
    if found.pop("additionalProperties", True) not in (True, {}):
        yield "additionalProperties"


def _joined(path: str, name: str) -> str:
    """Return the path of what is below another, of bounded length."""
    name = name if len(name) <= _MAX_NAME_CHARACTERS else name[: _MAX_NAME_CHARACTERS - 3] + "..."
    if not path:
        return name
    if len(path) + len(name) < _MAX_PATH_CHARACTERS:
        return f"{path}.{name}"
    return f"{path[: _MAX_PATH_CHARACTERS // 2].removesuffix('...')}...{name}"
