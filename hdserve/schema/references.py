"""References of a JSON Schema, which must not lead in a circle.

A schema may refer to itself for a part of a value, as for a tree.  One that refers to itself for
the same value says nothing, and no text could match it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

from hdserve.schema.parts import Schema, subschemas, walk

_MAX_CHARACTERS = 10_000
"""The longest reference: a hundred levels of long names.  Following millions of them takes
seconds."""


class _Place(NamedTuple):
    """A schema, and the schema that pointers in it are relative to."""

    schema: Schema
    base: Schema


def check_references(schema: Schema) -> None:
    """
    Raises:
        ValueError: a ``$ref`` within the schema leads to itself, or is too long.
        RecursionError: references follow each other too far.
    """
    is_checked: dict[int, bool] = {}
    for place in walk(_place(schema, schema), _below):
        _follow(place, is_checked)


def referred(schema: Schema, base: Schema) -> Schema | None:
    """Return the target of the ``$ref`` of a schema in ``base``, if it is a schema there."""
    place = _target(schema.get("$ref"), base)
    return place.schema if place is not None else None


def _below(place: _Place) -> Iterator[_Place]:
    return (_place(item, place.base) for item in subschemas(place.schema))


def _follow(place: _Place, is_checked: dict[int, bool]) -> None:
    """Follow all schemas that the same value must match as well; those still on the way are not
    marked as checked yet."""
    key = id(place.schema)
    if key in is_checked:
        if not is_checked[key]:
            raise ValueError("$ref: a reference leads to itself, with nothing between")
        return
    is_checked[key] = False
    for other in _same_value(place):
        _follow(other, is_checked)
    is_checked[key] = True


def _same_value(place: _Place) -> Iterator[_Place]:
    schema, base = place
    target = _target(schema.get("$ref"), base)
    if target is not None:
        yield target
    for key in ("allOf", "anyOf", "oneOf"):
        items = schema.get(key)
        if isinstance(items, (list, tuple)) and (key == "allOf" or len(items) == 1):
            yield from (_place(item, base) for item in items if isinstance(item, Mapping))


def _target(reference: Any, base: Schema) -> _Place | None:
    """The target of a reference within the same document, if it is a schema."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    if len(reference) > _MAX_CHARACTERS:
        raise ValueError(f"$ref: a reference has more than {_MAX_CHARACTERS} characters")
    place, value = _place(base, base), cast("Any", base)
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, (list, tuple)) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
        if isinstance(value, Mapping):
            place = _place(value, place.base)
    return place if place.schema is value else None


def _place(schema: Schema, base: Schema) -> _Place:
    """A schema with an id of its own is a new base."""
    name = schema.get("$id")
    return _Place(schema, schema if isinstance(name, str) and not name.startswith("#") else base)
