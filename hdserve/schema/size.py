"""The size of a JSON Schema, of which no grammar may be possible in time."""

from __future__ import annotations

from itertools import islice
from typing import Any

from hdserve.schema.parts import SCALARS, members, walk

_MAX_VALUES = 100_000
"""The most different values (texts, numbers and so on) of a schema, about as many as a grammar can
be made of.  Examining each of a million takes seconds."""


def check_size(schemas: Any) -> None:
    """Refuse a schema, or a list of schemas, that no grammar can be made of in time.

    Raises:
        ValueError: a schema, or a list of them, has more values than a grammar can be made of.
    """
    values = (True for part in walk(schemas, members) if isinstance(part, SCALARS))
    if any(islice(values, _MAX_VALUES, None)):
        raise ValueError(f"more than {_MAX_VALUES} values are too many for a schema")
