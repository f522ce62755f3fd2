"""Server-sent events, with and without names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]


def server_sent_event(data: Mapping[str, Any]) -> bytes:
    """Write one event of a stream."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def named_event(event: Event) -> bytes:
    """Write an event that also contains its name."""
    return f"event: {event['type']}\n".encode() + server_sent_event(event)
