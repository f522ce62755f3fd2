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
