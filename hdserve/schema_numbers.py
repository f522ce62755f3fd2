"""Numbers of a JSON Schema, which a grammar must hold exactly or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import isfinite, lcm
from typing import Any

from hdserve.schema_parts import NAMED_SCHEMAS

_MAX_DIVISOR_STATES = 40_000
"""The most states of ``multipleOf``, which compile in at most about 0.2 s and 20 MB."""

_MAX_INT = 2**63 - 1
_NEXT = {"minimum": 0, "maximum": 0, "exclusiveMinimum": 1, "exclusiveMaximum": -1}
"""By bound keyword, the distance from an integer bound to the first integer that it allows."""


def has_too_many_multiples(schema: Any) -> bool:
    """Return whether the ``multipleOf`` numbers of a schema need too many states.

    Multiples of n need n states, and those of several numbers at once their least common
    multiple.
    """
    divisors, limit = [*_divisors(schema)], _MAX_DIVISOR_STATES
    return sum(divisors) > limit or sum(divisors) + lcm(*divisors) > limit


def _divisors(schema: Any) -> Iterator[int]:
    """Yield every ``multipleOf`` in a schema, without its decimal point."""
    if isinstance(schema, (list, tuple)):
        for item in schema:
            yield from _divisors(item)
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if isinstance(value, (list, tuple, Mapping)):  # perhaps a property of that name
                yield from _divisors(value)
            elif key != "multipleOf":
                continue
            elif isinstance(value, int):
                yield max(1, value)
            elif isinstance(value, float) and isfinite(value):
                yield max(1, Fraction(str(value)).numerator)


def check_numbers(schema: Any) -> None:
    """Refuse numbers that would change when they are stored as floating-point numbers.

    Raises:
        ValueError: there is one.
    """
    for key, number in _numbers(schema):
        if not _is_held_as(key, number):
            raise ValueError(f"{key}: a number has more digits than can be held")


def are_held(key: str, value: Any) -> bool:
    """Return whether the numbers in the value of one keyword, if it is a bound or has values of
    the text, are stored exactly."""
    if key in ("const", "enum"):
        return all(_is_held_as(key, number) for number in _numbers_in(value))
    is_bound = key in _NEXT and isinstance(value, (int, float))
    return not is_bound or _is_held_as(key, value)


def _is_held_as(key: str, number: int | float) -> bool:
    first = number if number % 1 else int(number) + _NEXT.get(key, 0)
    return _is_held(number) and _is_held(first)


def _numbers(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of values and bounds in a schema, with their keywords."""
    if isinstance(schema, (list, tuple)):
        for item in schema:
            yield from _numbers(item)
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in NAMED_SCHEMAS and isinstance(value, Mapping):
                yield from _numbers([*value.values()])
            elif key in ("const", "enum"):
                yield from ((key, number) for number in _numbers_in(value))
            elif key in _NEXT and isinstance(value, (int, float)):
                yield key, value
            else:
                yield from _numbers(value)


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, Mapping):
        yield from _numbers_in([*value.values()])
    elif isinstance(value, (int, float)):
        yield value


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
