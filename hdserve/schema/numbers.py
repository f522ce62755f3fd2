"""Numbers of a JSON Schema, which a grammar must hold exactly or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import isfinite, lcm
from typing import Any

from hdserve.schema.parts import NAMED_SCHEMAS, Schema, members, walk

_MAX_DIVISOR_STATES = 40_000
"""The most states of ``multipleOf``, which compile in at most about 0.2 s and 20 MB."""

_MAX_INT = 2**63 - 1
_NEXT = {"minimum": 0, "maximum": 0, "exclusiveMinimum": 1, "exclusiveMaximum": -1}
"""By bound keyword, the distance from an integer bound to the first integer that it allows."""


def check_numbers(schema: Schema) -> None:
    """Refuse numbers that a grammar cannot hold.

    Raises:
        ValueError: those of ``multipleOf`` need too many states, or one would change when it is
            stored as a floating-point number.
        RecursionError: it is too deep.
    """
    if has_too_many_multiples(schema):
        raise ValueError("multipleOf: the numbers are too large, or too many together")
    _check_digits(schema)


def has_too_many_multiples(schema: Schema) -> bool:
    """Return whether the ``multipleOf`` numbers of a schema need too many states.

    Multiples of n need n states, and those of several numbers at once their least common
    multiple.
    """
    divisors, limit = [*_divisors(schema)], _MAX_DIVISOR_STATES
    return sum(divisors) > limit or sum(divisors) + lcm(*divisors) > limit


def _divisors(schema: Schema) -> Iterator[int]:
    """Yield every ``multipleOf`` in a schema, without its decimal point."""
    for part in walk(schema, members):
        value = part.get("multipleOf") if isinstance(part, Mapping) else None
        if isinstance(value, int):
            yield max(1, value)
        elif isinstance(value, float) and isfinite(value):
            yield max(1, Fraction(str(value)).numerator)


def _check_digits(value: Any) -> None:
    if not isinstance(value, Mapping):
        for item in members(value):
            _check_digits(item)
        return
    for key, item in value.items():
        if not are_held(key, item):
            raise ValueError(f"{key}: a number has more digits than can be held")
        if key not in ("const", "enum"):
            is_named = key in NAMED_SCHEMAS and isinstance(item, Mapping)
            _check_digits([*item.values()] if is_named else item)


def are_held(key: str, value: Any) -> bool:
    """Return whether the numbers in the value of one keyword, if it is a bound or has values of
    the text, are stored exactly."""
    if key in ("const", "enum"):
        parts = walk(value, members)
        return all(_is_held_as(key, part) for part in parts if isinstance(part, (int, float)))
    is_bound = key in _NEXT and isinstance(value, (int, float))
    return not is_bound or _is_held_as(key, value)


def _is_held_as(key: str, number: int | float) -> bool:
    first = number if number % 1 else int(number) + _NEXT.get(key, 0)
    return _is_held(number) and _is_held(first)


def _is_held(number: int | float) -> bool:
    """Tell whether llguidance stores ``number`` exactly; an integer must also fit 64 bits."""
    if isinstance(number, float):
        if not isfinite(number):
            return True  # an error will be reported
        if not number.is_integer():
            return _as_read(number) == number
    whole = int(number)
    return -_MAX_INT <= whole <= _MAX_INT and min(int(float(whole)), _MAX_INT) == whole


def _as_read(number: float) -> float:
    """Read ``number`` as llguidance does: its digits as an integer, rounded, then divided."""
    digits, _, exponent = repr(number).partition("e")
    whole, _, places = digits.partition(".")
    return int(whole + places) / float(f"1e{len(places) - int(exponent or 0)}")
