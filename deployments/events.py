"""Events of a stream, and how those are written that have names."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def named_event(event: Event) -> bytes:
    """Write an event, which has its name inside, too."""
    data = json.dumps(event, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
