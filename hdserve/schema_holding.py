"""What of a JSON Schema a grammar can hold.

A grammar remembers little: not which values or names have been, nor what comes later, nor what a
value must not be.  Keywords that ask for that are left out here, and named.  Each is a condition of
its own, so the rest allows all that the schema allows.  Some of them are written in other words
instead, which say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from hdserve.schema_closing import can_close, is_closable, opened
from hdserve.schema_discriminators import has_id, telling
from hdserve.schema_keywords import (
    BOUNDS,
    EXAMINED,
    IN_PLACE,
    NOTES,
    TWINS,
    UNHELD,
    asks_nothing,
    is_note,
)
from hdserve.schema_numbers import are_held, has_too_many_multiples
from hdserve.schema_overlap import Comparison
from hdserve.schema_parts import NAMED_SCHEMAS, SCHEMAS, subschemas
from hdserve.schema_patterns import is_readable, without_look_around
from hdserve.schema_references import referred

Schema = Mapping[str, Any]

MAX_UNHELD = 100
"""The most keywords that are named."""

_MAX_LISTED = 50_000
"""The most schemas that lists of names may come to, with the parts of each."""

_MAX_NAME_CHARACTERS = 64
_MAX_PATH_CHARACTERS = 200

_DEFINITIONS = ("$defs", "definitions")


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
    holding = _Holding(schema)
    found = holding.part(schema, "")
    if holding.unheld and not holding.is_closable:
        found = opened(found)
    return Held(found, tuple(sorted(holding.unheld)))


class _Holding:
    """The way through one schema.

    Attributes:
        unheld: the paths of what was left out so far.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._comparison = Comparison(root)
        self._num_listed_left = _MAX_LISTED
        self.unheld: set[str] = set()

    @cached_property
    def is_closable(self) -> bool:
        """Whether objects are closed later."""
        return is_closable(self._root)

    @cached_property
    def _used(self) -> set[int] | None:
        return _used(self._root)

    @cached_property
    def _is_told_apart(self) -> Callable[[Schema], bool]:
        return telling(self._root)

    @cached_property
    def _leads_into_alternatives(self) -> bool:
        """Whether a reference leads to a part of a ``oneOf``, which must then keep its place."""
        return any("/oneOf/" in reference for reference in _references(self._root))

    @cached_property
    def _has_too_many_multiples(self) -> bool:
        return has_too_many_multiples(self._root)

    def part(self, schema: Any, path: str) -> Any:
        """Return what can be held of a schema, or of a list of schemas, at a path."""
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
        place = _Place(self, schema, path)
        self._replace_unknown(place, found)
        self._replace_alternatives(place, found)
        self._check_text(place, found)
        self._check_numbers(place, found)
        self._check_references(place, found)
        if not place.is_whole and "properties" in found and not can_close(schema):
            found.setdefault("additionalProperties", True)  # it may need others
        return found

    def leave_out(self, schema: Schema, path: str) -> None:
        """Name what was left out of a schema that is used."""
        is_used = self._used is None or id(schema) in self._used
        if is_used and len(self.unheld) < MAX_UNHELD:
            self.unheld.add(path)

    def _below(self, key: str, value: Any, path: str) -> Any:
        if key in NAMED_SCHEMAS and isinstance(value, Mapping):
            inside = _joined(path, key)
            return {name: self.part(item, _joined(inside, name)) for name, item in value.items()}
        return self.part(value, _joined(path, key)) if key in SCHEMAS else value

    def _replace_unknown(self, place: _Place, found: dict[str, Any]) -> None:
        """Write keywords that grammars do not know in other words, or leave them out."""
        for key in sorted(UNHELD & place.schema.keys(), reverse=True):
            if asks_nothing(place.schema, key):
                continue
            if key == "propertyNames" and self._list_names(place.schema[key], found):
                continue
            if key in TWINS and IN_PLACE.isdisjoint(place.schema):
                twin = TWINS[key]
                if not isinstance(found.get(twin), list):
                    found.setdefault(twin, self.part(place.schema[key], _joined(place.path, key)))
                    continue
            place.leave_out(key)

    def _list_names(self, names: Any, found: dict[str, Any]) -> bool:
        """Write names of which there are only some as the properties that they are; return whether
        that was possible."""
        properties = found.get("properties", {})
        listed = self._listed(names)
        is_possible = isinstance(properties, Mapping) and "patternProperties" not in found
        if listed is None or not is_possible:
            return False
        other = found.get("additionalProperties", True)
        num_schemas = len(listed) * _num_parts(other)
        if num_schemas > self._num_listed_left:
            return False
        self._num_listed_left -= num_schemas
        found["properties"] = {name: properties.get(name, other) for name in listed}
        found["additionalProperties"] = False
        return True

    def _listed(self, names: Any) -> list[str] | None:
        """Return the only names that a schema allows, if it does no more than to list them."""
        if isinstance(names, Mapping) and "$ref" in names and names.keys() - {"$ref"} <= NOTES:
            names = referred(names, self._root)
        if not isinstance(names, Mapping):
            return None
        keys = names.keys() - NOTES
        values = [names["const"]] if keys == {"const"} else names.get("enum")
        is_list = keys in ({"const"}, {"enum"}) and isinstance(values, (list, tuple))
        if not is_list or names.get("type", "string") != "string":
            return None
        assert isinstance(values, (list, tuple))
        if len(values) > self._num_listed_left:
            return None
        return [*dict.fromkeys(name for name in values if isinstance(name, str))]

    def _replace_alternatives(self, place: _Place, found: dict[str, Any]) -> None:
        """Make ``anyOf`` of ``oneOf``, unless the alternatives are told apart later."""
        forms = place.schema.get("oneOf")
        if not isinstance(forms, (list, tuple)) or self._is_told_apart(place.schema):
            return
        if self._leads_into_alternatives:
            return
        if not self._comparison.exclude_each_other(forms):
            place.leave_out("oneOf")
        any_of = {"anyOf": found.pop("oneOf")}
        if "anyOf" not in found:
            found |= any_of
        elif isinstance(found.get("allOf", []), list):
            found["allOf"] = [*found.get("allOf", []), any_of]

    def _check_text(self, place: _Place, found: dict[str, Any]) -> None:
        pattern = found.get("pattern")
        if isinstance(pattern, str) and not is_readable(pattern):
            same = without_look_around(found)
            if same is None:
                place.leave_out("pattern")
            del found["pattern"]
            found |= same or {}
        patterns = found.get("patternProperties")
        if not isinstance(patterns, Mapping) or all(map(is_readable, patterns)):
            return
        readable = {name: item for name, item in patterns.items() if is_readable(name)}
        found["patternProperties"] = readable
        place.leave_out("patternProperties")
        if found.pop("additionalProperties", True) not in (True, {}):
            place.leave_out("additionalProperties")

    def _check_numbers(self, place: _Place, found: dict[str, Any]) -> None:
        unheld = [key for key in BOUNDS if key in found and not are_held(key, found[key])]
        if "multipleOf" in found and self._has_too_many_multiples:
            unheld.append("multipleOf")
        unheld += self._unheld_counts(found)
        for key in unheld:
            del found[key]
            place.leave_out(key)

    def _unheld_counts(self, found: Schema) -> Iterator[str]:
        """Yield the keywords that count the properties of an object of which some are listed, but
        not required: a grammar counts only to the first of these."""
        properties, required = found.get("properties"), found.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, (list, tuple)):
            return
        names = {name for name in required if isinstance(name, str)}
        if properties.keys() <= names:
            return
        is_closed = found.get("additionalProperties") is False or (
            self.is_closable and can_close(found)
        )
        fewest = len(names) + is_closed
        least, most = found.get("minProperties"), found.get("maxProperties")
        if isinstance(least, (int, float)) and least > fewest:
            yield "minProperties"
        if isinstance(most, (int, float)) and not (is_closed and most == fewest):
            yield "maxProperties"

    def _check_references(self, place: _Place, found: dict[str, Any]) -> None:
        """Leave out what refers to another document, which nothing here fetches."""
        reference = found.get("$ref")
        is_elsewhere = isinstance(reference, str) and not reference.startswith("#")
        if is_elsewhere and self._used is not None:
            del found["$ref"]
            place.leave_out("$ref")


