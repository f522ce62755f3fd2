"""Patterns of a JSON Schema, of which grammars take those without a memory or a look elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hdserve.schema.parts import Schema

_PART = re.compile(
    r"\\(?P<escape>.)|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|\((?P<group>\?(?:<?[=!]|[>#(&|]|P[=>]|R))?|.",
    re.DOTALL,
)
"""A part of a pattern; a set of characters is one."""

_ESCAPES = frozenset("aftnrvxuUdDsSwWpP")
"""The letters that mean something behind a backslash to a grammar as well: others stand for a group
that has matched, or for a place between characters."""

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ZOD_HOSTNAME = (
    rf"^(?=.{{1,253}}\.?$){_LABEL}"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)
_ZOD_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
_DOMAIN = r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_ZOD_EMAIL = rf"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@{_DOMAIN}"
_EMAIL = rf"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@{_DOMAIN}"

_SAME: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("duration", _ZOD_DURATION): {},
    ("email", _ZOD_EMAIL): {"pattern": _EMAIL},
    ("hostname", _ZOD_HOSTNAME): {"maxLength": 253},
}
"""By format and pattern, what says the same as the pattern beside that format, which is held.  They
are those of zod that look ahead."""


def is_readable(pattern: str) -> bool:
    """Return whether a grammar may take ``pattern``, which may be wrong all the same."""
    return not any(
        part["group"] or ((part["escape"] or "*").isalnum() and part["escape"] not in _ESCAPES)
        for part in _PART.finditer(pattern)
    )


def without_look_around(schema: Schema) -> Schema | None:
    """Return what says the same as the pattern of ``schema``, if it is a well-known one; ``None``
    if it has no form that grammars take."""
    same = _SAME.get((str(schema.get("format")), str(schema.get("pattern"))))
    length = schema.get("maxLength")
    if same is None or "maxLength" not in same or not isinstance(length, (int, float)):
        return same
    return {"maxLength": min(length, same["maxLength"])}
