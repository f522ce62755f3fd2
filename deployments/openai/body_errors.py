"""What is wrong with the body of a request, in the words of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]
"""Names of fields and indices of arrays, from the outermost in."""

_KINDS: Mapping[str, str] = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "an integer",
    "mapping": "an object",
    "model": "an object",
    "string": "a string",
    "tuple": "an array",
}
"""The expected value, by the beginning of the name that pydantic has for the error."""

_KIND_ERRORS = ("_type", "_parsing", "_from_float", "_parsing_size")

_EXPECTED: Mapping[str, str] = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_long": "a string of at most {max_length} characters",
    "string_too_short": "a string of at least {min_length} characters",
    "too_long": "an array of at most {max_length}",
    "too_short": "an array of at least {min_length}",
    "union_tag_invalid": "a type of {types}",
    "union_tag_not_found": "an object",
}
_REASONS: Mapping[str, str] = {"extra_forbidden": "is unknown", "missing": "is missing"}

_NO_BRACKETS = str.maketrans("", "", "[]")

_FORMS = frozenset({"NamedFunction", "NamedTool", "bool", "float", "int", "str"})
"""The names that pydantic puts into a location for the form of a value that may have several; names
in brackets are others."""


def first_error(error: ValidationError) -> tuple[Location, str]:
    """Return where the first field at fault is wrong, and what is expected there.

    Of a value that may have several forms it is where the one that was followed furthest ends, and
    of an object with a wrong ``type``, that: the other fields follow from it.
    """
    found: dict[Location, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False, include_input=False):
        location = tuple(part for part in item["loc"] if not _is_form(part))
        found.setdefault(location, []).append(item)
    field = next(iter(found))[:1]
    location = max((place for place in found if place[:1] == field), key=_distance)
    return location, _reason(found[location])


def _reason(items: list[ErrorDetails]) -> str:
    expected = dict.fromkeys(map(_expected, items))
    if "" not in expected:
        return f"{' or '.join(expected)} is expected"
    return _REASONS.get(items[0]["type"], items[0]["msg"])


def _expected(item: ErrorDetails) -> str:
    kind = item["type"]
    if kind in _EXPECTED:
        context: dict[str, Any] = item["ctx"]
        return _EXPECTED[kind].format_map({**context, "types": _types(context)})
    return _KINDS.get(kind.split("_")[0], "") if kind.endswith(_KIND_ERRORS) else ""


def _types(context: Mapping[str, Any]) -> str:
    """Name the tags of a union, which are types in brackets."""
    *others, last = str(context.get("expected_tags", "")).translate(_NO_BRACKETS).split(", ")
    return f"{', '.join(others)} or {last}" if others else last


def _distance(location: Location) -> tuple[int, list[int], bool]:
    places = [part for part in location if isinstance(part, int)]
    return len(location), places, location[-1:] == ("type",)


def _is_form(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part in _FORMS)
