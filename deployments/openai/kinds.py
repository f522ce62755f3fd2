"""What the ``type`` of a part of a request may be, and how another one is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BeforeValidator

from hdserve.errors import Unsupported

_MAX_KIND_CHARACTERS = 50


def named_kind(value: Any) -> str | None:
    """Return the ``type`` of an object, if it says one."""
    found = value.get("type") if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else None


def unsupported(things: str, kind: str, param: str | None) -> Unsupported:
    """Return the error that says ``things`` of a type are not offered."""
    shown = repr(kind[:_MAX_KIND_CHARACTERS])
    return Unsupported(f"{things} of type {shown} are not supported", param)


def only_kinds(things: str, known: Collection[str], param: str | None) -> BeforeValidator:
    """Return a validator that refuses objects whose ``type`` is not ``known`` before their other
    fields are validated.

    Args:
        things: what such an object is one of.
        param: the parameter it is in.
    """

    def check(value: Any) -> Any:
        kind = named_kind(value)
        if kind is not None and kind not in known:
            raise unsupported(things, kind, param)
        return value

    return BeforeValidator(check)
