"""Events of a stream, and the form of those that have names."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def named_event(event: Event) -> bytes:
    """Write an event that also contains its name."""
    data = json.dumps(event, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
