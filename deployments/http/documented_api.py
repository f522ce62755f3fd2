"""The application's OpenAPI schema, completed by what FastAPI cannot see."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from deployments.http.access import is_open

_SCHEME = "api_key"
_NO_KEY: dict[str, list[str]] = {}
_KEY: dict[str, list[str]] = {_SCHEME: []}

_FRAMEWORK_SCHEMAS = ("HTTPValidationError", "ValidationError")


class DocumentedApi(FastAPI):
    """Says in ``/openapi.json`` which operations need a key, and lists no unused statuses.

    Keys are checked before any route is found, and bodies are read by the routes: FastAPI never
    finds a parameter wrong, and so never sends its 422.

    Args:
        needs_key: whether a key is required.
    """

    def __init__(self, *, needs_key: bool, **options: Any) -> None:
        super().__init__(**options)
        self._security = [_KEY] if needs_key else [_NO_KEY, _KEY]

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        components = schema.setdefault("components", {})
        if "securitySchemes" in components:
            return schema
        description = "A client's key, or the administrator's"
        scheme = {"type": "http", "scheme": "bearer", "description": description}
        components["securitySchemes"] = {_SCHEME: scheme}
        for name in _FRAMEWORK_SCHEMAS:
            components.get("schemas", {}).pop(name, None)
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                is_for_admin = "403" in operation["responses"]
                if not is_open(path):
                    operation["security"] = [_KEY] if is_for_admin else self._security
        return schema