class _Place:
    """A schema within the whole, and whether something of it was left out."""

    def __init__(self, holding: _Holding, schema: Schema, path: str) -> None:
        self.schema = schema
        self.path = path
        self.is_whole = True
        self._holding = holding

    def leave_out(self, key: str) -> None:
        """Name a keyword that was left out here."""
        self.is_whole = False
        self._holding.leave_out(self.schema, _joined(self.path, key))


def _joined(path: str, name: str) -> str:
    """Return the path of what is below another, of bounded length."""
    name = name if len(name) <= _MAX_NAME_CHARACTERS else name[: _MAX_NAME_CHARACTERS - 3] + "..."
    if not path:
        return name
    if len(path) + len(name) < _MAX_PATH_CHARACTERS:
        return f"{path}.{name}"
    return f"{path[: _MAX_PATH_CHARACTERS // 2].removesuffix('...')}...{name}"


def _used(root: Schema) -> set[int] | None:
    """Return the ids of the schemas in ``root`` that values are held to; ``None`` if it may be any
    of them, as some have names of their own."""
    if has_id(root):
        return None
    found: set[int] = set()
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if id(schema) in found:
            continue
        found.add(id(schema))
        reference = schema.get("$ref")
        target = referred(schema, root)
        if target is None and isinstance(reference, str) and reference.startswith("#"):
            return None
        waiting += [] if target is None else [target]
        others = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        waiting += subschemas(others)
        twins = (others.get(key) for key in TWINS)
        waiting += [twin for twin in twins if isinstance(twin, Mapping)]
    return found


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value and all that is in it."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, (list, tuple)):
            waiting += part


def _num_parts(value: Any) -> int:
    return sum(1 for _ in _parts(value))


def _references(root: Schema) -> Iterator[str]:
    """Yield what may be the references in a schema."""
    for part in _parts(root):
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(reference, str):
            yield reference
