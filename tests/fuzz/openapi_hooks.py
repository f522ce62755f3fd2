"""What schemathesis does differently here: half of what it sends names a model there is."""

from __future__ import annotations

from typing import Any

import schemathesis

MODEL = "m"


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Otherwise every request would be answered with 404 before anything else is looked at."""
    if (
        isinstance(body, dict)
        and isinstance(body.get("model"), str)
        and len(body["model"]) % 2 == 0
    ):
        return {**body, "model": MODEL}
    return body


@schemathesis.hook
def map_path_parameters(_context: Any, parameters: Any) -> Any:
    """The same for models in a path."""
    model = (parameters or {}).get("model")
    if isinstance(model, str) and len(model) % 2 == 0:
        return {**parameters, "model": MODEL}
    return parameters
