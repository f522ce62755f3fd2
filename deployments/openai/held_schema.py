"""Schemas of requests, as far as output can be held to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdserve.errors import Unsupported
from hdserve.schema import Held, enforceable


def held_schema(schema: Mapping[str, Any], path: str, *, is_strict: bool) -> Held:
    """Return what of ``schema`` is enforced, with the keywords that are not by their paths in the
    request.

    Args:
        path: of the schema in the request.
        is_strict: whether the client wants all of it enforced.

    Raises:
        ValueError: it is too large or too deep, or a reference leads to itself.
        Unsupported: it is strict, and a keyword cannot be enforced.
    """
    found = enforceable(schema)
    unheld = tuple(f"{path}.{keyword}" for keyword in found.unheld)
    if is_strict and unheld:
        raise not_held(unheld[0])
    return found._replace(unheld=unheld)


def not_held(path: str) -> Unsupported:
    """Return the error that a keyword, at a path in the request, cannot be enforced."""
    shown = path.encode(errors="backslashreplace").decode()
    return Unsupported(f"this keyword cannot be enforced: {shown}", path.partition(".")[0])
