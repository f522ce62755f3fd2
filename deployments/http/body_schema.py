"""How the JSON bodies of routes are documented in ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def body_schema(model: Any) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route whose body is a pydantic ``model``."""
    schema = model.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return ``schema`` with its references replaced by the definitions, since they would point
    into the whole document; no definition contains itself."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        schema = definitions[name] | {key: schema[key] for key in schema if key != "$ref"}
    return {key: _inlined(value, definitions) for key, value in schema.items()}
