"""What a JSON Schema says of values: their types, and which there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdserve.schema.parts import Schema


def kinds_of(schema: Schema) -> set[str]:
    """Return the types of a schema; empty if it allows any."""
    kinds = set(texts_in(schema.get("type")))
    return kinds - {"integer"} | {"number"} if "integer" in kinds else kinds


def values_of(schema: Schema) -> Sequence[Any] | None:
    """Return the only values of a schema; ``None`` if it does not list them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, (list, tuple)) else None


def texts_of(schema: Schema, name: str) -> set[str]:
    """Return the texts that a property can be, if it can be nothing else; otherwise none."""
    properties = schema.get("properties")
    item = properties.get(name) if isinstance(properties, Mapping) else None
    values = values_of(item) if isinstance(item, Mapping) else None
    texts = set(texts_in(values))
    return texts if values is not None and len(texts) == len(values) else set()


def required_by(schema: Schema) -> list[str]:
    """Return the properties that an object must have, each once."""
    return [*dict.fromkeys(texts_in(schema.get("required")))]


def texts_in(value: Any) -> list[str]:
    """Return the texts in a list of a schema, or a single text used in place of a list."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, str)]
